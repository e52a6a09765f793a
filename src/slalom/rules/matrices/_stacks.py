"""Matrices of equal shape are processed together, in stacks.

A small matrix does not keep a processor busy, and a large one does: stacks of large matrices only
cost copies. On several devices all matrices are stacked, and each device gets whole ones, so that
no device waits for another in between.

There a stack of matrices, whose sides may be sharded, becomes a stack that is sharded over the
matrices: each axis of the mesh that shards a side exchanges parts once, and each other axis takes
its part of the stack. Afterwards the way back.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Inexact

from ... import tree
from ..._core.engine.matrices import is_small, limited_groups, of_matrices, on_automatic_axes
from ..._core.protocol.context import Context
from ...tree.sharding import axis_names, constrain, full_spec, num_parts
from ...tree.types import Params, Updates, under_jit
from ...where.layout import Matrix

_STACK = 2**26
"""The largest number of entries of a stack, unless it would leave devices without a matrix."""

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


class _StackKey(NamedTuple):
    """The shape, dtype and sharding that stacked matrices have in common."""

    short: int
    long: int
    dtype: str
    spec: tuple[AxisNames, AxisNames]
    """The sharding of both sides."""


def map_matrices(
    function: Callable[..., Inexact[Array, "short long"]],
    matrices: tuple[Matrix, ...],
    updates: Updates,
    context: Context | None = None,
    numbers: tuple[Array, ...] = (),
) -> Updates:
    """Applies a function to the matrices of all leaves, in the accumulation dtype.

    On a mesh of several devices whole matrices are distributed over the devices, so the function
    may have any number of products without an exchange between devices.

    **Arguments:**

    - `function`: from a matrix and `numbers` to a matrix of the same shape. Matrices with more rows
        than columns arrive transposed.
    - `matrices`: how to read each leaf.
    - `updates`: the updates.
    - `context`: the context, which knows the mesh.
    - `numbers`: scalars of this step that the function needs. It must not close over them.

    **Returns:** the new updates.
    """
    leaves, structure = jax.tree.flatten(tree.widened(updates))
    placement = None
    if any(map(under_jit, leaves)):
        function = jax.jit(function)  # matrices of equal shape share a trace
        placement = _placement_of(leaves, () if context is None else context.shardings)

    def batched(stack: Array, *numbers: Array) -> Array:
        return of_matrices(lambda x: function(x, *numbers), stack)

    def run(leaves: list[Array], numbers: tuple[Array, ...]) -> list[Array]:
        results = list(leaves)
        done: Array | None = None
        for kind, chunk in _chunks(matrices, leaves, placement):
            stacks = [_read(matrices[i], leaves[i], i, placement) for i in chunk]
            if placement is None and done is not None:
                # XLA:CPU would start all at once, and keep all of their products in memory.
                stacks = tree.after(stacks, done)
            stack = jnp.concatenate(stacks) if stacks[1:] else stacks[0]
            # Under strict promotion, which users may choose, real times complex would be refused.
            standard = jax.numpy_dtype_promotion("standard")
            with standard if jnp.iscomplexobj(stack) else contextlib.nullcontext():
                if placement is not None and stack.size:
                    done = _apply_on_devices(batched, placement, kind.spec, stack, numbers)
                else:
                    done = batched(stack, *numbers)
            begin = 0
            for i in chunk:
                m, end = matrices[i], begin + matrices[i].batch
                results[i] = _write(m, _lying(m, done[begin:end]), i, placement)
                begin = end
        return results

    # A mesh may have explicit axes beside automatic ones.
    if placement is not None:
        return structure.unflatten(run(leaves, numbers))
    return structure.unflatten(on_automatic_axes(run, leaves, leaves, numbers))


def devices_as_text(matrices: tuple[Matrix, ...], params: Params) -> str:
    """The number of devices that share the matrices of all leaves, and the share of idle time
    there.

    That is the share in which devices have no matrix of their own, by cost: long · short².
    """
    leaves = jax.tree.leaves(params)
    shardings = (getattr(x, "sharding", None) for x in leaves)
    automatic = [h if isinstance(h, NamedSharding) else None for h in shardings]
    placement = _placement_of(leaves, automatic)
    if placement is None:
        return ""
    total = useful = 0.0
    for kind, chunk in _chunks(matrices, leaves, placement):
        count = sum(matrices[i].batch for i in chunk)
        cost = float(count * kind.long * kind.short**2)
        useful += cost
        total += cost / distribution(placement, kind.spec, count).busy if count else 0.0
    idle = 1 - useful / total if total else 0.0
    return f" on {placement.devices} devices ({idle:.0%} idle)"


def _chunks(
    matrices: tuple[Matrix, ...], leaves: list[Array], placement: Placement | None
) -> Iterator[tuple[_StackKey, list[int]]]:
    """The positions of the leaves that are stacked with each other."""
    kinds: dict[_StackKey, list[int]] = {}
    for i, (m, x) in enumerate(zip(matrices, leaves, strict=True)):
        spec = (None, None) if placement is None else _sides(m, placement.specs[i])[1]
        if m.rows > m.columns:
            spec = (spec[1], spec[0])
        short, long = sorted((m.rows, m.columns))
        kinds.setdefault(_StackKey(short, long, str(x.dtype), spec), []).append(i)
    numbers = [m.batch for m in matrices]
    for kind, members in kinds.items():
        size = max(1, kind.short * kind.long)
        if placement is None:
            most = _STACK // size if is_small(size) else 0
        else:
            most = max(placement.devices, _STACK // size)
        yield from ((kind, group) for group in limited_groups(members, numbers, most))


def _read(m: Matrix, x: Array, i: int, placement: Placement | None) -> Array:
    if placement is not None:
        x = _constrained(x, placement, _sides(m, placement.specs[i])[0])
    return _lying(m, m.read(x))


def _write(m: Matrix, x: Array, i: int, placement: Placement | None) -> Array:
    x = m.write(x)
    return x if placement is None else _constrained(x, placement, placement.specs[i])


def _lying(m: Matrix, x: Array) -> Array:
    """Matrices with more rows than columns transposed, and transposed back."""
    return jnp.swapaxes(x, -1, -2) if m.rows > m.columns else x


# --- several devices ------------------------------------------------------------------------


def _placement_of(
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


def _sides(
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


def _apply_on_devices(
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
    stack = _constrained(stack, placement, (None, *spec))
    if size > count:
        zeros = jnp.zeros((size - count, *stack.shape[1:]), stack.dtype)
        zeros = _constrained(zeros, placement, (None, *spec))
        stack = _constrained(jnp.concatenate([stack, zeros]), placement, (None, *spec))
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

    stack = _constrained(stack, placement, whole)
    specs = (whole, *(PartitionSpec() for _ in numbers))
    run = jax.shard_map(on_device, mesh=placement.mesh, in_specs=specs, out_specs=whole)
    done = run(stack, *numbers)
    return _constrained(done, placement, (None, *spec))[:count]


def _constrained(x: Array, placement: Placement, spec: Any) -> Array:
    """A traced array with this sharding."""
    return constrain(x, NamedSharding(placement.mesh, PartitionSpec(*spec)))
