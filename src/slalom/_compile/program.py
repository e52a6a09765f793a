"""The one compile: arrays are traced, the rest is static, and nothing waits for the result.

The meaning is that of `eqx.filter_jit`. The implementation is not: that one waits for every
result and costs more host time. Here a call flattens its arguments once, and everything that
follows from their structure (what is static, what is carried forward) is worked out once per
structure and kept in a `Plan`, which is also the static argument of the compiled function.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._paths import dotted
from .._types import Tracer, under_jit

MOST_PLANS = 512
_STATIC, _CONCRETE, _TRACED = 0, 1, 2
_kinds: dict[type, int] = {}

DONATED = """This model or optimizer was donated: an earlier call of the training step took its \
buffers for its own result, so it can no longer be read ({paths}). Go on with what the step \
returned:
    model, opt, loss = step(model, opt, ...)
or keep what you pass, at the cost of a copy in memory:
    step = sl.train_step(loss_fn, donate=False)"""

UNHASHABLE = """The leaf '{path}' of type {type} is no array, so it is static and must be \
hashable, which it is not. Wrap it in an array, or mark the field that holds it as static."""


class Plan:
    """What follows from the structure of a call's arguments alone."""

    def __init__(
        self,
        structure: Any,
        statics: dict[int, Any],
        carried: tuple[int, ...],
        shardings: tuple[Any, ...],
    ):
        self.structure = structure
        self.statics = statics
        self.carried = carried
        self.shardings = shardings
        self.waits = False
        """Whether its program holds runtime checks, so that `eqx.filter_jit` compiles it."""
        others = {*carried, *statics}
        self.kept = tuple(i for i in range(structure.num_leaves) if i not in others)

    def arguments(self, carried: Any, kept: Any) -> Any:
        """The arguments, put together again."""
        leaves = [self.statics.get(i) for i in range(self.structure.num_leaves)]
        for positions, arrays in ((self.carried, carried), (self.kept, kept)):
            for i, array in zip(positions, arrays, strict=True):
                leaves[i] = array
        return self.structure.unflatten(leaves)

    def settle(self, new: list[Any]) -> list[Any]:
        """New values of the carried leaves, sharded as the old ones were.

        Left to itself the partitioner may choose otherwise, and the next call would compile anew.
        """
        if not self.shardings:
            return new
        pairs = zip(new, self.shardings, strict=True)
        return [x if sharding is None else _placed(x, sharding) for x, sharding in pairs]


class _Result:
    """A tree on its way out of a compiled function: arrays as children, the rest as structure.

    The structure travels with the compiled program. Kept in a cell beside it, it would go stale
    as soon as one program is replaced by another in the cache.
    """

    def __init__(self, arrays: list[Any], rest: Any):
        self.arrays = arrays
        self.rest = rest


jax.tree_util.register_pytree_node(
    _Result, lambda r: (r.arrays, r.rest), lambda rest, arrays: _Result(list(arrays), rest)
)


