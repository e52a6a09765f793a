"""Binds a transform to parameters: checks the pair, splits off static data, and names arrays."""

import dataclasses
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import NamedSharding

from ... import tree
from ..._core.fields.hyperparams import all_targets
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.slots import rule_slots, slots
from ..._core.text.messages import uncalled
from ...tree.packed import cached, pack, release_functions_with, unpack
from ...tree.paths import dotted, example, leaf_paths
from ...tree.sharding import is_on_host, mesh_sharding, to_device, to_host
from ...tree.types import Params, PyTree, Tracer
from ...where.resolve import Where
from ..reports.transform_checks import checked
from ..sharding.placement import StateSharding, remembered, sharding_on, state_shardings
from .model import checked_split, strong


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
    """The shardings of the parameters and the state at binding, or after `Optimizer.shard_state`.
    Tracers do not show them."""
    family: Any = dataclasses.field(default=None, compare=False, repr=False)
    """The programs of the optimizer and of others like it, once something was compiled for it."""
    reading_family: Any = dataclasses.field(default=None, compare=False, repr=False)
    """The same without the model, once something was read."""
    source: Any = dataclasses.field(default=None, compare=False, repr=False)
    """Returns the transform that was bound while it lives, or `None` if the functions with data are
    elsewhere. Without such functions, it is `None` itself."""
    scale_is_read: bool = dataclasses.field(default=False, compare=False, repr=False)
    """Whether somebody read the scale of the loss."""

    def __post_init__(self) -> None:
        if self.source is not None:
            transform = self.source()
            release_functions_with(self, *(() if transform is None else (transform,)))

    @property
    def paths(self) -> list[str]:
        """The paths of the trainable parameters."""
        return leaf_paths(example(self.params))

    def __deepcopy__(self, memo: Any) -> "Binding":
        return self  # with the mesh, where copies of the arrays are too

    def __reduce__(self) -> Any:
        # JAX does not pickle the structure of a tree of modules, but any tree that has it can be.
        # A mesh cannot be pickled either, nor are pickled arrays loaded onto one.
        return _unpickle, (self.trainable, example(self.params))


def _unpickle(trainable: Where | None, params: PyTree) -> Binding:
    return Binding(trainable, jax.tree.structure(params))


def bind_to_model(
    transform: AbstractTransform[Any],
    model: PyTree,
    trainable: Where | None,
    dtype: Any | None,
    *,
    is_whole: bool = True,
) -> tuple[Arrays, Binding]:
    """The fields of a new optimizer, after all checks; with shapes for a model of shapes.

    **Arguments:**

    - `transform`: the transform to bind.
    - `model`, `trainable`: as in `Optimizer`.
    - `dtype`: the dtype of all hyperparameters, or `None` for their own.
    - `is_whole`: whether it is the whole optimizer, which must not ascend.
    """

    def make(model: PyTree) -> tuple[Arrays, Binding]:
        params = jax.tree.map(strong, checked_split(model, trainable).params)
        bound = checked(transform, params, dtype, is_whole)
        arrays = Arrays(bound, init_state(bound, params), tree.fresh_count())
        return bind(arrays, params, trainable)

    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model))
    return eqx.filter_eval_shape(make, model) if is_abstract else make(model)


def bind(arrays: Arrays, params: Params, trainable: Where | None) -> tuple[Arrays, Binding]:
    """The fields of an optimizer with these parts, on the devices of the parameters."""
    arrays = on_param_devices(arrays, params)
    arrays = Arrays(pack(arrays.transform), pack(arrays.state), arrays.count)
    sharding = remembered(jax.tree.leaves(arrays[1:]), params)
    return arrays, Binding(trainable, jax.tree.structure(params), sharding)


def init_state(transform: AbstractTransform[Any], params: Params) -> Any:
    """The initial state, placed by `state_shardings`. The state of parameters in the memory of the
    host is there too.
    """
    named = by_path(params)
    on_host = {path for path, x in named.items() if is_on_host(x)}

    # Compiled, so that a rule may compute with the parameters, which is only possible on the
    # device, while those that it does not read stay on the host.
    @eqx.filter_jit
    def init_on_host(params: Params) -> Any:
        state = transform.init(to_device(params))
        leaves, structure = jax.tree.flatten(state)
        pairs = zip(leaves, slots(transform, state, [*named]), strict=True)
        return structure.unflatten(to_host(x) if s.param in on_host else x for x, s in pairs)

    def put(x: Any, sharding: NamedSharding) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        sharding = sharding.update(memory_kind=x.sharding.memory_kind)
        return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)

    state = init_on_host(params) if on_host else transform.init(params)
    mesh = next((at.mesh for at in map(mesh_sharding, named.values()) if at is not None), None)
    if mesh is None:
        return state
    return jax.tree.map(put, state, state_shardings(transform, state, named, mesh))


