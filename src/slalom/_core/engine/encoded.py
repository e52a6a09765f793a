"""Leaves of a state that are stored in a codec.

An encoded leaf stands where the array stood: in a parameter-shaped field, at its parameter. Its
arrays have the names that the codec gives them, so a path such as `scale_by_adam.mu.weight.codes`
still names the field and the parameter.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree, UInt32

from ...tree.dtypes import accumulation_dtype, cast, cast_like, real_dtype
from ...tree.leaves import scale
from ...tree.paths import CodeKey, dotted
from ...tree.rounding import flat_positions, hashed, scramble
from ...tree.sharding import placed_like, reshaped
from ...tree.tracing import as_arguments, false_after, once_known
from ...tree.types import Scalar, Step

_SHORT = 32
"""The length from which the last axis of an array is long enough for blocks."""
_LONG = 256
"""The length of the rows into which a long vector is folded."""


class Spec(NamedTuple):
    """The shape and dtype of an array, for its codec.

    **Arguments:**

    - `shape`: its shape, with at least one axis.
    - `dtype`: its dtype, real.
    - `nonnegative`: whether it must stay ≥ 0, like a mean of squares.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nonnegative: bool = False


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Encoded:
    """An encoded array.

    **Arguments:**

    - `arrays`: the codes of the codec, by name.
    - `codec`: the codec.
    - `shape`, `dtype`: the shape and dtype of the array.
    - `nonnegative`: whether it must stay ≥ 0.
    """

    arrays: dict[str, Any]
    codec: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    nonnegative: bool

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything but the values: two leaves of one form can exchange their arrays."""
        return self.codec, self.shape, self.dtype, self.nonnegative

    def decode(self) -> Array:
        """The array."""
        x = self.codec.decode(self.arrays, self.spec)
        if self._is_complex:
            x = jax.lax.complex(*jnp.split(cast(x, real_dtype(self.dtype)), 2, axis=-1))
        return reshaped(cast(x, self.dtype), self.shape)

    def encode(self, x: Array, seed: UInt32[Array, ""] | None = None) -> "Encoded":
        """Another array of the same shape in the same codec.

        **Arguments:**

        - `x`: the array.
        - `seed`: the seed of the random bits for stochastic rounding. If it is `None`, the codec
            rounds to nearest.
        """
        x = reshaped(x, row_shape(self.shape))
        if self._is_complex:
            x = jnp.concatenate([x.real, x.imag], axis=-1)
        bits = None if seed is None else random_bits(seed, self.spec.shape)
        arrays = self.codec.encode(cast(x, accumulation_dtype(x.dtype)), self.spec, bits)
        return Encoded(arrays, *self.form)

    @property
    def is_blockwise(self) -> bool:
        """Whether the codec needs more than one number at once."""
        return not self.codec.is_elementwise(self.spec)

    @property
    def _is_complex(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def spec(self) -> Spec:
        """The shape and dtype of the array, for its codec."""
        shape = row_shape(self.shape)
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


def is_encoded(x: object) -> TypeGuard[Encoded]:
    """Whether this is an encoded leaf."""
    return isinstance(x, Encoded)


class _Product:
    """A codec of products: an array and a number, multiplied when the product is read.

    XLA would write the product to memory if both a norm and a rule read it.
    """

    def is_elementwise(self, spec: Spec) -> bool:
        return True

    def decode(self, arrays: dict[str, Any], spec: Spec) -> Array:
        return scale(arrays["x"], arrays["factor"])


_PRODUCT = _Product()


def scaled(tree: PyTree, factor: Scalar) -> PyTree:
    """A tree of arrays times a number, which are multiplied where the products are read."""

    def at_leaf(x: Array) -> Any:
        if jnp.iscomplexobj(x):
            return scale(x, factor)
        arrays = {"x": x, "factor": factor}
        return Encoded(arrays, _PRODUCT, x.shape, accumulation_dtype(x.dtype), False)

    return jax.tree.map(at_leaf, tree)


def for_sums(leaves: list[Any]) -> list[Any]:
    """The same leaves, with products that share no factor with each other or with other uses."""

    def is_product(x: object) -> bool:
        return is_encoded(x) and x.codec is _PRODUCT

    factors = [x.arrays["factor"] for x in leaves if is_product(x)]
    # One barrier for all. Equal ones would become one, and the leaves would share a number again.
    separate = iter(jax.lax.optimization_barrier(factors) if factors else [])
    return [
        Encoded({"x": x.arrays["x"], "factor": next(separate)}, *x.form) if is_product(x) else x
        for x in leaves
    ]


def has_encoded(tree: PyTree) -> bool:
    """Whether a tree has encoded leaves."""
    return any(map(is_encoded, jax.tree.leaves(tree, is_leaf=is_encoded)))


def blockwise(tree: PyTree) -> list[Encoded]:
    """The leaves of a tree that are in a codec of blocks."""
    leaves = jax.tree.leaves(tree, is_leaf=is_encoded)
    return [x for x in leaves if is_encoded(x) and x.is_blockwise]


def decoded(tree: PyTree, kept: Callable[[Any], bool] = lambda _: False) -> PyTree:
    """The tree with an array in place of each encoded leaf, except in subtrees that are `kept`."""
    return jax.tree.map(
        lambda x: x.decode() if is_encoded(x) else x,
        tree,
        is_leaf=lambda x: is_encoded(x) or kept(x),
    )


def encoded_again(
    before: PyTree,
    after: PyTree,
    clock: Step | None,
    name: str,
    kept: Callable[[Any], bool] = lambda _: False,
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

    def again(name: str, old: PyTree, x: PyTree) -> PyTree:
        return old.encode(x, seeds[name]) if name in seeds else x

    triples = zip(names, named, structure.flatten_up_to(after), strict=True)
    return structure.unflatten([again(name, old, x) for name, (_, old), x in triples])


def as_if_decoded(updates: PyTree) -> PyTree:
    """A tree with the structure, shapes and dtypes of the decoded one, for checks and paths."""

    return jax.tree.map(
        lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape) if is_encoded(x) else x,
        updates,
        is_leaf=is_encoded,
    )


# --- one leaf after the other ---------------------------------------------------------------


def decoded_leaf(
    x: PyTree, like: Array | None = None, signal: Bool[Array, ""] | None = None
) -> PyTree:
    """A leaf as an array.

    **Arguments:**

    - `x`: the leaf, which may be encoded.
    - `like`: an array with the sharding of the result.
    - `signal`: the signal from `signal_of` that a leaf in blocks waits for. XLA would decode all
        leaves first, each into memory of its own. Where each waits for the one before, they share
        it.
    """
    if not is_encoded(x):
        return x
    if signal is not None and x.is_blockwise:
        x = once_known(x, signal)
    # A codec may have to keep a sharded axis whole, and JAX selects between equal shardings.
    return x.decode() if like is None else placed_like(x.decode(), like)


def stored_like(old: PyTree, value: PyTree, seed: Array | None = None) -> tuple[Any, Any]:
    """Stores a new value in the form of the old one. Also returns the value that later computations
    read.

    **Arguments:**

    - `old`: the old leaf, which may be encoded.
    - `value`: the new array.
    - `seed`: the seed of the random bits, if it is rounded stochastically.
    """
    if not is_encoded(old):
        value = jax.tree.map(placed_like, cast_like(value, old), old)
        return value, value
    value = cast(value, old.dtype)
    new = old.encode(value, seed)
    # Values that are read from the codes need not be computed again.
    return new, value if old.is_blockwise else new.decode()


def signal_of(new: PyTree, before: Bool[Array, ""] | None) -> Bool[Array, ""] | None:
    """A signal that the new arrays of a leaf are encoded, or else the signal of the leaf before."""
    arrays = [x for coded in blockwise(new) for x in jax.tree.leaves(coded) if x.size]
    # One entry of an array on several devices would be sent to all of them.
    if not arrays or any(jax.typeof(x).sharding.mesh.size > 1 for x in arrays):
        return before
    # The last array holds scales. XLA would compute a code again where it is read.
    return _signal_after(arrays[-1])


@jax.jit  # shared by the leaves of one shape
def _signal_after(x: Array) -> Bool[Array, ""]:
    # A GPU decodes in the kernels that read, so it has nothing to wait for.
    return jax.lax.platform_dependent(x, cpu=false_after, default=lambda _: jnp.bool_(False))


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
    hashes = as_arguments([np.uint32(zlib.crc32(name.encode())) for name in names], step)
    return {name: seed ^ step for name, seed in zip(names, hashes, strict=True)}


def random_bits(seed: UInt32[Array, ""], shape: tuple[int, ...]) -> Array:
    """32 random bits for each entry: a hash of the seed and of the position in the array.

    It is elementwise, so it needs no memory, and gives the same bits however an array is sharded.
    JAX's own generator would write them to memory. The high bits are better than the low ones.
    """
    return hashed(flat_positions(shape) + seed)


def uniform(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Numbers in [0, 1) from random bits."""
    # Through int32, from which CPUs convert faster.
    return (bits >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)
