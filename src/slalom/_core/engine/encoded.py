"""Leaves of a state that are stored in a codec.

An encoded leaf stands where the array stood: in a parameter-shaped field, at its parameter. Its
arrays have the names that the codec gives them, so a path such as `scale_by_adam.mu.weight.codes`
still names the field and the parameter.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt32

from ...tree.dtypes import accumulation_dtype, cast, real_dtype
from ...tree.fresh import reshaped
from ...tree.kernels import as_arguments
from ...tree.leaves import scale
from ...tree.paths import CodeKey, dotted
from ...tree.rounding import hashed, scramble

_SHORT = 32
"""The length from which the last axis of an array is long enough for blocks."""
_LONG = 256
"""The length of the rows into which a long vector is folded."""


class Spec(NamedTuple):
    """What a codec knows about an array.

    **Arguments:**

    - `shape`: its shape, with at least one axis.
    - `dtype`: its dtype, real.
    - `nonnegative`: whether it must stay ≥ 0, like a mean of squares.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nonnegative: bool = False


class Encoded:
    """An encoded array.

    **Arguments:**

    - `arrays`: what the codec made of it, by name.
    - `codec`: the codec.
    - `shape`, `dtype`: those of the array.
    - `nonnegative`: whether it must stay ≥ 0.
    """

    __slots__ = ("arrays", "codec", "dtype", "nonnegative", "shape")

    def __init__(
        self,
        arrays: dict[str, Any],
        codec: Any,
        shape: tuple[int, ...],
        dtype: np.dtype,
        nonnegative: bool,
    ):
        self.arrays = arrays
        self.codec = codec
        self.shape = shape
        self.dtype = dtype
        self.nonnegative = nonnegative

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape that the codec sees: the last axis is long enough for blocks."""
        return row_shape(self.shape)

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything but the values: two leaves of one form can exchange their arrays."""
        return self.codec, self.shape, self.dtype, self.nonnegative

    def decode(self) -> Array:
        """The array."""
        return reshaped(self.decode_rows(self.arrays, self.rows), self.shape)

    def encode(self, x: Array, bits: UInt32[Array, "..."] | None = None) -> "Encoded":
        """Another array of the same shape in the same codec."""
        arrays = self.encode_rows(reshaped(x, self.rows), bits)
        return Encoded(arrays, *self.form)

    def decode_rows(self, arrays: dict[str, Any], shape: tuple[int, ...]) -> Array:
        """Some rows, whose arrays these are, of this shape."""
        x = self.codec.decode(arrays, self._spec(shape))
        if not self._is_complex:
            return cast(x, self.dtype)
        real, imag = jnp.split(cast(x, real_dtype(self.dtype)), 2, axis=-1)
        return jax.lax.complex(real, imag)

    def encode_rows(self, x: Array, bits: UInt32[Array, "..."] | None) -> dict[str, Any]:
        """The arrays of some rows."""
        spec = self._spec(x.shape)
        if self._is_complex:
            x = jnp.concatenate([x.real, x.imag], axis=-1)
        return self.codec.encode(cast(x, accumulation_dtype(x.dtype)), spec, bits)

    def bits(self, seed: UInt32[Array, ""], shape: tuple[int, ...], start: Any = 0) -> Array:
        """Random bits for the rows of this shape, from the number `start` on."""
        return random_bits(seed, self._spec(shape).shape, start)

    @property
    def _is_complex(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def spec(self) -> Spec:
        """What the codec knows about the array."""
        return self._spec(self.rows)

    def _spec(self, shape: tuple[int, ...]) -> Spec:
        if self._is_complex:
            # The real parts of a row, then its imaginary parts.
            shape = (*shape[:-1], 2 * shape[-1])
        return Spec(shape, real_dtype(self.dtype), self.nonnegative)

    def __repr__(self) -> str:
        return f"Encoded({self.codec!r}, {self.dtype}{list(self.shape)})"


jax.tree_util.register_pytree_with_keys(
    Encoded,
    lambda e: (tuple((CodeKey(k), x) for k, x in e.arrays.items()), (tuple(e.arrays), *e.form)),
    lambda aux, arrays: Encoded(dict(zip(aux[0], arrays, strict=True)), *aux[1:]),
)


def is_encoded(x: Any) -> TypeGuard[Encoded]:
    """Whether this is an encoded leaf."""
    return isinstance(x, Encoded)


class Scaled:
    """An array, perhaps encoded, whose multiplication by some numbers is still to be done.

    Where gradients are unscaled or clipped, XLA would write the products to memory if a loop over
    pieces of a leaf reads them, or if a norm of them is measured.

    **Arguments:**

    - `leaf`: the array.
    - `factors`: the numbers, real scalars.
    """

    __slots__ = ("factors", "leaf")

    def __init__(self, leaf: Any, factors: tuple[Any, ...]):
        self.leaf = leaf
        self.factors = factors

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.shape

    @property
    def dtype(self) -> np.dtype:
        return self.leaf.dtype

    def decode(self) -> Array:
        """The product."""
        return self.times_factors(self.leaf.decode() if is_encoded(self.leaf) else self.leaf)

    def times_factors(self, x: Array) -> Array:
        """The product of a part of the array and the factors."""
        return functools.reduce(scale, self.factors, x)


jax.tree_util.register_pytree_node(
    Scaled, lambda s: ((s.leaf, s.factors), None), lambda _, children: Scaled(*children)
)

AtRest: TypeAlias = Array | Encoded | Scaled
"""A leaf as it rests between two uses."""


def rests(x: Any) -> TypeGuard[Encoded | Scaled]:
    """Whether this is a leaf that must be decoded."""
    return isinstance(x, Encoded | Scaled)


def scaled(tree: PyTree, *factors: Any) -> PyTree:
    """A tree times some numbers, with the products still to be done."""

    def at_leaf(x: Any) -> Scaled:
        before = (x.leaf, x.factors) if isinstance(x, Scaled) else (x, ())
        return Scaled(before[0], (*before[1], *factors))

    return jax.tree.map(at_leaf, tree, is_leaf=rests)


def has_rest(tree: PyTree) -> bool:
    """Whether a tree has leaves that must be decoded."""
    return any(map(rests, jax.tree.leaves(tree, is_leaf=rests)))


def has_encoded(tree: PyTree) -> bool:
    """Whether a tree has encoded leaves."""
    return any(map(is_encoded, jax.tree.leaves(tree, is_leaf=is_encoded)))


def in_blocks(state: PyTree) -> bool:
    """Whether a leaf is in a codec that needs more than one number at once."""
    leaves = jax.tree.leaves(state, is_leaf=is_encoded)
    return any(not x.codec.is_elementwise(x.spec) for x in leaves if is_encoded(x))


def encoded_as(before: PyTree, fresh: PyTree) -> PyTree:
    """A fresh state in the codecs of the one before."""
    like, structure = jax.tree.flatten(before, is_leaf=is_encoded)

    def again(e: Any, x: Any) -> Any:
        if not is_encoded(e) or is_encoded(x):
            return x
        return encoded_form(x, e.codec, e.nonnegative).encode(x)

    return structure.unflatten(map(again, like, structure.flatten_up_to(fresh)))


def encoded_form(x: Any, codec: Any, nonnegative: bool) -> Encoded:
    """A leaf in a codec without its arrays."""
    return Encoded({}, codec, np.shape(x), np.dtype(x.dtype), nonnegative)


def _nothing(_: Any) -> bool:
    return False


def decoded(tree: PyTree, kept: Callable[[Any], bool] = _nothing) -> PyTree:
    """The tree with an array in place of each encoded leaf, except in subtrees that are `kept`."""
    return jax.tree.map(
        lambda x: x.decode() if rests(x) else x, tree, is_leaf=lambda x: rests(x) or kept(x)
    )


def decoded_again(tree: PyTree) -> PyTree:
    """As `decoded`, for numbers that are measured while the tree stays at rest.

    Behind a barrier, the products are others than those that are used afterwards, each with a
    number of its own: XLA would write a number that they share to memory, once per entry.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=rests)
    factors = [x.factors if isinstance(x, Scaled) else () for x in leaves]
    own = jax.lax.optimization_barrier(factors) if any(factors) else factors
    again = [
        Scaled(x.leaf, f) if isinstance(x, Scaled) else x for x, f in zip(leaves, own, strict=True)
    ]
    return decoded(structure.unflatten(again))


def encoded_again(
    before: PyTree,
    after: PyTree,
    clock: Any,
    name: str = "",
    kept: Callable[[Any], bool] = _nothing,
) -> PyTree:
    """New values in the codecs of the old ones.

    **Arguments:**

    - `before`: a tree with encoded leaves.
    - `after`: the same tree with arrays in their places.
    - `clock`: the number of steps, for stochastic rounding.
    - `name`: the name of the tree, so that different ones are rounded differently.
    - `kept`: whether a subtree of `before` was not decoded.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(
        before, is_leaf=lambda x: is_encoded(x) or kept(x)
    )
    names = [f"{name}.{dotted(path)}" for path, _ in named]
    coded = [name for name, (_, old) in zip(names, named, strict=True) if is_encoded(old)]
    seeds = seeds_of(coded, clock)

    def again(name: str, old: Any, x: Any) -> Any:
        return old.encode(x, old.bits(seeds[name], old.rows)) if name in seeds else x

    triples = zip(names, named, structure.flatten_up_to(after), strict=True)
    return structure.unflatten([again(name, old, x) for name, (_, old), x in triples])


# --- rows -----------------------------------------------------------------------------------


def row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a codec sees an array: its last axis is long enough for blocks.

    The last axes are joined until they are; a long vector is folded.
    """
    shape = shape or (1,)
    while len(shape) > 1 and shape[-1] < _SHORT:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) == 1 and shape[0] > _LONG and shape[0] % _LONG == 0:
        shape = (shape[0] // _LONG, _LONG)
    return shape


# --- random bits ----------------------------------------------------------------------------


def seeds_of(names: Sequence[str], clock: Any) -> dict[str, UInt32[Array, ""]]:
    """Seeds that differ between names and steps, by name."""
    if not names:
        return {}
    step = scramble(clock.astype(jnp.uint32))
    own = as_arguments([np.uint32(zlib.crc32(name.encode())) for name in names], step)
    return {name: seed ^ step for name, seed in zip(names, own, strict=True)}


def random_bits(seed: UInt32[Array, ""], shape: tuple[int, ...], start: Any = 0) -> Array:
    """32 random bits for each entry: a hash of the seed and of the position in the array.

    It is elementwise, so it needs no memory, and gives the same bits however an array is sharded or
    cut into pieces. JAX's own generator would write them to memory. The high bits are better than
    the low ones.
    """
    position = jnp.asarray(start, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        position = position + along * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return hashed(position + seed)


def uniform(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Numbers in [0, 1) from random bits."""
    # Through int32, from which CPUs convert faster.
    return (bits >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)
