"""Shardings of arrays on a mesh of several devices, and how results keep them."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ...tree.fresh import axis_names, canonical_spec, num_parts
from ...tree.types import Tracer

T = TypeVar("T")


def mesh_sharding(x: object) -> NamedSharding | None:
    """The sharding of a concrete array on a mesh of several devices, `None` for anything else.

    It has the spec of results, so that arrays with another spec of the same meaning need no program
    of their own.
    """
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    return _canonical(sharding, getattr(x, "ndim", 0))


def may_be_at(x: object, home: NamedSharding | None) -> bool:
    """Whether a traced array may have this sharding: its type names the mesh that it is on.

    Inside a `shard_map` it names another one, in which each device has its own part.
    """
    return home is not None and jax.typeof(x).sharding.mesh == home.mesh.abstract_mesh


def constrain(x: T, sharding: NamedSharding) -> T:
    """A traced array with this sharding."""
    # The sharding along explicit axes is part of an array's type; along automatic axes it is a
    # constraint on the partitioner.
    constraints = (
        (AxisType.Explicit, jax.sharding.reshard),
        (AxisType.Auto, jax.lax.with_sharding_constraint),
    )
    axes = sharding.mesh.axis_names
    # What is computed is on the device.
    sharding = sharding.update(memory_kind=None)
    for kind, constraint in constraints:
        names = [n for n, k in zip(axes, sharding.mesh.axis_types, strict=True) if k == kind]
        if names:
            own = sharding if len(names) == len(axes) else _restricted(sharding, names)
            x = constraint(x, own)
    return x


def spread_spec(
    shape: Sequence[int], spec: Iterable[Any], mesh: Mesh | AbstractMesh
) -> tuple[Any, ...]:
    """How an array is divided among the devices that share a parameter with this spec.

    What divides an axis of the parameter divides the next axis of the array that it can. Explicit
    axes of a mesh do not, because they would be part of the types that a rule computes with.
    """
    entries = [] if AxisType.Explicit in mesh.axis_types else list(filter(axis_names, spec))
    found: list[Any] = []
    for size in shape:
        parts = num_parts(mesh.shape, entries[0]) if entries else 0
        found.append(entries.pop(0) if parts and size and size % parts == 0 else None)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _canonical(sharding: NamedSharding, ndim: int) -> NamedSharding:
    return sharding.update(spec=canonical_spec(sharding.mesh, tuple(sharding.spec), ndim))


def _restricted(sharding: NamedSharding, names: list[str]) -> NamedSharding:
    """The part of a sharding that concerns these axes of its mesh."""
    entries = map(axis_names, sharding.spec)
    spec = PartitionSpec(*(tuple(n for n in entry if n in names) for entry in entries))
    return sharding.update(spec=spec)
