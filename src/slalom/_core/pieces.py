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
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, PyTree

from .. import tree
from .._paths import dotted
from .encoded import Encoded, is_encoded, row_shape, seed_of

_SIZES = {"cpu": 2**17}
"""The number of entries in a piece, by platform: few enough for the cache of a CPU."""
_SIZE = 2**22
"""On other platforms: many enough for all cores of a GPU."""
_SMALL = 2**15
"""From this number of entries on, leaves wait for each other, so that they share scratch memory."""


def in_pieces(
    rule: Callable[[list[Any], list[Any]], tuple[list[Any], PyTree]],
    read: Sequence[Array | Encoded],
    written: Sequence[Array | Encoded],
    seeds: Sequence[Any],
    after: Any = None,
) -> tuple[list[Array | Encoded], PyTree]:
    """New values of some leaves of equal shape, encoded where the old ones are.

    **Arguments:**

    - `rule`: an elementwise function `rule(read, written) -> (new, others)` of the decoded leaves.
        The values of `others` must not depend on the leaves.
    - `read`, `written`: the leaves.
    - `seeds`: for each written leaf the seed of its stochastic rounding, or `None`.
    - `after`: a number that is computed before. It keeps XLA from cutting out the first pieces of
        all leaves, or from decoding all smaller leaves, at once.

    **Returns:** the new leaves and the others.
    """
    if all(e.codec.is_elementwise(e.spec) for e in (*read, *written) if is_encoded(e)):
        return _from_stored(rule, read, written, seeds)
    shape = tuple(read[0].shape)
    rows, width = _as_matrix(shape)
    size = _rows_per_piece(rows, width)
    if size >= rows or _is_sharded([*read, *written]):
        return _whole(rule, read, tree.after(written, after), written, seeds)
    shorter = rows % size != 0
    given = [_matrix(x, rows, width) for x in read]
    matrices = _as_integers(given)
    forms = [_matrix(x, rows, width) for x in written]
    # Where this makes other arrays, they are made one leaf after the other.
    wholes = jax.tree.map(
        lambda x, y: x if x.dtype == y.dtype else tree.after(x, after), _as_integers(forms), forms
    )

    def first_row(i: Any) -> Any:
        return jnp.minimum(i * size, rows - size)

    def cut(wholes: list[Any], i: Any) -> list[Any]:
        start = first_row(i)
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), wholes)

    def new_piece(i: Any, old: list[Any]) -> tuple[list[Any], PyTree]:
        pieces = (_as_they_were(cut(matrices, i), given), _as_they_were(old, forms))
        values, others = rule(
            *(
                [_decoded(e, x, (size, width)) for e, x in zip(leaves, xs, strict=True)]
                for leaves, xs in zip((read, written), pieces, strict=True)
            )
        )
        new = []
        for like, value, seed in zip(written, values, seeds, strict=True):
            if is_encoded(like):
                entries = width * (2 if jnp.issubdtype(like.dtype, jnp.complexfloating) else 1)
                offset = first_row(i).astype(jnp.uint32) * np.uint32(entries)
                bits = None if seed is None else like.bits(seed, (size, width), offset)
                new.append(like.encode_rows(value, bits))
            else:
                new.append(value.astype(like.dtype))
        new = _as_integers(new)
        if shorter:
            # The last piece overlaps the one before, whose rows are done.
            fresh = first_row(i) + jnp.arange(size) >= i * size
            new = jax.tree.map(lambda x, y: jnp.where(fresh[:, None], x, y), new, old)
        return new, others

    def put(wholes: list[Any], pieces: list[Any], i: Any) -> list[Any]:
        start = first_row(i)
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0), wholes, pieces
        )

    def body(i: Any, carry: Any) -> Any:
        # A piece is put back in the next round, before that one is cut out. If it were read and
        # written in the same round, kernels would read the old leaf after others have written it,
        # so XLA would copy it. And XLA:CPU would compute a piece in the kernel that puts it back,
        # which runs on one thread.
        wholes, done, _ = carry
        wholes = put(wholes, done, jnp.maximum(i - 1, 0))
        return wholes, *new_piece(i, cut(wholes, i))

    number = -(-rows // size)
    shapes = jax.eval_shape(lambda x: new_piece(jnp.int32(0), cut(x, 0))[1], wholes)
    others = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    first = cut(wholes, jnp.int32(0))
    first = tree.after(first, after)
    start = (wholes, first, others)
    wholes, last, others = jax.lax.fori_loop(0, number, body, start)
    wholes = put(wholes, last, jnp.int32(number - 1))
    wholes = _as_they_were(wholes, forms)
    return [_like(e, x) for e, x in zip(written, wholes, strict=True)], others


def last_of(result: Array | Encoded, after: Any) -> Any:
    """What the next leaf comes `after`: a number of this result, if it is large enough."""
    if math.prod(result.shape) < _SMALL or _is_sharded([result]):
        return after
    x = jax.tree.leaves(result)[-1]
    return x[(0,) * x.ndim].real.astype(jnp.float32)


def map_in_pieces(
    rule: Callable[..., Any], old: PyTree, new: PyTree, now: SimpleNamespace, clock: Any
) -> PyTree:
    """`tree.map_leaves(rule, (old, new), now)` in the codecs of the old values.

    **Arguments:**

    - `rule`: an elementwise function `rule(now, old, new)`.
    - `old`: a tree with encoded leaves.
    - `new`: a tree of arrays like it.
    - `now`: numbers by name, or vectors with an entry for each leaf.
    - `clock`: a number that differs between steps, for stochastic rounding.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(old, is_leaf=is_encoded)
    results, after = [], jnp.zeros((), jnp.float32)
    for i, ((path, a), g) in enumerate(zip(named, structure.flatten_up_to(new), strict=True)):
        numbers = {n: x[i] if jnp.ndim(x) else x for n, x in vars(now).items()}

        def at_leaf(read: list[Any], written: list[Any], numbers: Any = numbers) -> Any:
            return [tree.map_leaves(rule, (*written, *read), SimpleNamespace(**numbers))], None

        seeds = [seed_of(dotted(path), clock)]
        (result,), _ = in_pieces(at_leaf, [g], [a], seeds, after)
        results.append(result)
        after = last_of(result, after)
    return structure.unflatten(results)


def _whole(
    rule: Callable[..., Any],
    read: Sequence[Array | Encoded],
    held: Sequence[Array | Encoded],
    written: Sequence[Array | Encoded],
    seeds: Sequence[Any],
) -> tuple[list[Array | Encoded], PyTree]:
    own = [x.decode() if is_encoded(x) else x for x in read]
    old = [x.decode() if is_encoded(x) else x for x in held]
    new, others = rule(own, old)
    results = []
    for like, value, seed in zip(written, new, seeds, strict=True):
        if is_encoded(like):
            bits = None if seed is None else like.bits(seed, like.rows)
            results.append(like.encode(value, bits))
        else:
            results.append(value.astype(like.dtype))
    return results, others


def _from_stored(
    rule: Callable[..., Any],
    read: Sequence[Array | Encoded],
    written: Sequence[Array | Encoded],
    seeds: Sequence[Any],
) -> tuple[list[Array | Encoded], PyTree]:
    """As `_whole`, where the rule goes on with new values as they are stored.

    XLA:CPU makes a kernel of each result. If these read what is stored, they need not compute the
    new values again, and the old ones can be overwritten.
    """
    own = [x.decode() if is_encoded(x) else x for x in read]
    old = [x.decode() if is_encoded(x) else x for x in written]
    closed, shapes = jax.make_jaxpr(rule, return_shape=True)(own, old)
    program, unknown = closed.jaxpr, closed.jaxpr.debug_info.with_unknown_names()
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= zip(program.invars, jax.tree.leaves((own, old)), strict=True)
    results: dict[int, Array | Encoded] = {}

    def value_of(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    def store(i: int, value: Array) -> Array:
        like = written[i]
        assert is_encoded(like)
        bits = None if seeds[i] is None else like.bits(seeds[i], like.rows)
        results[i] = new = like.encode(value, bits)
        return new.decode()

    places = {
        program.outvars[i]: i
        for i, like in enumerate(written)
        if is_encoded(like) and not isinstance(program.outvars[i], Literal)
    }
    for equation in program.eqns:
        free = [v for v in equation.invars if not isinstance(v, Literal)]
        alone = program.replace(
            constvars=(), invars=free, outvars=equation.outvars, eqns=[equation], debug_info=unknown
        )
        new = jax.core.eval_jaxpr(alone, (), *map(value_of, free))
        for var, value in zip(equation.outvars, new, strict=True):
            values[var] = store(places[var], value) if var in places else value
    new, others = jax.tree.unflatten(jax.tree.structure(shapes), map(value_of, program.outvars))
    for i, like in enumerate(written):
        if not is_encoded(like):
            results[i] = new[i].astype(like.dtype)
        elif i not in results:
            store(i, new[i])
    return [results[i] for i in range(len(written))], others


# --- leaves as matrices ---------------------------------------------------------------------


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = row_shape(shape)
    return math.prod(rows[:-1]), rows[-1]


def _matrix(x: Any, rows: int, width: int) -> Any:
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


def _as_integers(arrays: PyTree) -> PyTree:
    """The bits of arrays such as bfloat16 ones: on a CPU, XLA cannot write a piece of these without
    converting all of the array."""

    def bits(x: Array) -> Array:
        info = jnp.finfo(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None
        if info is None or x.dtype == jnp.float16 or info.bits > 16:
            return x
        return jax.lax.bitcast_convert_type(x, f"uint{info.bits}")

    return jax.tree.map(bits, arrays)


def _as_they_were(arrays: PyTree, like: PyTree) -> PyTree:
    """Undoes `_as_integers`."""
    return jax.tree.map(
        lambda x, y: x if x.dtype == y.dtype else jax.lax.bitcast_convert_type(x, y.dtype),
        arrays,
        like,
    )


def _decoded(like: Array | Encoded, x: Any, shape: tuple[int, int]) -> Array:
    return like.decode_rows(x, shape) if is_encoded(like) else x


def _rows_per_piece(rows: int, width: int) -> int:
    """How many rows a piece has. A number that divides the rows spares a last, shorter piece."""
    most = max(1, _SIZES.get(jax.default_backend(), _SIZE) // max(1, width))
    if rows <= 2 * most:
        return rows
    return next((n for n in range(most, most // 4, -1) if rows % n == 0), most)


def _is_sharded(leaves: Sequence[Array | Encoded]) -> bool:
    """Whether leaves are on a mesh of several devices, whose partitioner would gather a leaf to cut
    it."""
    return any(jax.typeof(x).sharding.mesh.size > 1 for x in jax.tree.leaves(leaves))
