"""An elementwise function of large leaves, piece by piece and in place.

A codec needs the largest number of each block before it can encode the first, so XLA writes new
values to memory before it encodes them. Of a whole leaf they would take as much memory as the
parameters. A loop over pieces of it needs the memory of one piece.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._paths import dotted
from ..tree.leaves import map_leaves
from .encoded import Encoded, is_encoded, row_shape, seed_of

_SIZES = {"cpu": 2**18}
"""The number of entries in a piece, by platform: few enough for the cache of a CPU."""
_SIZE = 2**22
"""On other platforms: many enough for all cores of a GPU."""


def in_pieces(
    rule: Callable[[list[Any], list[Any]], tuple[list[Any], PyTree]],
    read: Sequence[Array | Encoded],
    written: Sequence[Array | Encoded],
    seeds: Sequence[Any],
) -> tuple[list[Array | Encoded], PyTree]:
    """New values of some leaves of equal shape, encoded where the old ones are.

    **Arguments:**

    - `rule`: an elementwise function `rule(read, written) -> (new, others)` of the decoded leaves.
        The values of `others` must not depend on the leaves.
    - `read`, `written`: the leaves.
    - `seeds`: for each written leaf the seed of its stochastic rounding, or `None`.

    **Returns:** the new leaves and the others.
    """
    shape = tuple(read[0].shape)
    rows, width = _as_matrix(shape)
    size = _rows_per_piece(rows, width)
    if size >= rows or _is_sharded([*read, *written]):
        return _whole(rule, read, written, seeds)
    pieces = rows // size
    matrices = [_matrix(x, rows, width) for x in read]
    results = [_matrix(x, rows, width) for x in written]

    def piece(start: Any, results: list[Any], length: int) -> tuple[list[Any], PyTree]:
        def part(x: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(x, start, length)

        own = [_decoded(e, jax.tree.map(part, x), (length, width)) for e, x in zip(read, matrices)]
        old = [_decoded(e, jax.tree.map(part, x), (length, width)) for e, x in zip(written, results)]
        new, others = rule(own, old)
        updated = []
        for like, x, value, seed in zip(written, results, new, seeds, strict=True):
            if is_encoded(like):
                offset = jnp.asarray(start, jnp.uint32) * jnp.uint32(_row_entries(like, width))
                bits = None if seed is None else like.bits(seed, (length, width), offset)
                value = like.encode_rows(value, bits)
            updated.append(
                jax.tree.map(
                    lambda a, b: jax.lax.dynamic_update_slice_in_dim(
                        a, b.astype(a.dtype), start, 0
                    ),
                    x,
                    value,
                )
            )
        return updated, others

    shapes = jax.eval_shape(lambda results: piece(0, results, size)[1], results)
    others = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(i: Any, carry: tuple[list[Any], PyTree]) -> tuple[list[Any], PyTree]:
        return piece(i * size, carry[0], size)

    results, others = jax.lax.fori_loop(0, pieces, body, (results, others))
    if rows % size:
        results, others = piece(pieces * size, results, rows % size)
    return [_like(e, x) for e, x in zip(written, results, strict=True)], others


def map_in_pieces(
    rule: Callable[..., Any], old: PyTree, new: PyTree, now: SimpleNamespace, clock: Any
) -> PyTree:
    """`map_leaves(rule, (old, new), now)` in the codecs of the old values.

    **Arguments:**

    - `rule`: an elementwise function `rule(now, old, new)`.
    - `old`: a tree with encoded leaves.
    - `new`: a tree of arrays like it.
    - `now`: numbers by name, or vectors with an entry for each leaf.
    - `clock`: a number that differs between steps, for stochastic rounding.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(old, is_leaf=is_encoded)
    results = []
    for i, ((path, a), g) in enumerate(zip(named, structure.flatten_up_to(new), strict=True)):
        numbers = {n: x[i] if jnp.ndim(x) else x for n, x in vars(now).items()}

        def at_leaf(read: list[Any], written: list[Any], numbers: Any = numbers) -> Any:
            return [map_leaves(rule, (*written, *read), SimpleNamespace(**numbers))], None

        (result,), _ = in_pieces(at_leaf, [g], [a], [seed_of(dotted(path), clock)])
        results.append(result)
    return structure.unflatten(results)


def _whole(
    rule: Callable[..., Any],
    read: Sequence[Array | Encoded],
    written: Sequence[Array | Encoded],
    seeds: Sequence[Any],
) -> tuple[list[Array | Encoded], PyTree]:
    own = [x.decode() if is_encoded(x) else x for x in read]
    old = [x.decode() if is_encoded(x) else x for x in written]
    new, others = rule(own, old)
    results = []
    for like, value, seed in zip(written, new, seeds, strict=True):
        if is_encoded(like):
            bits = None if seed is None else like.bits(seed, like.rows)
            results.append(like.encode(value, bits))
        else:
            results.append(value.astype(like.dtype))
    return results, others


# --- leaves as matrices ---------------------------------------------------------------------


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = row_shape(shape)
    return math.prod(rows[:-1]), rows[-1]


def _matrix(x: Array | Encoded, rows: int, width: int) -> Any:
    """A leaf as a matrix; of an encoded one, its arrays."""
    if is_encoded(x):
        return {name: jnp.reshape(a, (rows, -1)) for name, a in x.arrays.items()}
    return jnp.reshape(x, (rows, width))


def _like(like: Array | Encoded, x: Any) -> Array | Encoded:
    """Undoes `_matrix`."""
    if is_encoded(like):
        arrays = {name: jnp.reshape(a, like.arrays[name].shape) for name, a in x.items()}
        return Encoded(arrays, *like.form)
    return jnp.reshape(x, like.shape)


def _decoded(like: Array | Encoded, x: Any, shape: tuple[int, int]) -> Array:
    return like.decode_rows(x, shape) if is_encoded(like) else x


def _row_entries(like: Encoded, width: int) -> int:
    """The numbers in a row as the codec sees it: a complex one is two."""
    return width * (2 if jnp.issubdtype(like.dtype, jnp.complexfloating) else 1)


def _rows_per_piece(rows: int, width: int) -> int:
    """How many rows a piece has. A number that divides the rows spares a last, shorter piece."""
    most = max(1, _SIZES.get(jax.default_backend(), _SIZE) // width)
    if rows <= 2 * most:
        return rows
    return next((n for n in range(most, most // 4, -1) if rows % n == 0), most)


def _is_sharded(leaves: Sequence[Array | Encoded]) -> bool:
    """Whether leaves are on a mesh of several devices, whose partitioner would gather a leaf to cut
    it."""
    return any(jax.typeof(x).sharding.mesh.size > 1 for x in jax.tree.leaves(leaves))
