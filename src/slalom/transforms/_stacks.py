"""Matrices of equal shape are processed together, in stacks.

A small matrix does not keep a processor busy, and a large one does: stacks of large matrices only
cost copies.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from .. import tree
from .._types import Updates, under_jit
from ..where.layout import Matrix

_SMALL = 2**16
_SMALL_ON_ACCELERATORS = 2**20
"""The largest number of entries of a matrix that is stacked with others."""

_STACK = 2**26
"""The largest number of entries of a stack."""


class _Kind(NamedTuple):
    """What matrices must have in common to be stacked."""

    short: int
    long: int
    dtype: str


def map_matrices(
    function: Callable[[Inexact[Array, "*batch short long"]], Inexact[Array, "*batch short long"]],
    matrices: tuple[Matrix, ...],
    updates: Updates,
) -> Updates:
    """Applies a function to the matrices of all leaves, in the accumulation dtype.

    **Arguments:**

    - `function`: from matrices, or a batch of them, to matrices of the same shape. Matrices with
        more rows than columns arrive transposed.
    - `matrices`: how to read each leaf.
    - `updates`: the updates.

    **Returns:** the new updates.
    """
    leaves, structure = jax.tree.flatten(tree.widened(updates))
    kinds: dict[_Kind, list[int]] = {}
    for i, (m, x) in enumerate(zip(matrices, leaves, strict=True)):
        short, long = sorted((m.rows, m.columns))
        kinds.setdefault(_Kind(short, long, str(x.dtype)), []).append(i)
    if any(map(under_jit, leaves)):
        function = jax.jit(function)  # matrices of equal shape share a trace
    results: list[Array] = list(leaves)
    for kind, members in kinds.items():
        for chunk in _chunks(kind, [(i, matrices[i].batch) for i in members]):
            stacks = [_lying(matrices[i], matrices[i].read(leaves[i])) for i in chunk]
            done = _applied(function, kind, jnp.concatenate(stacks) if stacks[1:] else stacks[0])
            begin = 0
            for i in chunk:
                part = done[begin : begin + matrices[i].batch]
                results[i] = matrices[i].write(_lying(matrices[i], part))
                begin += matrices[i].batch
    return structure.unflatten(results)


def _is_small(kind: _Kind) -> bool:
    on_cpu = jax.default_backend() == "cpu"
    return kind.short * kind.long <= (_SMALL if on_cpu else _SMALL_ON_ACCELERATORS)


def _chunks(kind: _Kind, members: list[tuple[int, int]]) -> list[list[int]]:
    """The leaves, given with their numbers of matrices, that are stacked with each other."""
    if not _is_small(kind):
        return [[i] for i, _ in members]
    most = max(1, _STACK // max(1, kind.short * kind.long))
    chunks: list[list[int]] = []
    room = 0
    for i, batch in members:
        if batch > room:
            chunks.append([])
            room = most
        chunks[-1].append(i)
        room -= batch
    return chunks


def _lying(m: Matrix, x: Array) -> Array:
    """Matrices with more rows than columns transposed, and transposed back."""
    return jnp.swapaxes(x, -1, -2) if m.rows > m.columns else x


def _applied(function: Callable[[Array], Array], kind: _Kind, stack: Array) -> Array:
    # Under strict promotion, which users may choose, real times complex would be refused.
    standard = jax.numpy_dtype_promotion("standard")
    with standard if jnp.iscomplexobj(stack) else contextlib.nullcontext():
        if stack.shape[0] == 1:
            return function(stack[0])[None]
        # One large matrix after the other needs the scratch memory of one.
        return function(stack) if _is_small(kind) else jax.lax.map(function, stack)
