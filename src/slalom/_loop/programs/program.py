"""Compiles a function once per structure of its arguments, and never waits for its result.

The meaning is that of `eqx.filter_jit`: arrays are traced, everything else is static. That function
is not used, for three reasons. It waits for the result on every call, so that the host cannot
prepare the next step while the device works. It costs more host time per call. And it cannot say
which leaves of the arguments get new values, which we need to donate them, to keep their sharding,
and to return all other leaves as the same objects.

Here a call flattens its arguments once. Everything that follows from their structure is worked out
once per structure and kept in a `Signature`, together with the function that is compiled for it. A
program with runtime checks is the exception: `eqx.filter_jit` compiles it, since there the wait is
what turns a failed check into Equinox's own error.

A signature dies with the functions among its arguments. Otherwise a program would keep every lambda
that was ever passed to it, with the data in its closure. Those of optimizers die with these
(`compiled.family_of`).
"""

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ...tree.packed import pack, unpack
from ...tree.paths import dotted, example
from ...tree.tracing import equations
from ...tree.types import Tracer, is_deleted, under_jit
from ..binding.binding import named_leaves
from ..binding.loop_warnings import watch
from ..binding.model import strong
from .arguments import Arguments, Body, Bound, Carried, Homes, Other, Signature, identity
from .interrupts import compiling

MOST_SIGNATURES = 512
_CALLBACK = "pure_callback"
_STATIC, _CONCRETE, _TRACED, _FOREIGN = 0, 1, 2, 3

DONATED = """This model or optimizer was donated to an earlier call of the training step, so it \
can no longer be used ({paths}). Use the results of that call:
    model, opt, loss = step(model, opt, ...)
or, if Ctrl-C came before they were assigned,
    model, opt, loss = step.last
or disable donation, which needs memory for a copy and survives an error in the step:
    step = sl.train_step(loss_fn, donate={keeps_it})"""

UNHASHABLE = """The leaf '{path}' of type {type} is not an array, so it is static and must be \
hashable, but it is not. Pass an array instead, or mark the field that holds it as static."""

NO_NUMBERS = """The leaf '{path}' is an array of dtype {dtype}, and JAX computes with numbers. \
Convert it first, such as by `x.astype(np.float32)`, or leave it out of the arguments."""


class _HasRuntimeChecks(Exception):
    """Leaves a trace whose program `eqx.filter_jit` must compile."""