def pack(tree: Any) -> _Result:
    """A tree of arrays and anything else as a tree of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    statics = {i: x for i, x in enumerate(leaves) if _kind(x) == _STATIC}
    arrays = [x for i, x in enumerate(leaves) if i not in statics]
    return _Result(arrays, (structure, tuple(statics.items())))


def unpack(result: _Result) -> Any:
    """Undoes `pack`."""
    structure, statics = result.rest
    if not statics:
        return structure.unflatten(result.arrays)
    leaves, arrays = dict(statics), iter(result.arrays)
    return structure.unflatten(
        [leaves[i] if i in leaves else next(arrays) for i in range(structure.num_leaves)]
    )


class _HasRuntimeChecks(Exception):
    """Raised inside a trace to leave it: this program must be compiled by `eqx.filter_jit`."""


class Program:
    """A function that carries some of its arguments forward, compiled once per structure.

    **Arguments:**

    - `body`: from the arguments, one tree, to the new values of the carried leaves, in order,
        and any other tree.
    - `carried`: from the arguments to a tree of bools like them: the leaves that get new values.
        Asked once per structure.
    - `donate`: whether the carried leaves' memory is given away for their new values.
    """

    def __init__(
        self,
        body: Callable[[Any], tuple[list[Any], Any]],
        carried: Callable[[Any], Any],
        *,
        donate: bool = False,
    ):
        self._body = body
        self._carried = carried
        self._plans: dict[Hashable, Plan] = {}

        def program(plan: Plan, carried: list[Any], kept: list[Any]) -> _Result:
            # Traced here and inlined below, so that the body runs once and its program is seen
            # before it is compiled.
            def settled(carried: list[Any], kept: list[Any]) -> _Result:
                new, other = body(plan.arguments(carried, kept))
                return pack((plan.settle(new), other))

            inner = jax.jit(settled, inline=True)
            if _has_runtime_checks(inner.trace(carried, kept).jaxpr.jaxpr):
                raise _HasRuntimeChecks
            return inner(carried, kept)

        program.__name__ = program.__qualname__ = body.__name__.strip("_")
        self._compiled: Any = jax.jit(program, static_argnums=0, donate_argnums=1 if donate else ())
        self._nested: Any = jax.jit(program, static_argnums=0) if donate else self._compiled
        self._waiting = eqx.filter_jit(body)

    def __call__(self, arguments: Any) -> tuple[Any, Any]:
        """The arguments with the carried leaves' new values, and what else the body returned."""
        leaves, structure = jax.tree.flatten(arguments)
        kinds = [_kinds.get(type(x)) for x in leaves]
        if None in kinds:
            kinds = [_kind(x) for x in leaves]
        if _TRACED in kinds:
            plan, (new, other) = self._inline(arguments, leaves, structure, kinds)
        else:
            plan = self._plan(arguments, leaves, structure, kinds)
            new, other = self._run(arguments, plan, leaves)
        for i, array in zip(plan.carried, new, strict=True):
            leaves[i] = array
        return structure.unflatten(leaves), other

    def lower(self, arguments: Any) -> Any:
        """The lowered program for these arguments, to look at what is compiled."""
        leaves, structure = jax.tree.flatten(arguments)
        plan = self._plan(arguments, leaves, structure, [_kind(x) for x in leaves])
        return self._compiled.lower(plan, *_sorted(plan, leaves))

    def _run(self, arguments: Any, plan: Plan, leaves: list[Any]) -> tuple[list[Any], Any]:
        if not plan.waits:
            carried, kept = _sorted(plan, leaves)
            # A donated tree lost all its buffers at once: two are enough to ask.
            if any(getattr(x, "is_deleted", bool)() for x in carried[:1] + carried[-1:]):
                raise ValueError(DONATED.format(paths=_deleted(arguments)))
            try:
                return unpack(self._compiled(plan, _own_buffers(_strong(carried), kept), kept))
            except _HasRuntimeChecks:
                plan.waits = True
            except (RuntimeError, ValueError) as error:
                paths = _deleted(arguments) if "deleted" in str(error) else ""
                if not paths:
                    raise
                raise ValueError(DONATED.format(paths=paths)) from None
        return self._waiting(arguments)

    def _inline(
        self, arguments: Any, leaves: list[Any], structure: Any, kinds: Any
    ) -> tuple[Plan, tuple[list[Any], Any]]:
        """Under an outer transformation: nothing is donated."""
        traced = (x for x, kind in zip(leaves, kinds, strict=True) if kind == _TRACED)
        if all(map(under_jit, traced)):
            # Not remembered: a function among the arguments may hold tracers of this trace.
            statics = {i: leaves[i] for i, kind in enumerate(kinds) if kind == _STATIC}
            plan = self._make_plan(arguments, structure, statics)
            return plan, self._body(arguments)
        # Under an eager `vmap` or `grad`, a jit makes one program of the step.
        plan = self._plan(arguments, leaves, structure, kinds)
        try:
            return plan, unpack(self._nested(plan, *_sorted(plan, leaves)))
        except _HasRuntimeChecks:
            return plan, self._body(arguments)

    def _plan(self, arguments: Any, leaves: list[Any], structure: Any, kinds: Any) -> Plan:
        statics = {i: leaves[i] for i, kind in enumerate(kinds) if kind == _STATIC}
        key = _key(arguments, statics, structure)
        plan = self._plans.get(key)
        if plan is None:
            self._forget()
            plan = self._plans[key] = self._make_plan(arguments, structure, statics)
        if not plan.carried or _mesh_sharding(leaves[plan.carried[0]]) is None:
            return plan
        shardings = tuple(_mesh_sharding(leaves[i]) for i in plan.carried)
        key = (plan, shardings)
        placed = self._plans.get(key)
        if placed is None:
            placed = self._plans[key] = Plan(structure, statics, plan.carried, shardings)
        return placed

    def _forget(self) -> None:
        """Forgets all programs when they are many, as where each call brings a new lambda: they,
        and what such functions hold, would otherwise stay for ever."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
            self._compiled.clear_cache()
            self._nested.clear_cache()

    def _make_plan(self, arguments: Any, structure: Any, statics: dict[int, Any]) -> Plan:
        flags = structure.flatten_up_to(self._carried(arguments))
        carried = tuple(i for i, flag in enumerate(flags) if flag and i not in statics)
        return Plan(structure, statics, carried, ())


# --- meshes ---------------------------------------------------------------------------------


def _mesh_sharding(x: Any) -> Any:
    """How a concrete array lies on a mesh of several devices, or `None`."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    if AxisType.Explicit in sharding.mesh.axis_types:
        return _in_full(sharding, x.ndim)
    return sharding