def by_path(model: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    return dict(zip(leaf_paths(model), jax.tree.leaves(model), strict=True))


def no_transform(x: Any, others: Iterable[PyTree], position: str, call: str) -> str:
    """The message for an argument that is not a transform.

    **Arguments:**

    - `x`: the argument.
    - `others`: the other arguments, of which one may be the transform.
    - `position`: which argument of what it is.
    - `call`: the code to write.
    """
    message = f"The {position} must be a transform such as `sl.adam(1e-3)`, got "
    if any(isinstance(other, AbstractTransform) for other in others):
        return f"{message}an argument of type {type(x).__name__}. Write `{call}`."
    return f"{message}{x!r}.{uncalled(x)}"


def on_param_devices(arrays: Arrays, params: Params) -> Arrays:
    """Moves everything that is not there yet to the devices of the parameters."""
    first = next((p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)), None)
    if first is None or isinstance(first, Tracer) or not first.committed:
        return arrays
    sharding = first.sharding
    if isinstance(sharding, NamedSharding):
        mesh, (transform, state, _) = sharding.mesh, arrays
        targets: Any = jax.tree.map(lambda x: sharding_on(x, mesh), arrays)
        targets = targets._replace(state=state_shardings(transform, state, by_path(params), mesh))
    else:
        memory = next(iter(sharding.device_set)).default_memory().kind
        targets = jax.tree.map(lambda _: sharding.with_memory_kind(memory), arrays)

    def put(x: Any, target: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        if x.committed and x.sharding.device_set == sharding.device_set:
            return x
        return jax.device_put(x, target)

    return jax.tree.map(put, arrays, targets)


class Position(int):
    """The position of an array, which takes its place in a tree."""


def positions(structure: Any) -> Arrays:
    """The parts of an optimizer whose `Arrays` have this structure, with positions as leaves."""
    return Arrays(*map(unpack, structure.unflatten(map(Position, range(structure.num_leaves)))))


def named_arrays(arrays: Arrays) -> dict[str, Any]:
    """The arrays of an optimizer by their full paths."""
    leaves, structure = jax.tree.flatten(arrays)
    return dict(zip(_names(structure), leaves, strict=True))


def named_leaves(value: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree by their dotted paths. Those of optimizers have their full paths."""
    named: list[tuple[str, Any]] = []
    nodes = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: isinstance(x, Arrays))
    for path, node in nodes:
        if isinstance(node, Arrays):
            inside = named_arrays(node).items()  # in the field `arrays` of an optimizer
            named += ((".".join(filter(None, (dotted(path[:-1]), n))), x) for n, x in inside)
        else:
            # The array of a model that is one array has no name in a flat tree.
            named.append((dotted(path).removesuffix("."), node))
    return named


@cached(maxsize=256)
def _names(structure: Any) -> tuple[str, ...]:
    """The full path of each array.

    Hyperparameters are named as in `opt.hyperparams`, and state as in a report of `opt.rebind`. If
    a state or a part of a transform has the name of another array, a number is added to it.
    """
    transform, state, count = positions(structure)
    numbers = {
        i: path
        for path, (part, field) in all_targets(transform).items()
        if isinstance(i := getattr(part.module, field.name), Position)
    }
    of_state = zip(jax.tree.leaves(state), slots(transform, state, ()), strict=True)
    rest = zip(jax.tree.leaves(transform), rule_slots(transform), strict=True)
    places = {i: slot.name for i, slot in (*of_state, *rest) if isinstance(i, Position)}
    names: dict[str, int] = {}
    for i, name in (numbers | {count: "count"} | places | numbers).items():
        names[free_name(name, names)] = i
    return tuple(sorted(names, key=names.__getitem__))


def free_name(name: str, taken: Container[str]) -> str:
    """The name, with a number added if it is taken."""
    n, free = 2, name
    while free in taken:
        n, free = n + 1, f"{name}_{n}"
    return free