@dataclasses.dataclass(eq=False)
class Program(Generic[Arguments, Other]):
    """A function that gives some leaves of its arguments new values, compiled once per structure.

    **Arguments:**

    - `body`: maps the arguments, a named tuple, to the new values of the carried leaves, in order,
        and any other tree.
    - `carried`: maps the arguments, and the same tree with the position of each leaf in its place,
        to the leaves that are carried. Called once per structure.
    - `donated`: the same as `carried` for the leaves that are donated, all of them carried.
        Defaults to none.
    - `watched`: what the user calls, such as `opt.step`, to warn of functions that are new and of
        numbers that differ each time. `None` warns of nothing.
    - `family`: maps the arguments to the mapping that keeps what is compiled for them. Defaults to
        one that lives as long as this object.
    """

    body: Body[Arguments, Other]
    carried: Callable[[Arguments, Arguments], Carried]
    _: dataclasses.KW_ONLY
    donated: Callable[[Arguments, Arguments], Carried] = lambda arguments, at: {}
    watched: str | None = None
    family: "Callable[[Arguments], Family] | None" = None
    signatures: "Family" = dataclasses.field(init=False, default_factory=lambda: Family())

    def __call__(self, arguments: Arguments) -> tuple[Arguments, Other]:
        """The arguments with new values of the carried leaves, and the body's other result."""
        leaves, structure = jax.tree.flatten(arguments)
        passed = leaves
        kinds = list(map(_kind, map(type, leaves)))
        if _FOREIGN in kinds:
            leaves, kinds, arguments = _with_arrays(arguments)
        if _TRACED in kinds:
            signature, packed = self._inline(arguments, leaves, structure, kinds)
        else:
            signature = self._signature(arguments, leaves, structure, kinds)
            shardings = signature.shardings(leaves)
            donated, kept = self._checked(signature, arguments, leaves)
            try:
                unshared = _unshared(donated, kept) if donated else donated
                packed = signature.compiled(unshared, kept, shardings)
            except _HasRuntimeChecks:
                signature.compiled = signature.checked
                packed = signature.checked(donated, kept, shardings)
            except (RuntimeError, ValueError):
                # This call deletes all arrays that it donates, or none, and no others.
                lost = [is_deleted(x) for x in donated if isinstance(x, jax.Array)]
                if any(map(is_deleted, kept)) or any(lost) > all(lost):
                    raise ValueError(_donated_earlier(arguments)) from None
                raise
            except TypeError:
                # JAX would name the position among all arrays.
                for path, x in jax.tree_util.tree_leaves_with_path(arguments):
                    if isinstance(x, np.ndarray) and x.dtype.kind in "OSUMm":
                        message = NO_NUMBERS.format(path=dotted(path), dtype=x.dtype)
                        raise TypeError(message) from None
                raise
        new, other = unpack(packed)
        for i, array in zip(signature.results, new, strict=True):
            passed[i] = array
        return structure.unflatten(passed), other

    def lower(self, arguments: Arguments) -> jax.stages.Lowered:
        """The lowered program for these arguments, for inspection."""
        leaves, kinds, arguments = _with_arrays(arguments)
        signature = self._signature(arguments, leaves, jax.tree.structure(arguments), kinds)
        return signature.compiled.lower(*signature.separate(leaves), signature.shardings(leaves))

    def _checked(
        self, signature: Signature, arguments: Arguments, leaves: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The arrays to donate and the others. Raises an error if some were donated earlier."""
        carried = signature.carried
        if self.watched is not None:
            if signature.calls is None:
                loss_fn = getattr(arguments, "loss", None)
                loss_fn = loss_fn.innermost if isinstance(loss_fn, Bound) else loss_fn
                shapes = [np.shape(leaves[i]) for i in carried]
                known = signature.structure, signature.statics, shapes
                signature.calls = watch(self.watched, self.body, loss_fn, *known)
            signature.calls[0] += 1
        # A donated tree lost all its buffers at once, so two of them are enough to tell.
        if any(is_deleted(leaves[i]) for i in carried[:1] + carried[-1:]):
            raise ValueError(_donated_earlier(arguments))
        if any(getattr(leaves[i], "weak_type", False) for i in carried):
            # So that the second call has the same types as the first.
            leaves = [strong(x) if i in carried else x for i, x in enumerate(leaves)]
        return signature.separate(leaves)

    def _inline(
        self, arguments: Arguments, leaves: list[Any], structure: Any, kinds: list[int]
    ) -> tuple[Signature, Any]:
        """A call under an outer transformation, where nothing is donated."""
        traced = (x for x, kind in zip(leaves, kinds, strict=True) if kind == _TRACED)
        if all(map(under_jit, traced)):
            # Not cached: a function among the arguments may hold tracers of this trace.
            statics = {i: leaves[i] for i, kind in enumerate(kinds) if kind == _STATIC}
            carried = self.carried(arguments, example(structure))
            signature = Signature(structure, statics, carried, ())
            # Tracers do not show where the arrays are.
            separate = signature.separate(leaves)
            return signature, signature.run(self.body, *separate, signature.homes)
        # Under an eager `vmap` or `grad`, a jit makes one program of the step.
        signature = self._signature(arguments, leaves, structure, kinds)
        separate, shardings = signature.separate(leaves), signature.shardings(leaves)
        try:
            return signature, signature.nested(*separate, shardings)
        except _HasRuntimeChecks:
            return signature, signature.run(self.body, *separate, shardings)

    def _signature(
        self, arguments: Arguments, leaves: list[Any], structure: Any, kinds: list[int]
    ) -> Signature:
        statics = {i: leaves[i] for i, kind in enumerate(kinds) if kind == _STATIC}
        key = self.body, _key(arguments, statics, structure)
        signatures = self.signatures if self.family is None else self.family(arguments)
        signature = signatures.get(key)
        if signature is None:
            # Signatures with static leaves that no reference can be made to would never be freed.
            if len(signatures) >= MOST_SIGNATURES:
                signatures.clear()
            these = weakref.ref(signatures)
            at = example(structure)
            signature = signatures[key] = Signature(
                structure,
                statics,
                self.carried(arguments, at),
                tuple(self.donated(arguments, at)),
                # A lambda is not type-checked at runtime. It may run while Python ends, when
                # modules are empty, and a hash that a user wrote may need one.
                lambda dead, is_ending=sys.is_finalizing: (
                    None if is_ending() else (these() or {}).pop(key, None)
                ),
            )
            self._compile(signature)
        return signature

    def _compile(self, signature: Signature) -> None:
        """Gives a signature its functions, which are compiled when they are called."""
        # The signature holds the functions, which must not hold it: without a cycle, all of it is
        # freed at once. It is alive while they are traced, as that is within a call.
        of_this = weakref.ref(signature)
        body = self.body

        def run(donated: list[Any], kept: list[Any], shardings: Homes) -> PyTree:
            now = of_this()
            assert now is not None
            return pack(now.run(body, donated, kept, shardings))

        def program(donated: list[Any], kept: list[Any], shardings: Homes) -> PyTree:
            compiling()
            # Traced here and inlined below, so that the body runs once and its program can be
            # searched for runtime checks before it is compiled. The trace of a new object is not
            # kept.
            inner = jax.jit(functools.partial(run, shardings=shardings), inline=True)
            if _has_runtime_checks(inner.trace(donated, kept).jaxpr.jaxpr):
                raise _HasRuntimeChecks
            return inner(donated, kept)

        program.__name__ = program.__qualname__ = body.__name__.strip("_")
        signature.nested = signature.compiled = jax.jit(program, static_argnums=2)
        if signature.donated:
            signature.compiled = jax.jit(program, static_argnums=2, donate_argnums=0)
        signature.checked = eqx.filter_jit(run)


class Family(dict[Hashable, Any]):
    """What is compiled, by what it is compiled for: signatures, by the body of their program and by
    the structure and the static leaves of its arguments."""

    __slots__ = ("__weakref__",)


def _key(arguments: PyTree, statics: dict[int, Any], structure: Any) -> Hashable:
    # With the types: 1 == True == 1.0 would otherwise share a program.
    key = (structure, tuple((i, type(x), identity(x)) for i, x in statics.items()))
    try:
        hash(key)
    except TypeError:
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
            try:
                hash(leaf if _kind(type(leaf)) == _STATIC else None)
            except TypeError:
                message = UNHASHABLE.format(path=dotted(path), type=type(leaf).__name__)
                raise TypeError(message) from None
        raise
    return key


def _with_arrays(arguments: Arguments) -> tuple[list[Any], list[int], Arguments]:
    """The leaves, their kinds, and the arguments, with tensors of other libraries as arrays."""
    named, structure = jax.tree_util.tree_flatten_with_path(arguments)
    leaves = [_as_array(path, x) if _kind(type(x)) == _FOREIGN else x for path, x in named]
    return leaves, list(map(_kind, map(type, leaves))), structure.unflatten(leaves)


def _as_array(path: Any, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except (RuntimeError, TypeError, ValueError) as error:
        kind = f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"
        raise TypeError(
            f"The leaf '{dotted(path)}' of type {kind} cannot be converted to an array: {error} "
            "Convert it first. For PyTorch, write `jnp.asarray(x.detach().cpu().numpy())`."
        ) from error


@functools.cache
def _kind(cls: type) -> int:
    """Whether leaves of a type are static, arrays, tracers, or become arrays."""
    if issubclass(cls, Tracer):
        return _TRACED
    if issubclass(cls, jax.Array | np.ndarray | np.generic):
        return _CONCRETE
    return _FOREIGN if hasattr(cls, "__array__") else _STATIC


def _unshared(donated: list[Any], kept: list[Any]) -> list[Any]:
    """The arrays to donate, with copies of arrays that occur twice or are also kept."""
    identities = {id(x) for x in donated}
    if len(identities) == len(donated) and identities.isdisjoint(map(id, kept)):
        return donated
    seen = {id(x) for x in kept}
    unshared = []
    for x in donated:
        unshared.append(jax.numpy.copy(x) if id(x) in seen else x)
        seen.add(id(x))
    return unshared


def _donated_earlier(arguments: PyTree) -> str:
    """The message for arguments that were donated earlier."""
    paths = [path for path, x in named_leaves(arguments) if is_deleted(x)]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    keeps_it = '"opt"' if all(path.startswith("model") for path in paths) else "False"
    return DONATED.format(paths=", ".join(paths[:3]) + more, keeps_it=keeps_it)


def _has_runtime_checks(jaxpr: Any) -> bool:
    """Whether a program contains `eqx.error_if`, which calls back to the host to raise."""
    calls = (e.params.get("callback") for e in equations(jaxpr) if e.primitive.name == _CALLBACK)
    functions = (getattr(callback, "callback_func", callback) for callback in calls)
    return any(getattr(f, "__module__", "") == eqx.error_if.__module__ for f in functions)