@functools.lru_cache(maxsize=1024)
def _in_full(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """The same sharding with an entry for each axis of the array, as its type has it."""
    spec = sharding.spec
    return sharding.update(spec=PartitionSpec(*spec, *(None,) * (ndim - len(spec))))


def _placed(x: Any, sharding: NamedSharding) -> Any:
    """A traced array as it shall lie on a mesh."""
    # Along explicit axes that is a part of its type, and along others a wish to the partitioner.
    ways = (
        (AxisType.Explicit, jax.sharding.reshard),
        (AxisType.Auto, jax.lax.with_sharding_constraint),
    )
    axes = sharding.mesh.axis_names
    for kind, place in ways:
        names = [n for n, k in zip(axes, sharding.mesh.axis_types, strict=True) if k == kind]
        if names:
            own = sharding if len(names) == len(axes) else _along(names, sharding)
            x = place(x, own)
    return x


def _along(names: list[Any], sharding: NamedSharding) -> NamedSharding:
    """What a sharding says of some axes of its mesh."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec)
    spec = PartitionSpec(*(tuple(n for n in entry if n in names) for entry in entries))
    return sharding.update(spec=spec)


def _sorted(plan: Plan, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    return [leaves[i] for i in plan.carried], [leaves[i] for i in plan.kept]


def _strong(arrays: list[Any]) -> list[Any]:
    """Weakly typed arrays made strong, so that the second call finds what the first one left."""
    if not any(getattr(x, "weak_type", False) for x in arrays):
        return arrays
    return [jax.numpy.asarray(x, x.dtype) for x in arrays]


def _key(arguments: Any, statics: dict[int, Any], structure: Any) -> Hashable:
    # With the types: 1 == True == 1.0 would otherwise share a program.
    key = (structure, tuple((i, type(x), x) for i, x in statics.items()))
    try:
        hash(key)
    except TypeError:
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
            try:
                hash(leaf if _kind(leaf) == _STATIC else None)
            except TypeError:
                message = UNHASHABLE.format(path=dotted(path), type=type(leaf).__name__)
                raise TypeError(message) from None
        raise
    return key


def _kind(x: Any) -> int:
    """Whether a leaf is static, an array, or a tracer; looked up by type after the first."""
    kind = _kinds.get(type(x))
    if kind is None:
        if isinstance(x, Tracer):
            kind = _TRACED
        elif isinstance(x, jax.Array | np.ndarray | np.generic):
            kind = _CONCRETE
        else:
            kind = _STATIC
        _kinds[type(x)] = kind
    return kind


def _own_buffers(carried: list[Any], kept: list[Any]) -> list[Any]:
    """The carried arrays, with a copy of each that stands at a second place or is also kept."""
    taken = {id(x) for x in carried}
    if len(taken) == len(carried) and taken.isdisjoint(map(id, kept)):
        return carried
    seen = {id(x) for x in kept}
    own = []
    for x in carried:
        own.append(jax.numpy.copy(x) if id(x) in seen else x)
        seen.add(id(x))
    return own


def _deleted(arguments: Any) -> str:
    """The paths of the arrays that were donated before, the first few of them."""
    paths = [
        dotted(path)
        for path, x in jax.tree_util.tree_leaves_with_path(arguments)
        if isinstance(x, jax.Array) and x.is_deleted()
    ]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


# --- runtime checks -------------------------------------------------------------------------


def _has_runtime_checks(jaxpr: Any) -> bool:
    """Whether `eqx.error_if` stands anywhere in a program: it calls back to raise."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pure_callback":
            callback = equation.params.get("callback")
            function = getattr(callback, "callback_func", callback)
            if getattr(function, "__module__", "") == "equinox._errors":
                return True
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns") and _has_runtime_checks(inner):
                    return True
    return False
