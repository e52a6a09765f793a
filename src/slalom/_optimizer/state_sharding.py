"""State that is partitioned over a mesh axis along which its parameters are replicated."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import PyTree

from .. import tree
from .._compile.mesh import constrain
from .._core.marks import PARAM_LIKE
from .._core.slots import slots
from .._core.transform import AbstractTransform
from .._paths import candidates, example, leaf_paths
from .._types import Tracer


class StateSharding(NamedTuple):
    """Where the arrays of an optimizer and of its parameters are. The static part of a binding."""

    mesh: Mesh
    axis: str
    arrays: tuple[NamedSharding, ...]
    """The sharding of each array of the optimizer."""
    params: tuple[NamedSharding | None, ...]
    """The sharding of each parameter; `None` where no state shows it."""
    grads: tuple[NamedSharding | None, ...]
    """The sharding of the state that each gradient is added to."""

    def constrain_grads(self, grads: PyTree) -> PyTree:
        """Gradients that are reduced only to the shard that updates the state."""
        return _constrained(grads, self.grads)

    def constrain_params(self, params: PyTree) -> PyTree:
        """New parameters, or updates, with the sharding of the parameters."""
        return _constrained(params, self.params)

    def constrain_state(self, arrays: list[Any]) -> list[Any]:
        """New state with the sharding of the old one."""
        return _constrained(arrays, self.arrays[-len(arrays) :])


class ShardedState(NamedTuple):
    """What `Optimizer.shard_state` partitioned, by path."""

    partitioned: dict[str, tuple[Any, ...]]
    """The arrays that were partitioned, with the mesh axes along each of their dimensions."""
    whole: tuple[str, ...]
    """The parameter-shaped arrays that no free dimension divides."""
    bytes_before: int
    """The bytes of all state on each device, before."""
    bytes_after: int

    def __repr__(self) -> str:
        def listed(names: Any) -> str:
            names = list(names)
            more = f", … ({len(names)})" if len(names) > 4 else ""
            return ", ".join(names[:4]) + more or "–"

        return (
            f"partitioned: {listed(self.partitioned)}\n"
            f"whole:       {listed(self.whole)}\n"
            f"bytes of state per device: {self.bytes_before} before, {self.bytes_after} now"
        )


def partition(
    transform: AbstractTransform[Any],
    state: Any,
    names: tuple[str, ...],
    arrays: tuple[Any, ...],
    params: Any,
    mesh: Mesh,
    axis: str,
    model: Mapping[str, Any],
) -> tuple[StateSharding, ShardedState]:
    """Chooses a sharding for each array of an optimizer.

    **Arguments:**

    - `transform`, `state`: the transform and its state.
    - `names`, `arrays`: the optimizer's arrays and their names.
    - `params`: the structure of the parameters.
    - `mesh`, `axis`: the mesh, and the axis to partition over.
    - `model`: parameters by path. For others the state shows where they are.
    """
    _check_mesh(mesh, axis)
    paths = leaf_paths(example(params))
    places = dict(zip(map(id, jax.tree.leaves(state)), slots(transform, state, paths), strict=True))
    homes = {path: _home(x, mesh) for path, x in model.items()}
    targets: dict[str, NamedSharding] = {}
    shardings, partitioned, whole = [], {}, []
    for name, x in zip(names, arrays, strict=True):
        target = _home(x, mesh)
        slot = places.get(id(x))
        if slot is not None and slot.mark == PARAM_LIKE and slot.param is not None:
            home = homes.setdefault(slot.param, target)
            target = _with_axis(home, x.shape, axis)
            if target is home:
                whole.append(name)
            else:
                partitioned[name] = tuple(target.spec)
                targets.setdefault(slot.param, target)
        shardings.append(target)

    def size(chosen: list[NamedSharding]) -> int:
        pairs = zip(arrays, chosen, strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)

    before = [_home(x, mesh) for x in arrays]
    report = ShardedState(partitioned, tuple(whole), size(before), size(shardings))
    of_params = tuple(homes.get(path) for path in paths)
    of_grads = tuple(targets.get(path) for path in paths)
    return StateSharding(mesh, axis, tuple(shardings), of_params, of_grads), report


def _check_mesh(mesh: Mesh, axis: str) -> None:
    if axis not in mesh.axis_names:
        known = candidates(axis, list(map(str, mesh.axis_names)))
        raise ValueError(f"The mesh has no axis '{axis}'. Its axes: {known}.")
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            "`shard_state` needs a mesh with automatic axes: with explicit ones the shardings are "
            "part of the types of gradients and parameters, and would not match those of the "
            "state. Write `jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)`."
        )


def _home(x: Any, mesh: Mesh) -> NamedSharding:
    """The sharding of an array on this mesh; replicated if it is not on it yet."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    return NamedSharding(mesh, tree.canonical_spec(mesh, ()))


def _with_axis(home: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """The sharding with the axis along the largest dimension that is free and divisible."""
    spec = [*home.spec, *(None,) * (len(shape) - len(home.spec))]
    used = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    parts = home.mesh.shape[axis]
    free = [i for i, entry in enumerate(spec) if entry is None and shape[i] % parts == 0]
    free = [i for i in free if shape[i] > 0]
    if axis in used or parts == 1 or not free:
        return home
    spec[max(free, key=lambda i: shape[i])] = axis
    return home.update(spec=tree.canonical_spec(home.mesh, spec))


def _constrained(arrays: PyTree, shardings: tuple[NamedSharding | None, ...]) -> PyTree:
    leaves, structure = jax.tree.flatten(arrays)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return arrays  # inside a `shard_map`, where each device has its own part
    pairs = zip(leaves, shardings, strict=True)
    return structure.unflatten(
        [constrain(x, s) if isinstance(x, Tracer) and s is not None else x for x, s in pairs]
    )
