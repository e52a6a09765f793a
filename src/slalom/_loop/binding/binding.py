"""Binds a transform to parameters: checks the pair, and splits it into arrays and static data."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding

from ... import tree
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.marks import PARAM_LIKE, PER_PARAM, SPREAD
from ..._core.state.slots import slots
from ..._core.state.walk import transforms
from ..._core.text.messages import uncalled
from ...tree.memory import is_on_host, to_device, to_host
from ...tree.paths import example, leaf_paths
from ...tree.types import Params, PyTree, Tracer
from ...where.resolve import Where
from ..sharding.mesh import mesh_sharding, spread_spec
from ..sharding.sharded_state import StateSharding
from .names import names_of


@dataclasses.dataclass(frozen=True)
class Binding:
    """The static part of an optimizer."""

    structure: Any
    """The structure of the tree (transform, (state, count))."""
    rules: int
    """The number of arrays that belong to the transform. They come first."""
    statics: tuple[tuple[int, type, Any], ...]
    """Leaves that are not arrays, such as the functions in a learned optimizer's network."""
    trainable: Where | None
    params: Any
    """The structure of the trainable parameters at binding."""
    sharding: StateSharding | None = None
    """Where the parameters and the state were at binding, or where `Optimizer.shard_state` put
    it. Tracers do not show it."""

    @functools.cached_property
    def guarded(self) -> bool:
        """Whether a transform checks its state on the host before each step."""
        transform, _ = example(self.structure)
        return any(part.module.guard is not None for part in transforms(transform))

    @functools.cached_property
    def readings(self) -> dict[Any, Any]:
        """The compiled readings of optimizers with this structure, by name."""
        return {}

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The full path of each array."""
        transform, (state, _) = example(self.structure)
        statics = {i for i, _, _ in self.statics}
        names = names_of(transform, state, self.structure.num_leaves)
        return tuple(name for i, name in enumerate(names) if i not in statics)

    def __reduce__(self) -> Any:
        # JAX does not pickle the structure of a tree of modules, but any tree that has it can be.
        # A mesh cannot be pickled either, nor are pickled arrays loaded onto one.
        rest = (self.rules, self.statics, self.trainable)
        return _unpickle, (example(self.structure), example(self.params), *rest)


def _unpickle(bound_tree: PyTree, params: PyTree, *rest: Any) -> Binding:
    rules, statics, trainable = rest
    structure, bound = jax.tree.structure(bound_tree), jax.tree.structure(params)
    return Binding(structure, rules, statics, trainable, bound)


def bind(bound_tree: Any, trainable: Where | None, params: Any) -> tuple[tuple[Any, ...], Binding]:
    """Splits (transform, (state, count)) into arrays and static data."""
    leaves, structure = jax.tree.flatten(bound_tree)
    statics = tuple((i, type(x), x) for i, x in enumerate(leaves) if not tree.is_array(x))
    skip = {i for i, _, _ in statics}
    arrays = tuple(x for i, x in enumerate(leaves) if i not in skip)
    total = jax.tree.structure(bound_tree[0]).num_leaves
    rules = total - sum(i < total for i in skip)
    return arrays, Binding(structure, rules, statics, trainable, params)


def init_state(transform: AbstractTransform[Any], params: Params) -> Any:
    """The initial state. That of parameters in the memory of the host is there too."""
    named = zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
    on_host = {path for path, x in named if is_on_host(x)}
    if not on_host:
        return transform.init(params)

    # Compiled, so that a rule may compute with the parameters, which is only possible on the
    # device, while those that it does not read stay on the host.
    @eqx.filter_jit
    def init(params: Params) -> Any:
        state = transform.init(to_device(params))
        leaves, structure = jax.tree.flatten(state)
        places = slots(transform, state, leaf_paths(params))
        marks = (PARAM_LIKE, PER_PARAM, SPREAD)
        visits = [slot.mark in marks and slot.param in on_host for slot in places]
        return structure.unflatten(
            [to_host(x) if visit else x for x, visit in zip(leaves, visits, strict=True)]
        )

    return init(params)


def is_abstract(model: PyTree) -> bool:
    """Whether a model has shapes and dtypes in place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model))


def no_transform(given: Any, model: PyTree) -> str:
    """The message for a first argument that is not a transform."""
    message = "The first argument of an optimizer must be a transform such as `sl.adam(1e-3)`, got "
    if isinstance(model, AbstractTransform):
        kind = type(given).__name__
        return f"{message}a {kind}. Write `sl.Optimizer(tx, model)`."
    return f"{message}{given!r}.{uncalled(given)}"


def on_param_devices(bound_tree: PyTree, params: Params) -> PyTree:
    """Moves everything to the devices of the parameters.

    What is not there yet is replicated, except for what its field spreads over the devices.
    """
    first = next((p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)), None)
    if first is None or isinstance(first, Tracer) or not first.committed:
        return bound_tree
    sharding = first.sharding
    spread = _spread(bound_tree, params) if isinstance(sharding, NamedSharding) else {}

    def put(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        if id(x) in spread and x.sharding.is_fully_replicated:
            return jax.device_put(x, spread[id(x)])
        if x.committed and x.sharding.device_set == sharding.device_set:
            return x
        if not isinstance(sharding, NamedSharding):
            memory = next(iter(sharding.device_set)).default_memory().kind
            return jax.device_put(x, sharding.with_memory_kind(memory))
        replicated = tree.canonical_spec(sharding.mesh, (), x.ndim)
        return jax.device_put(x, NamedSharding(sharding.mesh, replicated))

    return jax.tree.map(put, bound_tree)


def _spread(bound_tree: PyTree, params: Params) -> dict[int, NamedSharding]:
    """The shardings of the arrays that are divided among the devices of a parameter, by id."""
    transform, (state, _) = bound_tree
    homes = dict(zip(leaf_paths(params), map(mesh_sharding, jax.tree.leaves(params)), strict=True))
    found = {}
    for x, slot in zip(jax.tree.leaves(state), slots(transform, state, list(homes)), strict=True):
        home = homes.get(slot.param or "")
        if slot.mark == SPREAD and home is not None and tree.is_array(x):
            spec = spread_spec(x.shape, tuple(home.spec), home.mesh)
            found[id(x)] = home.update(spec=tree.canonical_spec(home.mesh, spec, x.ndim))
    return found
