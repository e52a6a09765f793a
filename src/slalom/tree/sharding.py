"""The placement of arrays: on a mesh of several devices, and in the memory of the host.

Arrays in the memory of the host visit the device for a step.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from .types import Tracer

T = TypeVar("T")


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def num_parts(sizes: Mapping[str, int], entry: Any) -> int:
    """The number of parts into which one entry of a spec divides an axis, on a mesh with these
    sizes."""
    return math.prod(sizes[name] for name in axis_names(entry))


def full_spec(spec: Iterable[Any], ndim: int) -> list[Any]:
    """The spec with an entry for each axis of the array."""
    entries = list(spec)
    return entries + [None] * (ndim - len(entries))


def canonical_spec(mesh: Any, spec: Sequence[Any], ndim: int) -> PartitionSpec:
    """The spec that JAX gives to the result of a program. Specs that mean the same may differ.

    With explicit axes it has an entry for each of the `ndim` axes of the array; otherwise none at
    the end is `None`.
    """
    entries = full_spec(spec, ndim)
    if AxisType.Explicit not in mesh.axis_types:
        while entries and entries[-1] is None:
            entries.pop()
    return PartitionSpec(*entries)


def mesh_sharding(x: object) -> NamedSharding | None:
    """The sharding of a concrete array on a mesh of several devices, `None` for anything else.

    It has the spec of results, so that arrays with another spec of the same meaning need no program
    of their own.
    """
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return _canonical(sharding, getattr(x, "ndim", 0))


def may_be_at(x: object, sharding: NamedSharding | None) -> bool:
    """Whether a traced array may have this sharding: its type names its mesh.

    Inside a `shard_map` it names another one, in which each device has its own part.
    """
    return sharding is not None and jax.typeof(x).sharding.mesh == sharding.mesh.abstract_mesh


def constrain(x: T, sharding: NamedSharding) -> T:
    """A traced array with this sharding."""
    # The sharding along explicit axes is part of an array's type; along automatic axes it is a
    # constraint on the partitioner.
    constraints = (
        (AxisType.Explicit, jax.sharding.reshard),
        (AxisType.Auto, jax.lax.with_sharding_constraint),
    )
    axes = sharding.mesh.axis_names
    # Results are on the device.
    sharding = sharding.update(memory_kind=None)
    for kind, constraint in constraints:
        names = [n for n, k in zip(axes, sharding.mesh.axis_types, strict=True) if k == kind]
        if names:
            part = sharding if len(names) == len(axes) else _restricted(sharding, names)
            x = constraint(x, part)
    return x


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """`jnp.reshape`, also of axes that are sharded along explicit axes of a mesh.

    JAX refuses a reshape whose result cannot have the sharding of `x`. Here the axes before and
    after those that change keep theirs, and the first one that changes keeps what divides it.
    """
    sharding = jax.typeof(x).sharding
    spec, mesh = tuple(sharding.spec), sharding.mesh
    before = _common(x.shape, shape)
    after = _common(x.shape[before:][::-1], shape[before:][::-1])
    changed = spec[before : len(spec) - after]
    if all(entry is None for entry in changed):
        return jnp.reshape(x, shape)
    kept: list[Any] = []
    for name in axis_names(changed[0]):
        parts = num_parts(mesh.shape, (*kept, name))
        if len(shape) == before + after or shape[before] % parts:
            break
        kept.append(name)
    middle = [tuple(kept) or None, *(None,) * (len(shape) - before - after - 1)]
    middle = middle[: len(shape) - before - after]
    new = PartitionSpec(*spec[:before], *middle, *spec[len(spec) - after :])
    return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=new))


def placed_like(x: Array, like: Array) -> Array:
    """An array with the sharding of another one of its shape, along explicit axes of a mesh."""
    sharding = jax.typeof(x).sharding
    spec = jax.typeof(like).sharding.spec
    if AxisType.Explicit not in sharding.mesh.axis_types or x.shape != like.shape:
        return x
    if sharding.spec == spec:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=spec))


def replicated(x: Any) -> Any:
    """An array, the same on every device where the mesh has explicit axes."""
    if not isinstance(x, jax.Array):
        return x
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    if not explicit or all(entry is None for entry in sharding.spec):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of equal sizes, from the first one on."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return len(list(pairs))


@functools.lru_cache(maxsize=1024)
def _canonical(sharding: NamedSharding, ndim: int) -> NamedSharding:
    return sharding.update(spec=canonical_spec(sharding.mesh, tuple(sharding.spec), ndim))


def _restricted(sharding: NamedSharding, names: list[str]) -> NamedSharding:
    """The part of a sharding that concerns these axes of its mesh."""
    entries = map(axis_names, sharding.spec)
    spec = PartitionSpec(*(tuple(n for n in entry if n in names) for entry in entries))
    return sharding.update(spec=spec)


# --- the memory of the host -----------------------------------------------------------------

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(x: Any) -> bool:
    """Whether an array, traced or not, is in the pinned memory of the host."""
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == _HOST


def to_device(tree: PyTree) -> PyTree:
    """The tree with copies on the device of all arrays that are in the memory of the host."""
    return jax.tree.map(lambda x: jax.device_put(x, _DEVICE) if is_on_host(x) else x, tree)


def to_host(x: T) -> T:
    """An array in the pinned memory of the host."""
    return jax.device_put(x, _HOST)


def to_memory_of(before: PyTree, after: PyTree) -> PyTree:
    """New values in the memories of the old ones."""
    return jax.tree.map(lambda x, y: to_host(y) if is_on_host(x) else y, before, after)
