"""Matrices of equal shape are processed together, in stacks.

A small matrix does not keep a processor busy, and a large one does: stacks of large matrices only
cost copies. On several devices all matrices are stacked, and each device gets whole ones.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Inexact

from ... import tree
from ..._core.engine.matrices import is_small, limited_groups, of_matrices, on_automatic_axes
from ..._core.protocol.context import Context
from ...tree.types import Params, Updates, under_jit
from ...where.layout import Matrix
from ._placement import (
    AxisNames,
    Placement,
    apply_on_devices,
    constrained,
    distribution,
    placement_of,
    sides,
)

_STACK = 2**26
"""The largest number of entries of a stack, unless it would leave devices without a matrix."""


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
        placement = placement_of(leaves, () if context is None else context.shardings)

    def run(leaves: list[Array], numbers: tuple[Array, ...]) -> list[Array]:
        results = list(leaves)
        done: Array | None = None
        for kind, chunk in _chunks(matrices, leaves, placement):
            stacks = [_read(matrices[i], leaves[i], i, placement) for i in chunk]
            if placement is None and done is not None:
                # XLA:CPU would start all at once, and keep all of their products in memory.
                stacks = tree.after(stacks, done)
            stack = jnp.concatenate(stacks) if stacks[1:] else stacks[0]
            done = _applied(function, kind, stack, placement, numbers)
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
    placement = placement_of(leaves, automatic)
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
        spec = (None, None) if placement is None else sides(m, placement.specs[i])[1]
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
        x = constrained(x, placement, sides(m, placement.specs[i])[0])
    return _lying(m, m.read(x))


def _write(m: Matrix, x: Array, i: int, placement: Placement | None) -> Array:
    x = m.write(x)
    return x if placement is None else constrained(x, placement, placement.specs[i])


def _lying(m: Matrix, x: Array) -> Array:
    """Matrices with more rows than columns transposed, and transposed back."""
    return jnp.swapaxes(x, -1, -2) if m.rows > m.columns else x


def _applied(
    function: Callable[..., Array],
    kind: _StackKey,
    stack: Array,
    placement: Placement | None,
    numbers: tuple[Array, ...],
) -> Array:
    def batched(stack: Array, *numbers: Array) -> Array:
        return of_matrices(lambda x: function(x, *numbers), stack)

    # Under strict promotion, which users may choose, real times complex would be refused.
    standard = jax.numpy_dtype_promotion("standard")
    with standard if jnp.iscomplexobj(stack) else contextlib.nullcontext():
        if placement is not None and stack.size:
            return apply_on_devices(batched, placement, kind.spec, stack, numbers)
        return batched(stack, *numbers)
