"""Rounding float32 numbers to a half-precision dtype, and the bits that rounding takes away.

XLA may simplify a cast to half precision and back to nothing, where it allows excess precision. So
nothing here reads a number back from a half-precision array that was computed in the same program,
but for `read_back`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Inexact, Int8, UInt32

from .dtypes import accumulation_dtype, cast
from .types import PyTree


def is_half(dtype: Any) -> bool:
    """Whether this is bfloat16 or float16."""
    return dtype in (jnp.bfloat16, jnp.float16)


def nearest(x: Float32[Array, "*shape"], dtype: Any) -> Float32[Array, "*shape"]:
    """The number of this dtype that is nearest to x, as float32."""
    info = jnp.finfo(dtype)
    if info.tiny == jnp.finfo(jnp.float32).tiny:
        return jax.lax.reduce_precision(x, info.nexp, info.nmant)
    # `reduce_precision` makes subnormal numbers zero. In a sum with 1.5·2²³ units in the last
    # place of the dtype, the addition itself rounds to these.
    lift = 1.5 * 2.0 ** (23 - info.nmant) * power_of_two(x, least=float(info.tiny))
    return jnp.where(jnp.isfinite(x), (x + lift) - lift, x)


def read_back(x: Inexact[Array, "*shape"]) -> Inexact[Array, "*shape"]:
    """x in at least float32, rounded to its own dtype also where XLA would drop the cast to it."""
    wide = cast(x, accumulation_dtype(x.dtype))
    return nearest(wide, x.dtype) if is_half(x.dtype) else wide


def as_stored(tree: PyTree) -> PyTree:
    """The arrays with the digits that they have in memory, from which XLA cannot drop a cast."""
    return jax.tree.map(lambda x: cast(read_back(x), x.dtype), tree)


def power_of_two(x: Float32[Array, "*shape"], least: float) -> Float32[Array, "*shape"]:
    """The largest power of two that is at most |x|, between `least` and 2¹⁰⁰."""
    return jnp.clip(power_of_two_below(x), jnp.float32(least), jnp.float32(2.0**100))


def power_of_two_below(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The largest power of two ≤ |x|. Infinity and NaN become infinity."""
    return _number(_bits(x) & np.uint32(0x7F800000))


def _bits(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _number(bits: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def same_bits(a: Array, b: Array) -> Bool[Array, "*shape"]:
    """Marks equal entries of two arrays of one dtype. Half-precision arrays are compared by
    bits."""
    if is_half(a.dtype):
        # Compared as numbers they would be widened, and XLA may drop a rounding before that.
        a, b = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (a, b))
    return a == b


# --- what is left over ----------------------------------------------------------------------


def remainder(x: Float32[Array, "*shape"], rounded: Float32[Array, "*shape"], dtype: Any) -> Array:
    """x − rounded in this dtype, in units that make it at most as large as x.

    So it does not underflow where x does not, and float16 holds it with all of its digits.
    """
    return ((x - rounded) * _lift(dtype)).astype(dtype)


def with_remainder(p: Array, remainder: Array) -> Float32[Array, "*shape"]:
    """The number that was rounded to p, from its remainder.

    The remainder of a number that p does not come from is ignored where it is too large.
    """
    wide, remainder = p.astype(jnp.float32), remainder.astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(wide), jnp.float32(jnp.finfo(p.dtype).tiny))
    return wide + jnp.where(jnp.abs(remainder) <= largest, remainder / _lift(p.dtype), 0)


def _lift(dtype: Any) -> np.float32:
    return np.float32(2.0 ** (jnp.finfo(dtype).nmant + 1))


_SMALL = 2.0**-100
"""Steps of `more_bits` are not finer than for this number, since their inverse must be finite."""


def nearest_for_more_bits(x: Float32[Array, "*shape"], dtype: Any) -> Float32[Array, "*shape"]:
    """The number of this dtype nearest to x plus half a step of `more_bits`.

    Eight bits hold −128 but not 128. Cut off at 127, half a unit in the last place would be an end
    that slow growth never passes.
    """
    half = jnp.where(jnp.abs(x) < _SMALL, 0, 0.5 * _finest(x, dtype))
    return nearest(x + half, dtype)


