"""Partitions state over a mesh axis along which its parameters are replicated."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ... import tree
from ..._core.state.marks import PARAM_LIKE
from ..._core.state.slots import slots
from ..._core.text.messages import report
from ...tree.paths import candidates
from ...tree.sharding import axis_names, full_spec
from ..binding.abstract_optimizer import AbstractOptimizer
from ..binding.binding import named_arrays
from .placement import StateSharding, divided, sharding_on

_Optimizer = TypeVar("_Optimizer", bound=AbstractOptimizer)


class ShardedState(NamedTuple):
    """A report of the arrays that `Optimizer.shard_state` partitioned, by path."""

    partitioned: dict[str, tuple[Any, ...]]
    """The arrays that were partitioned, with the mesh axes along each of their dimensions."""
    whole: tuple[str, ...]
    """The parameter-shaped arrays that no free dimension divides."""
    bytes_before: int
    """The bytes of all state on each device, before."""
    bytes_after: int

    def __repr__(self) -> str:
        arrays = report({"partitioned": self.partitioned, "whole": self.whole})
        size = f"{self.bytes_before} before, {self.bytes_after} now"
        return f"{arrays}\nbytes of state per device: {size}"


def shard(
    opt: _Optimizer, mesh: Mesh | AbstractMesh, axis: str, params: Mapping[str, Any]
) -> tuple[_Optimizer, ShardedState]:
    """An optimizer with partitioned state, and a report.

    Shapes stay shapes.

    **Arguments:**

    - `opt`: the optimizer, whose shapes have shardings.
    - `mesh`, `axis`: the mesh, and the axis to partition over.
    - `params`: parameters by path. The optimizer knows where others are, or their state shows it.
    """
    _check_mesh(mesh, axis)
    state, paths = opt.state, opt.binding.paths
    of_state = slots(opt.transform, state, paths)
    places = dict(zip(map(id, jax.tree.leaves(state)), of_state, strict=True))
    of_params = {path: sharding_on(x, mesh) for path, x in params.items()}
    known = opt.binding.sharding
    if known is not None and known.mesh == mesh:
        places_of = zip(paths, known.params, strict=True)
        of_params = {path: place for path, place in places_of if place is not None} | of_params
    # The arrays of an encoded leaf are partitioned alike, along an axis that divides all of them.
    shapes: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for x in jax.tree.leaves(state):
        shapes.setdefault(places[id(x)].leaf, []).append(x.shape)
    targets: dict[str, NamedSharding] = {}
    chosen, partitioned, whole = [], {}, []
    leaves, structure = jax.tree.flatten(opt.arrays)
    for name, x in zip(named_arrays(opt.arrays), leaves, strict=True):
        target = sharding_on(x, mesh)
        slot = places.get(id(x))
        if slot is not None and slot.mark == PARAM_LIKE:
            is_divided = False
            # A buffer of several parameters, as under `.flatten()`, does not show where they are.
            if slot.param in paths:
                home = of_params.setdefault(slot.param, target)
                target, is_divided = _with_axis(home, shapes[slot.leaf], axis)
            if not is_divided:
                whole.append(name)
            elif slot.param is not None:
                partitioned[name] = tuple(target.spec)
                targets.setdefault(slot.param, target)
        chosen.append(target)
    moved = list(map(_put, leaves, chosen))
    sizes = map(bytes_per_device, (leaves, moved))
    arrays = structure.unflatten(moved)
    of_arrays = tuple(x.sharding for x in jax.tree.leaves(arrays[1:]))
    params_at = tuple(map(of_params.get, paths))
    updates_at = tuple(map((of_params | targets).get, paths))
    sharding = StateSharding(mesh, axis, of_arrays, params_at, updates_at)
    new = opt._from_fields(arrays, dataclasses.replace(opt.binding, sharding=sharding))
    return new, ShardedState(partitioned, tuple(whole), *sizes)


def _put(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """The bytes of these arrays, or shapes with shardings, on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def check_mesh(who: str, mesh: object) -> None:
    """Raises an error for anything but a mesh."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"`{who}` takes a mesh, such as `jax.make_mesh((8,), ('data',))`, got {mesh!r} of type "
            f"{type(mesh).__name__}."
        )


def _check_mesh(mesh: Mesh | AbstractMesh, axis: str) -> None:
    check_mesh("shard_state", mesh)
    if axis not in mesh.axis_names:
        names = candidates(axis, list(map(str, mesh.axis_names)))
        raise ValueError(f"The mesh has no axis '{axis}'. Its axes: {names}.")
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            "`shard_state` needs a mesh with automatic axes: with explicit ones the shardings are "
            "part of the types of gradients and parameters, and would not match those of the "
            "state. Write `jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)`."
        )


def _with_axis(
    of_param: NamedSharding, shapes: list[tuple[int, ...]], axis: str
) -> tuple[NamedSharding, bool]:
    """The sharding of state with these shapes, and whether the axis divides it.

    Like its parameter where it can be, and with the axis along the largest dimension that is free
    and divisible in all shapes.
    """
    mesh, sizes = of_param.mesh, [max(dimension) for dimension in zip(*shapes, strict=True)]
    spec = full_spec(of_param.spec, len(sizes))[: len(sizes)]
    for shape in shapes:
        spec = divided(shape, spec, mesh)
    parts, used = mesh.shape[axis], {name for entry in spec for name in axis_names(entry)}
    free = [
        i
        for i in range(len(sizes))
        # XLA returns an array without entries whole, so a step would compile again.
        if all(sizes) and spec[i] is None and all(shape[i] % parts == 0 for shape in shapes)
    ]
    is_divided = bool(free) and parts > 1 and axis not in used
    if is_divided:
        spec[max(free, key=lambda i: sizes[i])] = axis
    return of_param.update(spec=tree.canonical_spec(mesh, spec, len(spec))), is_divided
