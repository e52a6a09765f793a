"""Whole matrices on each device of a mesh, so that no device waits for another in between.

A stack of matrices, whose sides may be sharded, becomes a stack that is sharded over the matrices:
each axis of the mesh that shards a side exchanges parts once, and each other axis takes its part of
the stack. Afterwards the way back.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from ...tree.sharding import axis_names, constrain, full_spec, num_parts
from ...where.layout import Matrix

AxisNames = str | tuple[str, ...] | None


class Placement(NamedTuple):
    """A mesh, and how each leaf is sharded over it."""

    mesh: Any
    specs: tuple[tuple[AxisNames, ...], ...]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size


class Distribution(NamedTuple):
    """The distribution of a stack of matrices over devices."""

    over: tuple[str, ...]
    """The axes of the mesh that take a part of the stack."""
    size: int
    """The number of matrices, including padding."""
    busy: float
    """The share of the devices' time that is spent on different matrices of the stack."""


def placement_of(
    leaves: Sequence[Any], automatic: Sequence[NamedSharding | None]
) -> Placement | None:
    """The placement of the leaves; `None` without a mesh of several devices, all explicit or
    automatic.

    Explicit axes are in the types of the arrays. Automatic axes are not: the binding remembers
    them, and otherwise `jax.set_mesh` names the mesh.

    **Arguments:**

    - `leaves`: the updates.
    - `automatic`: their shardings along automatic axes, if known.
    """
    if not leaves or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    shardings = [jax.typeof(x).sharding for x in leaves]
    explicit = shardings[0].mesh
    if _is_shared(explicit, AxisType.Explicit):
        return Placement(
            explicit, tuple(_spec(s, x) for s, x in zip(shardings, leaves, strict=True))
        )
    meshes = [s.mesh for s in automatic if s is not None]
    if len(automatic) == len(leaves) and meshes and _is_shared(meshes[0], AxisType.Auto):
        specs = tuple(_spec(s, x) for s, x in zip(automatic, leaves, strict=True))
        return Placement(meshes[0], specs)
    named = jax.sharding.get_abstract_mesh()
    if _is_shared(named, AxisType.Auto):
        return Placement(named, tuple((None,) * x.ndim for x in leaves))
    return None


def _is_shared(mesh: Any, kind: AxisType) -> bool:
    return not mesh.empty and mesh.size > 1 and set(mesh.axis_types) == {kind}


def _spec(sharding: NamedSharding | None, x: Any) -> tuple[AxisNames, ...]:
    """The entry for each axis; `None` for all where they do not fit."""
    if sharding is None or len(sharding.spec) > x.ndim:
        return (None,) * x.ndim
    spec = tuple(full_spec(sharding.spec, x.ndim))
    fits = all(
        n % num_parts(sharding.mesh.shape, entry) == 0
        for n, entry in zip(x.shape, spec, strict=True)
    )
    return spec if fits else (None,) * x.ndim


def sides(
    m: Matrix, spec: tuple[AxisNames, ...]
) -> tuple[tuple[AxisNames, ...], tuple[AxisNames, AxisNames]]:
    """The sharding that the matrices of a leaf can keep, and the shardings of their rows and
    columns.

    The first axis of the outputs may be sharded, and the first one of the inputs. Stacks and blocks
    may not.
    """
    if m.split != m.shape:
        return (None,) * len(m.shape), (None, None)
    kept: list[AxisNames] = [None] * len(m.shape)
    spec_of_sides: list[AxisNames] = [None, None]
    for i, axes in enumerate(m.groups[1:]):
        kept[axes[0]] = spec_of_sides[i] = spec[axes[0]]
    return tuple(kept), (spec_of_sides[0], spec_of_sides[1])


def distribution(
    placement: Placement, spec: tuple[AxisNames, AxisNames], count: int
) -> Distribution:
    """Distributes a stack over the fewest devices that finish as early as all of them."""
    taken = [name for entry in spec for name in axis_names(entry)]
    shape = placement.mesh.shape
    parts, least = math.prod(shape[name] for name in taken), count
    if parts > 1:
        # XLA for CPUs refuses its own program where each device exchanges a single matrix.
        least = max(count, 2 * parts)
    free = sorted((n for n in placement.mesh.axis_names if n not in taken), key=lambda n: -shape[n])
    over: list[str] = []
    for name in free:
        if -(-least // (parts * shape[name])) < -(-least // parts):
            over.append(name)
            parts *= shape[name]
    size = -(-least // parts) * parts
    # In the order of the mesh, so that no device has to exchange its part with another.
    over = [name for name in placement.mesh.axis_names if name in over]
    return Distribution(tuple(over), size, count / (size // parts * placement.devices))


def apply_on_devices(
    function: Callable[..., Array],
    placement: Placement,
    spec: tuple[AxisNames, AxisNames],
    stack: Array,
    numbers: tuple[Array, ...],
) -> Array:
    """Applies a function of batches of matrices to whole matrices on each device.

    **Arguments:**

    - `function`: from matrices, and the numbers, to matrices of the same shape.
    - `placement`: the mesh.
    - `spec`: how the two sides of the matrices are sharded.
    - `stack`: the matrices.
    - `numbers`: scalars that the function needs, which it must not close over.
    """
    count = stack.shape[0]
    over, size, _ = distribution(placement, spec, count)
    # Otherwise the partitioner would exchange the parts of each leaf, before they are stacked.
    stack = constrained(stack, placement, (None, *spec))
    if size > count:
        zeros = jnp.zeros((size - count, *stack.shape[1:]), stack.dtype)
        zeros = constrained(zeros, placement, (None, *spec))
        stack = constrained(jnp.concatenate([stack, zeros]), placement, (None, *spec))
    whole = PartitionSpec(over or None, *spec)

    def on_device(part: Array, *numbers: Array) -> Array:
        for axis, entry in enumerate(spec, start=1):
            for name in axis_names(entry)[::-1]:
                part = jax.lax.all_to_all(part, name, 0, axis, tiled=True)
        part = function(part, *numbers)
        for axis, entry in reversed(list(enumerate(spec, start=1))):
            for name in axis_names(entry):
                part = jax.lax.all_to_all(part, name, axis, 0, tiled=True)
        return part

    stack = constrained(stack, placement, whole)
    specs = (whole, *(PartitionSpec() for _ in numbers))
    run = jax.shard_map(on_device, mesh=placement.mesh, in_specs=specs, out_specs=whole)
    done = run(stack, *numbers)
    return constrained(done, placement, (None, *spec))[:count]


def constrained(x: Array, placement: Placement, spec: Any) -> Array:
    """A traced array with this sharding."""
    return constrain(x, NamedSharding(placement.mesh, PartitionSpec(*spec)))
