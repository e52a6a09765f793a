"""Codecs of 8 and 4 bits with a scale for each block."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from .._core.engine.encoded import Spec, uniform
from .._core.text.printing import code
from ..tree.sharding import reshaped
from ._codec import (
    AbstractCodec,
    as_bits,
    as_float32,
    from_bits,
    from_blocks,
    in_blocks,
    largest,
    relative,
    root,
    rounded,
    rounded_root,
    stochastic_bits,
    up_to_bfloat16,
)

_INT8_BLOCK = 32


class int8(AbstractCodec):
    """Eight bits in groups of 32 that share a 16-bit scale: 1.06 bytes per element.

    With the largest absolute value s of a group, a number x is stored as

        round(127·2z / (1 + |z|)),   z = x/s,

    which resolves small numbers more finely than large ones. A field that must stay ≥ 0 is stored
    as round(255·√x / s), with s the largest root, rounded stochastically, so that the mean of x is
    right; positive values never become 0, but at least s²/65025. The errors are at most 0.8 % of
    the largest number of the group, and 0.4 % of the largest root.

    Differs from the paper: the scale is a bfloat16, because a float16 holds no scale below 6·10⁻⁸,
    and rounding is stochastic where a field must stay ≥ 0, because rounding to the nearest code
    would undo each change of a mean of squares, which is about a thousandth.

    **Arguments:**

    - `companded`: whether to resolve small numbers more finely. `False` gives a linear map, which
        is refused for fields that must stay ≥ 0.
    - `stochastic`: whether to round stochastically. Defaults to doing so where a field must stay
        ≥ 0.

    ??? cite "Ortiz et al., FlashOptim: Optimizers for Memory Efficient Training, 2026"
    """

    companded: bool = eqx.field(default=True, static=True)
    stochastic: bool | None = eqx.field(default=None, static=True)

    def check(self, spec: Spec) -> None:
        if spec.nonnegative and not self.companded:
            raise ValueError(
                f"{code(self)} is a linear map, which cannot hold a field that must stay ≥ 0, such "
                "as a mean of squares: small entries would become 0, and updates are divided by "
                'their roots. Write `"int8"`, which stores the root, or `"dynamic8"`.'
            )

    def encode(self, x: Float[Array, "*shape"], spec: Spec, bits: Any = None) -> dict[str, Array]:
        bits = stochastic_bits(self.stochastic, spec, bits)
        bits = None if bits is None else in_blocks(bits, _INT8_BLOCK)
        x = as_float32(x)
        blocks = in_blocks(root(x) if spec.nonnegative else x, _INT8_BLOCK)
        scales = up_to_bfloat16(largest(blocks))
        z = relative(blocks, scales)
        if spec.nonnegative:
            codes = jnp.clip(rounded_root(255 * z, bits), 1, 255)
            codes = jnp.where(blocks > 0, codes, 0).astype(jnp.uint8)
        else:
            codes = jnp.clip(self._signed(z, bits), -127, 127).astype(jnp.int8)
        return {"codes": from_blocks(codes, x.shape[-1]), "scales": as_bits(scales)}

    def _signed(self, z: Float[Array, "*shape"], bits: Any) -> Int32[Array, "*shape"]:
        size = jnp.abs(z)
        y = 127 * (2 * size / (1 + size) if self.companded else size)
        if bits is not None:
            below = jnp.floor(y)
            # How far z is from the number of the code below to the next one.
            share = y - below
            if self.companded:
                share = (size * (254 - below) - below) * ((253 - below) * np.float32(1 / 254))
            y = below + (uniform(bits) < share).astype(jnp.float32)
        return rounded(jnp.where(z < 0, -y, y))

    def decode(self, arrays: dict[str, Any], spec: Spec) -> Float[Array, "*shape"]:
        codes = in_blocks(arrays["codes"], _INT8_BLOCK).astype(jnp.float32)
        scales = from_bits(arrays["scales"])[..., None]
        if spec.nonnegative:
            x = jnp.square(codes * (scales * np.float32(1 / 255)))
        else:
            z = codes * np.float32(1 / 127)
            x = (z / (2 - jnp.abs(z)) if self.companded else z) * scales
        return from_blocks(x, spec.shape[-1])


_INT4_BLOCK = 128
_SIZES = tuple((k / 7) ** 1.5 for k in range(8))
_ZERO = 7
"""The code of 0. There are 7 negative values and 7 positive ones."""


class int4(AbstractCodec):
    """Four bits in blocks of 128 that share a float32 scale: 0.53 bytes per element.

    With the largest absolute value s of a block, a number is stored as one of the 15 values
    ±s·(k/7)^1.5 with k from 0 to 7, rounded stochastically: 0 stays 0, and the mean of many
    roundings is right. A field that must stay ≥ 0 is stored as its root, in sixteenths of the
    largest root, rounded stochastically, so that the mean of the field itself is right. The errors
    are at most 20.7 % of the largest absolute value, and 6.3 % of the largest root.

    The smallest root is a sixteenth, never 0, by which updates would be divided. So a mean of
    squares that is less than 1/256 of the largest in its block is stored as 1/256 of it, and its
    parameter takes smaller steps than with full precision: a tenth of their length at 1/25600.

    Differs from the paper, which rounds to the nearest of 16 other values, so that steps which
    follow the sign of a small momentum lose it, and which stores sixteenths of the mean of squares
    itself, whose roots reach sixteen times lower.

    **Arguments:**

    - `stochastic`: whether to round stochastically. Defaults to `True`.

    ??? cite "Li, Chen & Zhu, [Memory Efficient Optimizers with 4-bit
        States](https://arxiv.org/abs/2309.01507), 2023"
    """

    stochastic: bool = eqx.field(default=True, static=True)

    def encode(self, x: Float[Array, "*shape"], spec: Spec, bits: Any = None) -> dict[str, Array]:
        size = _block_size(x.shape[-1])
        x = as_float32(x)
        blocks = in_blocks(root(x) if spec.nonnegative else x, size)
        scales = largest(blocks)
        z = relative(blocks, scales)
        bits = in_blocks(bits, size) if bits is not None and self.stochastic else None
        if spec.nonnegative:
            codes = jnp.clip(rounded_root(16 * z, bits), 1, 16) - 1
        else:
            codes = jnp.zeros(z.shape, jnp.int32)
            share = 0.5 if bits is None else uniform(bits)
            for smaller, larger in itertools.pairwise(_SIZES):
                is_above = jnp.abs(z) > smaller + (larger - smaller) * share
                codes = codes + is_above.astype(jnp.int32)
            codes = _ZERO + jnp.where(z < 0, -codes, codes)
        # The first half of a block in the low bits, the second half in the high ones. A sum fuses,
        # where slices would take longer than all of the rest.
        halves = reshaped(codes, (*codes.shape[:-1], 2, size // 2))
        packed = jnp.sum(halves << _shifts(halves), axis=-2, dtype=jnp.int32).astype(jnp.uint8)
        return {"codes": from_blocks(packed, packed.shape[-2] * size // 2), "scales": scales}

    def decode(self, arrays: dict[str, Any], spec: Spec) -> Float[Array, "*shape"]:
        size = _block_size(spec.shape[-1])
        packed = in_blocks(arrays["codes"], size // 2)
        halves = jnp.broadcast_to(
            packed[..., None, :].astype(jnp.int32), (*packed.shape[:-1], 2, size // 2)
        )
        codes = reshaped((halves >> _shifts(halves)) & 15, (*packed.shape[:-1], size))
        scales = arrays["scales"][..., None]
        if spec.nonnegative:
            x = jnp.square((codes.astype(jnp.float32) + 1) * (scales * np.float32(1 / 16)))
        else:
            # XLA computes divisions once for all that read them, and products again for each.
            divisor = jnp.full(codes.shape, jnp.inf, jnp.float32)
            for i, value in enumerate(_SIZES[1:], 1):
                divisor = jnp.where(jnp.abs(codes - _ZERO) == i, np.float32(1 / value), divisor)
            x = scales / jnp.where(codes < _ZERO, -divisor, divisor)
        return from_blocks(x, spec.shape[-1])


def _shifts(halves: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """By how many bits the halves of blocks, on the last axis but one, are shifted in a byte."""
    return 4 * jax.lax.broadcasted_iota(jnp.int32, halves.shape, halves.ndim - 2)


def _block_size(length: int) -> int:
    """The size of a block: even, because two codes share a byte."""
    return min(_INT4_BLOCK, length + length % 2)


_DYNAMIC_BLOCK = 256
_DECADES = 7


class dynamic8(AbstractCodec):
    """Eight bits in blocks of 256 that share a float32 scale: 1.02 bytes per element.

    With the largest absolute value s of a block, the codes of each sign are

        s·10⁻ʲ·(0.1 + 0.9·k/2⁶⁻ʲ),   k = 1, …, 2⁶⁻ʲ,   j = 0, …, 5

    and s·10⁻⁶, with 0: each higher decade has more of them. A field that must stay ≥ 0 has twice as
    many codes in each decade, down to s·10⁻⁷. It is rounded stochastically, so that the mean of
    many roundings is right, and positive values never become 0. The errors are at most 0.7 % of s,
    and less in each lower decade.

    Differs from the paper, whose codes are the midpoints of the intervals, with s but without −s: a
    mean whose largest entries are negative shrinks there by 0.7 % in each step.

    **Arguments:**

    - `stochastic`: whether to round stochastically. Defaults to doing so where a field must stay
        ≥ 0.

    ??? cite "Dettmers et al., [8-bit Optimizers via Block-wise
        Quantization](https://arxiv.org/abs/2110.02861), 2021"
    """

    stochastic: bool | None = eqx.field(default=None, static=True)

    def encode(self, x: Float[Array, "*shape"], spec: Spec, bits: Any = None) -> dict[str, Array]:
        bits = stochastic_bits(self.stochastic, spec, bits)
        blocks = in_blocks(as_float32(x), _DYNAMIC_BLOCK)
        scales = largest(blocks)
        z = jnp.abs(relative(blocks, scales))
        more = 1 if spec.nonnegative else 0
        # The codes of a decade follow each other as the integers from one power of two to the next,
        # and are as far apart as these: what is between two integers is between their numbers.
        above = [(z > 10.0**-j).astype(jnp.int32) for j in range(1, _DECADES)]
        decade = sum(above, jnp.zeros(z.shape, jnp.int32))
        within = jnp.clip((z * _power_of_ten(_DECADES - 1 - decade) - 0.1) / 0.9, 0, 1)
        position = _power_of_two(decade + more) * (1 + within)
        # The integer of the smallest number is 2, and that of 0 is 1.
        to_two = np.float32(10.0 ** (_DECADES - 1 + more))
        position = jnp.where(z * to_two < 1, 1 + z * to_two, position)
        share = 0.5 if bits is None else uniform(in_blocks(bits, _DYNAMIC_BLOCK))
        size = jnp.floor(position + share).astype(jnp.int32) - 1
        if spec.nonnegative:
            codes = jnp.where(blocks > 0, jnp.clip(size, 1, 255), 0)
        else:
            size = jnp.clip(size, 0, 127)
            codes = jnp.where(blocks < 0, -size, size) + 127
        return {"codes": from_blocks(codes.astype(jnp.uint8), x.shape[-1]), "scales": scales}

    def decode(self, arrays: dict[str, Any], spec: Spec) -> Float[Array, "*shape"]:
        codes = in_blocks(arrays["codes"], _DYNAMIC_BLOCK).astype(jnp.int32)
        more = 1 if spec.nonnegative else 0
        size = codes if spec.nonnegative else jnp.abs(codes - 127)
        position = (size + 1).astype(jnp.float32)
        exponent = (jax.lax.bitcast_convert_type(position, jnp.int32) >> 23) - 127
        within = position * _power_of_two(-exponent) - 1
        z = (1 + 9 * within) / _power_of_ten(_DECADES + more - exponent)
        z = jnp.where(size == 0, 0, z)
        if not spec.nonnegative:
            z = jnp.where(codes < 127, -z, z)
        return from_blocks(z * arrays["scales"][..., None], spec.shape[-1])


def _power_of_two(exponent: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _power_of_ten(exponent: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """10ⁿ for n from 0 to 7: a few selections, which fuse where a table would be read."""
    power = jnp.full(exponent.shape, 1, jnp.float32)
    for n in range(1, _DECADES + 1):
        power = jnp.where(exponent == n, np.float32(10.0**n), power)
    return power
