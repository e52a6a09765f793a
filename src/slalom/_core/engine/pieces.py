"""Leaves that are read and written as they rest, large ones piece by piece and in place.

A codec needs the largest number of each block before it can encode the first, so XLA writes new
values to memory before it encodes them. Of a whole leaf they would take as much memory as the
parameters. A loop over pieces of it needs the memory of one piece.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ... import tree
from ...tree.fresh import placed_like
from ...tree.paths import leaf_paths
from ...tree.types import under_jit
from .encoded import AtRest, Encoded, Scaled, is_encoded, rests, row_shape, seeds_of

Store: TypeAlias = Callable[[int, Any], Any]
"""Stores a new value of the leaf with this number, and returns it as later phases see it."""
Body: TypeAlias = Callable[[list[Any], list[Any], Store], None]
"""What happens to some leaves of equal shape: called with the decoded leaves that are only read,
those that may be written, and a function that stores."""

_SIZES = {"cpu": 2**17}
"""The number of entries in a piece, by platform: few enough for the cache of a CPU. Elsewhere
leaves stay whole: on an H100, AdamW in int8 took 4.4 ms for GPT-2 small in pieces of 2²², and
2.7 ms without."""
_AT_ONCE = 3 * 2**16
"""How many entries of encoded leaves are worked on at once. Others wait for the scratch memory."""


def run_at_rest(
    body: Body,
    read: Sequence[AtRest],
    written: Sequence[AtRest | None],
    seeds: Sequence[Any],
    after: Array,
) -> tuple[list[Any], Array | None]:
    """Runs phases on some leaves of equal shape.

    **Arguments:**

    - `body`: the phases, which act on each number separately if a leaf is in a codec of blocks.
    - `read`, `written`: the leaves. `None` stands for a result that overwrites nothing.
    - `seeds`: for each written leaf the seed of its stochastic rounding, or `None`.
    - `after`: the bool that an earlier call has returned. It keeps XLA from cutting out the first
        pieces of all leaves, or from decoding all smaller leaves, at once.

    **Returns:** the written leaves, where those that `body` has not stored are as they were, and a
    bool that later calls can wait for. It is false, and `None` if there is nothing to wait for.
    """
    if all(e.codec.is_elementwise(e.spec) for e in (*read, *written) if is_encoded(e)):
        new = run_whole(body, read, written, seeds)
        return new, waited_for(new)
    shape = tuple(read[0].shape)
    rows, width = _as_matrix(shape)
    size = _rows_per_piece(rows, width)
    if size >= rows or _is_sharded([*read, *(x for x in written if x is not None)]):
        new = run_whole(body, read, tree.once_known(list(written), after), seeds)
        return new, waited_for(new)
    filled = [x if x is not None else _zeros(body, read, written, seeds) for x in written]
    return _in_pieces(body, read, filled, seeds, after, (rows, width, size))


def run_whole(
    body: Body, read: Sequence[PyTree], written: Sequence[PyTree], seeds: Sequence[Any]
) -> list[Any]:
    """As `run_at_rest`, on whole leaves. Some may be trees of arrays, such as a tuple of means
    along each axis."""
    results: list[Any] = list(written)
    stored: list[int] = []
    late: dict[int, Array] = {}

    def store(i: int, value: Any) -> Any:
        like = written[i]
        value = value if like is None else _cast_like(value, like)
        if is_encoded(like) and not like.codec.is_elementwise(like.spec):
            late[i] = value
            return value
        stored.append(i)
        results[i] = encoded(i, value) if is_encoded(like) else value
        # XLA:CPU makes a kernel of each result. If later ones read what is stored, they need not
        # compute the new values again, and the old ones can be overwritten.
        return results[i].decode() if is_encoded(like) else value

    def encoded(i: int, value: Array) -> Encoded:
        bits = None if seeds[i] is None else written[i].bits(seeds[i], written[i].rows)
        return written[i].encode(value, bits)

    def at_home(x: Any) -> Any:
        # A codec may have to keep a sharded axis whole, and JAX selects between equal shardings.
        return placed_like(x.decode(), own[0]) if rests(x) else x

    own = [x.decode() if rests(x) else x for x in read[:1]]
    own += map(at_home, read[1:])
    body(own, list(map(at_home, written)), store)
    before = [results[i] for i in sorted(stored)]
    waits = jax.default_backend() in _SIZES and not _is_sharded([*read, *late.values()])
    for i, value in late.items():
        # The kernels before this one compute the new value themselves, from the old codes.
        results[i] = encoded(i, tree.after(value, before) if waits else value)
        before = results[i]
    return results


def _zeros(
    body: Body, read: Sequence[AtRest], written: Sequence[AtRest | None], seeds: Sequence[Any]
) -> Array:
    """An array in place of the result that overwrites nothing."""
    i = list(written).index(None)
    shape = jax.eval_shape(
        lambda read, written: run_whole(body, read, written, seeds)[i], read, written
    )
    return jnp.zeros(shape.shape, shape.dtype)


def _in_pieces(
    body: Body,
    read: Sequence[AtRest],
    written: Sequence[AtRest],
    seeds: Sequence[Any],
    after: Any,
    cuts: tuple[int, int, int],
) -> tuple[list[AtRest], Array | None]:
    rows, width, size = cuts
    shorter = rows % size != 0
    given = [_matrix(x, rows, width) for x in read]
    matrices = _as_integers(given)
    forms = [_matrix(x, rows, width) for x in written]
    # Where this makes other arrays, they are made one leaf after the other.
    wholes = jax.tree.map(
        lambda x, y: x if x.dtype == y.dtype else tree.once_known(x, after),
        _as_integers(forms),
        forms,
    )

    def first_row(i: Any) -> Any:
        return jnp.minimum(i * size, rows - size) if shorter else i * size

    # No index is negative. If JAX allowed for it, each kernel would have three more operations.
    def cut(wholes: list[Any], i: Any) -> list[Any]:
        start = first_row(i)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, allow_negative_indices=False),
            wholes,
        )

    def new_piece(i: Any, old: list[Any]) -> list[Any]:
        pieces = (_as_they_were(cut(matrices, i), given), _as_they_were(old, forms))
        results = list(pieces[1])

        def store(n: int, value: Array) -> Array:
            like = written[n]
            value = _cast_like(value, like)
            if not is_encoded(like):
                results[n] = value
                return value
            entries = width * (2 if jnp.issubdtype(like.dtype, jnp.complexfloating) else 1)
            offset = first_row(i).astype(jnp.uint32) * np.uint32(entries)
            bits = None if seeds[n] is None else like.bits(seeds[n], (size, width), offset)
            results[n] = new = like.encode_rows(value, bits)
            elementwise = like.codec.is_elementwise(like.spec)
            return like.decode_rows(new, (size, width)) if elementwise else value

        own, now = (
            [_decoded(e, x, (size, width)) for e, x in zip(leaves, xs, strict=True)]
            for leaves, xs in zip((read, written), pieces, strict=True)
        )
        body(own, now, store)
        new = _as_integers(results)
        if shorter:
            # The last piece overlaps the one before, whose rows are done.
            fresh = first_row(i) + jnp.arange(size) >= i * size
            new = jax.tree.map(lambda x, y: jnp.where(fresh[:, None], x, y), new, old)
        return new

    def put(wholes: list[Any], pieces: list[Any], i: Any) -> list[Any]:
        start = first_row(i)
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(
                x, y, start, 0, allow_negative_indices=False
            ),
            wholes,
            pieces,
        )

    def go_on(i: Any, carry: Any) -> Any:
        # A piece is put back in the next round, before that one is cut out. If it were read and
        # written in the same round, kernels would read the old leaf after others have written it,
        # so XLA would copy it. And XLA:CPU would compute a piece in the kernel that puts it back,
        # which runs on one thread.
        wholes, done, _ = carry
        wholes = put(wholes, done, jnp.maximum(i - 1, 0))
        done = new_piece(i, cut(wholes, i))
        # Later leaves wait for what the loop carries: read from the new leaf, it would be computed
        # again in each of their kernels, and the leaf would be copied for it.
        return wholes, done, _after_codes(done, written)

    number = -(-rows // size)
    first = tree.once_known(cut(wholes, jnp.int32(0)), after)
    # Not `False` to begin with, which would not vary over the axes of a `shard_map` as the rest.
    carry = (wholes, first, _after_codes(first, written))
    wholes, last, never = jax.lax.fori_loop(0, number, go_on, carry)
    # XLA:CPU compiles one kernel for all leaves that do the same here, if there is more to do than
    # to put a piece back.
    last = tree.once_known(last, after)
    wholes = _as_they_were(put(wholes, last, jnp.int32(number - 1)), forms)
    return [_like(e, x) for e, x in zip(written, wholes, strict=True)], never


def _cast_like(value: Any, like: Any) -> Any:
    """A new value in the dtype of the old one."""
    if is_encoded(like):
        return tree.cast(value, like.dtype)
    return tree.cast_like(value, like)


class Queue:
    """Which encoded leaves wait for which, so that few of them need scratch memory at a time."""

    def __init__(self):
        self._after = jnp.bool_(False)
        self._running: list[tuple[Array, int]] = []

    def turn(self, shape: tuple[int, ...]) -> Array:
        """What a leaf of this shape waits for."""
        most = _AT_ONCE - math.prod(shape)
        while self._running and sum(n for _, n in self._running) > most:
            self._after, _ = self._running.pop(0)
        return self._after

    def add(self, done: Array | None, shape: tuple[int, ...]) -> None:
        """Adds the leaf of this shape that has begun, with what others can wait for."""
        if done is not None:
            self._running.append((done, math.prod(shape)))


def waited_for(leaves: Sequence[Any]) -> Array | None:
    """`tree.false_after` of what is computed last of some leaves, if anything is encoded."""
    arrays = [x.arrays if is_encoded(x) else x for x in leaves]
    return None if _is_sharded(leaves) else _after_codes(arrays, leaves)


def _after_codes(arrays: Sequence[Any], leaves: Sequence[Any]) -> Array | None:
    """As `waited_for`, where `arrays` are those of the leaves or of pieces of them."""
    # Not after the parameters: in a branch of a conditional, XLA would copy them for it.
    coded = [own for own, x in zip(arrays, leaves, strict=True) if is_encoded(x)]
    if not coded:
        return None
    # After the last one, which is written last. After its scales, since XLA would compute a code
    # again where it is read.
    x = jax.tree.leaves(coded[-1])[-1]
    return tree.false_after(x) if x.size else None


def advance_tree(
    rule: Callable[[Any, Array, Array], Array],
    old: PyTree,
    new: PyTree,
    now: SimpleNamespace,
    context: Any,
    name: str,
) -> PyTree:
    """New values of a tree that a wrapper keeps, stored as the old ones.

    **Arguments:**

    - `rule`: `rule(now, old, new)`, a function of numbers.
    - `old`: the values before, which may be encoded.
    - `new`: a tree of arrays like it.
    - `now`: numbers by name, or vectors with an entry for each leaf.
    - `context`: the context, which knows the clock of stored state.
    - `name`: the name of the tree, so that different ones are rounded differently.
    """
    tree.check_same_structure(tuple(map(as_if_decoded, (old, new))))
    leaves, structure = jax.tree.flatten(old, is_leaf=rests)

    def at_leaf(numbers: Any, a: Any, g: Any, seed: Any, after: Any) -> Any:
        def body(read: list[Any], written: list[Any], store: Store) -> None:
            here = SimpleNamespace(**numbers)
            store(0, tree.map_leaves(rule, (written[0], read[0]), here))

        (new,), done = run_at_rest(body, [g], [a], [seed], after)
        return new, done

    if any(map(under_jit, jax.tree.leaves((old, new)))):
        at_leaf = jax.jit(at_leaf)
    paths = leaf_paths(shapes_of(old))
    coded = [f"{name}.{path}" for path, a in zip(paths, leaves, strict=True) if is_encoded(a)]
    seed_of = seeds_of(coded, None if context is None else context.stored_clock)
    results, queue = [], Queue()
    for i, (a, g) in enumerate(zip(leaves, structure.flatten_up_to(new), strict=True)):
        numbers = {n: x[i] if jnp.ndim(x) else x for n, x in vars(now).items()}
        seed = seed_of.get(f"{name}.{paths[i]}")
        new_leaf, done = at_leaf(numbers, a, g, seed, queue.turn(g.shape))
        results.append(new_leaf)
        queue.add(done, g.shape)
    return structure.unflatten(results)


def as_if_decoded(updates: PyTree) -> PyTree:
    """A tree with the structure, shapes and dtypes of the decoded one, for checks."""

    def like(x: Any) -> Any:
        return np.broadcast_to(np.zeros((), x.dtype), x.shape) if rests(x) else x

    return jax.tree.map(like, updates, is_leaf=rests)


def shapes_of(updates: PyTree) -> PyTree:
    """The updates without their values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), updates, is_leaf=rests)


