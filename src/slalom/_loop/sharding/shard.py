"""Partitions state over a mesh axis along which its parameters are replicated."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ... import tree
from ..._core.state.marks import PARAM_LIKE
from ..._core.state.slots import slots
from ..._core.text.messages import report
from ...tree.packed import unpack
from ...tree.paths import candidates, example, leaf_paths
from ...tree.sharding import axis_names, full_spec
from ..binding.binding import Arrays, Binding, named_arrays
from .placement import StateSharding, divided, sharding_on


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
    arrays: Arrays,
    binding: Binding,
    mesh: Mesh | AbstractMesh,
    axis: str,
    params: Mapping[str, Any],
) -> tuple[Arrays, Binding, ShardedState]:
    """The arrays and the binding of an optimizer whose state is partitioned, and a report.

    Shapes stay shapes.

    **Arguments:**

    - `arrays`, `binding`: those of the optimizer. Shapes have shardings.
    - `mesh`, `axis`: the mesh, and the axis to partition over.
    - `params`: parameters by path. Where the others are, their state shows.
    """
    _check_mesh(mesh, axis)
    transform, state = unpack(arrays.transform), unpack(arrays.state)
    paths = leaf_paths(example(binding.params))
    places = dict(zip(map(id, jax.tree.leaves(state)), slots(transform, state, paths), strict=True))
    of_params = {path: sharding_on(x, mesh) for path, x in params.items()}
    # The arrays of an encoded leaf are partitioned alike, along an axis that divides all of them.
    shapes: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for x in jax.tree.leaves(state):
        shapes.setdefault(places[id(x)].leaf, []).append(x.shape)
    targets: dict[str, NamedSharding] = {}
    chosen, partitioned, whole = [], {}, []
    leaves, structure = jax.tree.flatten(arrays)
    for name, x in zip(named_arrays(arrays), leaves, strict=True):
        target = sharding_on(x, mesh)
        slot = places.get(id(x))
        if slot is not None and slot.mark == PARAM_LIKE:
            # A buffer of several parameters, as under `.flatten()`, does not show where they are.
            before, param = target, slot.param
            if param is not None and param in paths:
                before = _restricted(of_params.setdefault(param, target), shapes[slot.leaf])
                target = _with_axis(before, shapes[slot.leaf], axis)
            if target is before:
                whole.append(name)
            elif param is not None:
                partitioned[name] = tuple(target.spec)
                targets.setdefault(param, target)
        chosen.append(target)
    moved = list(map(_put, leaves, chosen))
    sizes = map(bytes_per_device, (leaves, moved))
    arrays = structure.unflatten(moved)
    of_state = tuple(x.sharding for x in jax.tree.leaves(arrays[1:]))
    grads = tuple(map(targets.get, paths))
    sharding = StateSharding(mesh, axis, of_state, tuple(map(of_params.get, paths)), grads)
    binding = dataclasses.replace(binding, sharding=sharding)
    return arrays, binding, ShardedState(partitioned, tuple(whole), *sizes)


def _put(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """The bytes of these arrays, or shapes with shardings, on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def _check_mesh(mesh: Mesh | AbstractMesh, axis: str) -> None:
    if axis not in mesh.axis_names:
        names = candidates(axis, list(map(str, mesh.axis_names)))
        raise ValueError(f"The mesh has no axis '{axis}'. Its axes: {names}.")
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            "`shard_state` needs a mesh with automatic axes: with explicit ones the shardings are "
            "part of the types of gradients and parameters, and would not match those of the "
            "state. Write `jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)`."
        )


def _restricted(of_param: NamedSharding, shapes: list[tuple[int, ...]]) -> NamedSharding:
    """The sharding of a parameter along those axes that its state has, too."""
    mesh, before = of_param.mesh, full_spec(of_param.spec, min(map(len, shapes)))
    kept: list[Any] = before[: min(map(len, shapes))]
    for shape in shapes:
        kept = divided(shape, kept, mesh)
    if kept == before:
        return of_param
    return of_param.update(spec=tree.canonical_spec(mesh, kept, len(kept)))


def _with_axis(sharding: NamedSharding, shapes: list[tuple[int, ...]], axis: str) -> NamedSharding:
    """The sharding with the axis along the largest dimension that is free and divisible in all
    shapes."""
    shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    spec = full_spec(sharding.spec, len(shape))
    used = {name for entry in spec for name in axis_names(entry)}
    parts = sharding.mesh.shape[axis]
    free = [i for i, e in enumerate(spec) if e is None and all(s[i] % parts == 0 for s in shapes)]
    free = [i for i in free if shape[i] > 0]
    if axis in used or parts == 1 or not free:
        return sharding
    spec[max(free, key=lambda i: shape[i])] = axis
    return sharding.update(spec=tree.canonical_spec(sharding.mesh, spec, len(shape)))