def more_bits(
    x: Float32[Array, "*shape"], rounded: Float32[Array, "*shape"], dtype: Any
) -> Int8[Array, "*shape"]:
    """x − rounded as an integer, in 2⁻⁸ of the unit in the last place of `rounded`."""
    steps = jnp.round((x - rounded) * (1 / _finest(rounded, dtype)))
    # The comparison is false for NaN, which has no integer.
    return jnp.where(jnp.abs(steps) <= 128, jnp.clip(steps, -128, 127), 0).astype(jnp.int8)


def with_more_bits(p: Array, steps: Int8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The number that was rounded to p, from its `more_bits`."""
    wide = p.astype(jnp.float32)
    return wide + steps.astype(jnp.float32) * _finest(wide, p.dtype)


def _finest(rounded: Float32[Array, "*shape"], dtype: Any) -> Float32[Array, "*shape"]:
    info = jnp.finfo(dtype)
    return power_of_two(rounded, max(float(info.tiny), _SMALL)) * np.float32(
        2.0 ** (-info.nmant - 8)
    )


# --- at random ------------------------------------------------------------------------------


def stochastic(
    x: Float32[Array, "*shape"], dtype: Any, random: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """One of the two numbers of this dtype around x, so that the mean is x.

    **Arguments:**

    - `x`: the numbers. Those that the dtype has do not change.
    - `dtype`: bfloat16 or float16.
    - `random`: independent uniform integers, of which the high bits are used.
    """
    return _stochastic(np.dtype(dtype), x, random)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _stochastic(dtype: np.dtype, x: Array, random: Array) -> Array:
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant
    noise = random >> np.uint32(32 - dropped)
    # A carry out of the bits to be dropped rounds away from zero, and may enter the exponent.
    rounded = _number((_bits(x) + noise) & np.uint32(2**32 - 2**dropped))
    if info.tiny > jnp.finfo(jnp.float32).tiny:
        # Subnormal numbers, which are equally spaced.
        steps = jnp.abs(x) * np.float32(1 / float(info.smallest_subnormal))
        whole = jnp.floor(steps)
        up = (random >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24) < steps - whole
        size = (whole + up.astype(jnp.float32)) * np.float32(info.smallest_subnormal)
        rounded = jnp.where(jnp.abs(x) < np.float32(info.tiny), jnp.copysign(size, x), rounded)
    # XLA:CPU computes nothing before a cast again in the kernels that read its result.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)


@_stochastic.defjvp
def _straight_through(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _stochastic(dtype, *primals), tangents[0].astype(dtype)


def random_bits(
    like: Array, seeds: tuple[UInt32[Array, ""], UInt32[Array, ""]]
) -> UInt32[Array, "*shape"]:
    """Pseudorandom integers, each from its index and two seeds.

    They are computed where they are used, and do not depend on how the array is sharded. They are
    good enough to round with, but are not cryptographic.

    **Arguments:**

    - `like`: an array of their shape and sharding.
    - `seeds`: two integers; equal seeds give equal bits.
    """
    first, second = seeds
    sharding = jax.typeof(like).sharding
    explicit = any(entry is not None for entry in sharding.spec)
    where = flat_positions(like.shape, sharding if explicit else None)
    return hashed(where ^ first, second)


def flat_positions(shape: tuple[int, ...], sharding: Any = None) -> UInt32[Array, "*shape"]:
    """The position of each number in the flat array, modulo 2³²."""
    total, stride = jnp.uint32(0), 1
    for axis in reversed(range(len(shape))):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis, out_sharding=sharding)
        total = total + position * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return total


def scramble(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A bijection of the integers in which each bit depends on all of x."""
    x = hashed(x)
    return x ^ (x >> np.uint32(16))


def hashed(
    x: UInt32[Array, "*shape"], second: UInt32[Array, ""] | int = 0
) -> UInt32[Array, "*shape"]:
    """A bijection of the integers, with a second seed, whose high bits depend on all of x."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) + jnp.uint32(second)
    return (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