# --- leaves as matrices ---------------------------------------------------------------------


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = row_shape(shape)
    return math.prod(rows[:-1]), rows[-1]


def _matrix(x: Any, rows: int, width: int) -> Any:
    """A leaf as a matrix; of one at rest, its arrays."""
    if isinstance(x, Scaled):
        return _matrix(x.leaf, rows, width)
    if is_encoded(x):
        return {name: jnp.reshape(a, (rows, -1)) for name, a in x.arrays.items()}
    return jnp.reshape(x, (rows, width))


def _like(like: AtRest, x: Any) -> AtRest:
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


def _decoded(like: AtRest, x: Any, shape: tuple[int, int]) -> Array:
    if isinstance(like, Scaled):
        return like.times_factors(_decoded(like.leaf, x, shape))
    return like.decode_rows(x, shape) if is_encoded(like) else x


def _rows_per_piece(rows: int, width: int) -> int:
    """How many rows a piece has. A number that divides the rows spares a last, shorter piece."""
    entries = _SIZES.get(jax.default_backend(), rows * width)
    most = max(1, entries // max(1, width))
    if rows <= 2 * most:
        return rows
    return next((n for n in range(most, most // 4, -1) if rows % n == 0), most)


def _is_sharded(leaves: Sequence[PyTree]) -> bool:
    """Whether leaves are on a mesh of several devices, whose partitioner would gather a leaf to cut
    it."""
    return any(jax.typeof(x).sharding.mesh.size > 1 for x in jax.tree.leaves(leaves))
