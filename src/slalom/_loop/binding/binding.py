"""Binds a transform to parameters: checks the pair, and splits it into arrays and static data."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import NamedSharding

from ... import tree
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.marks import PARAM_LIKE, PER_PARAM, SPREAD
from ..._core.state.slots import slots
from ..._core.text.messages import uncalled
from ...tree.memory import is_on_host, to_device, to_host
from ...tree.packed import pack
from ...tree.paths import example, leaf_paths
from ...tree.types import Params, PyTree, Tracer
from ...where.resolve import Where
from ..sharding.mesh import mesh_sharding, spread_spec
from ..sharding.sharded_state import StateSharding, remembered


class Arrays(NamedTuple):
    """The parts of an optimizer, which it holds packed: so all of its leaves are arrays, and a call
    flattens no modules."""

    transform: Any
    state: Any
    count: Any


@dataclasses.dataclass(frozen=True)
class Binding:
    """The static part of an optimizer."""

    trainable: Where | None
    params: Any
    """The structure of the trainable parameters at binding."""
    sharding: StateSharding | None = None
    """Where the parameters and the state were at binding, or where `Optimizer.shard_state` put
    it. Tracers do not show it."""

    def __reduce__(self) -> Any:
        # JAX does not pickle the structure of a tree of modules, but any tree that has it can be.
        # A mesh cannot be pickled either, nor are pickled arrays loaded onto one.
        return _unpickle, (self.trainable, example(self.params))


def _unpickle(trainable: Where | None, params: PyTree) -> Binding:
    return Binding(trainable, jax.tree.structure(params))


def bind(
    transform: AbstractTransform[Any],
    state: Any,
    count: Any,
    params: Params,
    trainable: Where | None = None,
) -> tuple[Arrays, Binding]:
    """The fields of an optimizer with these parts, on the devices of the parameters."""
    arrays = on_param_devices(Arrays(transform, state, count), params)
    arrays = Arrays(pack(arrays.transform), pack(arrays.state), arrays.count)
    sharding = remembered(jax.tree.leaves(arrays[1:]), params)
    return arrays, Binding(trainable, jax.tree.structure(params), sharding)


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


def on_param_devices(arrays: Arrays, params: Params) -> Arrays:
    """Moves everything to the devices of the parameters.

    What is not there yet is replicated, except for what its field spreads over the devices.
    """
    first = next((p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)), None)
    if first is None or isinstance(first, Tracer) or not first.committed:
        return arrays
    sharding = first.sharding
    spread = _spread(arrays, params) if isinstance(sharding, NamedSharding) else {}

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

    return jax.tree.map(put, arrays)


def _spread(arrays: Arrays, params: Params) -> dict[int, NamedSharding]:
    """The shardings of the arrays that are divided among the devices of a parameter, by id."""
    transform, state, _ = arrays
    homes = dict(zip(leaf_paths(params), map(mesh_sharding, jax.tree.leaves(params)), strict=True))
    found = {}
    for x, slot in zip(jax.tree.leaves(state), slots(transform, state, list(homes)), strict=True):
        home = homes.get(slot.param or "")
        if slot.mark == SPREAD and home is not None and tree.is_array(x):
            spec = spread_spec(x.shape, tuple(home.spec), home.mesh)
            found[id(x)] = home.update(spec=tree.canonical_spec(home.mesh, spec, x.ndim))
    return found
