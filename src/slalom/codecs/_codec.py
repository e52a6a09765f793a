"""The base of all codecs, and helpers."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int32, UInt16

from .. import tree
from .._core.engine.encoded import Spec, uniform
from .._core.text.printing import AbstractPrinted
from ..tree.sharding import reshaped


class AbstractCodec(AbstractPrinted):
    """A way to store an array in fewer bits, for `tx.store`.

    A subclass writes `encode` and `decode`, and `check` if there are arrays that it cannot hold.
    All its fields are static. It works along the last axis only: every array that it returns has
    the other axes of `x`, so that a leaf can be sharded along them.

    ```python
    >>> class halves(sl.codecs.AbstractCodec):
    ...     def encode(self, x, spec, bits=None):
    ...         return {"codes": x.astype(jnp.float16)}
    ...     def decode(self, arrays, spec):
    ...         return arrays["codes"].astype(spec.dtype)
    >>> opt = sl.Optimizer(sl.lion(1e-4).store(halves(), min_size=1), {"w": jnp.ones(4)})
    >>> opt.state_of("scale_by_lion").mu["w"].arrays["codes"].dtype
    dtype('float16')

    ```
    """

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*shape"], spec: Spec, bits: Any = None) -> dict[str, Array]:
        """The arrays to store.

        **Arguments:**

        - `x`: the array, in at least float32.
        - `spec`: its shape, its dtype in the state, and whether it must stay ≥ 0.
        - `bits`: 32 random bits for each entry, for stochastic rounding, or `None` to round to the
            nearest.

        **Returns:** arrays by name, with the axes of `x` except for the last one.
        """

    @abc.abstractmethod
    def decode(self, arrays: dict[str, Any], spec: Spec) -> Float[Array, "*shape"]:
        """The array that was encoded.

        **Arguments:**

        - `arrays`: the result of `encode`.
        - `spec`: as for `encode`.
        """

    def check(self, spec: Spec) -> None:
        """Raises a `ValueError` for an array that this codec cannot hold. Defaults to none.

        **Arguments:**

        - `spec`: as for `encode`.
        """

    def plain_dtype(self, spec: Spec) -> np.dtype | None:
        """The dtype, if an array of it is all that is stored, and rules may read and write it
        themselves. Defaults to `None`.

        **Arguments:**

        - `spec`: as for `encode`.
        """
        return None

    def is_elementwise(self, spec: Spec) -> bool:
        """Whether each element is stored separately. Updates are then computed from the elements as
        they are stored, and a step needs no scratch memory. Defaults to `False`.

        **Arguments:**

        - `spec`: as for `encode`.
        """
        return False


def stochastic_bits(chosen: bool | None, spec: Spec, bits: Any) -> Any:
    """The bits for stochastic rounding, or `None` to round to the nearest.

    By default only what must stay ≥ 0 is rounded stochastically. A mean of squares changes by a
    thousandth in a step. Rounding to the nearest would undo such changes, always.
    """
    return bits if (spec.nonnegative if chosen is None else chosen) else None


def rounded(x: Float[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The nearest whole numbers. Undefined for NaN, and for values of 2²² or more."""
    # The addition rounds, and its last bits are the number. A conversion would take longer, since
    # it also minds NaN and the largest integer.
    one_and_a_half = np.float32(1.5 * 2**23)
    return jax.lax.bitcast_convert_type(x + one_and_a_half, jnp.int32) - one_and_a_half.view(
        np.int32
    )


# --- blocks along the last axis -------------------------------------------------------------


def in_blocks(x: Array, size: int) -> Array:
    """The last axis as blocks, padded with zeros: (..., blocks, size)."""
    length = x.shape[-1]
    missing = -length % size
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return reshaped(x, (*x.shape[:-1], (length + missing) // size, size))


def from_blocks(x: Array, length: int) -> Array:
    """Undoes `in_blocks`."""
    flat = reshaped(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))
    return flat if flat.shape[-1] == length else flat[..., :length]


def rounded_root(x: Float[Array, "*shape"], bits: Any) -> Int32[Array, "*shape"]:
    """Whole numbers ≥ 0 next to x ≥ 0: the nearest, or with bits such that the mean of their
    squares is x²."""
    if bits is None:
        return rounded(x)
    below = jnp.floor(x)
    up = uniform(bits) * (2 * below + 1) < (x - below) * (x + below)
    return rounded(below + up.astype(jnp.float32))


def largest(blocks: Array) -> Array:
    """The largest absolute value of each block; NaN if not all of the block is finite."""
    # As integers, which XLA:CPU vectorizes. It would hand the maximum of floats to a library, and
    # write the blocks to memory before.
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    maximum = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1, initial=0), jnp.float32)
    return jnp.where(maximum < jnp.inf, maximum, jnp.nan)


def relative(blocks: Array, scales: Array) -> Array:
    """Blocks divided by their scales."""
    return tree.divided(blocks, scales.astype(jnp.float32)[..., None])


def as_float32(x: Array) -> Float[Array, "*shape"]:
    """The array in float32, in which codecs compute. Larger numbers of float64 become infinite."""
    return jnp.asarray(x, jnp.float32)


def root(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """√x, and 0 where rounding made x negative."""
    return tree.root(jnp.maximum(x, 0))


def up_to_bfloat16(x: Float[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """The next larger bfloat16 of a float32 ≥ 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)


def as_bits(scales: BFloat16[Array, "*shape"]) -> UInt16[Array, "*shape"]:
    """The bits of scales, to be stored: on a CPU, XLA cannot write a piece of a bfloat16 array
    without converting all of it."""
    return jax.lax.bitcast_convert_type(scales, jnp.uint16)


def from_bits(bits: UInt16[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Undoes `as_bits`, in float32."""
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
