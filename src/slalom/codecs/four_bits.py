"""Four bits for each number."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from .._core.engine.encoded import Spec, uniform
from ..tree.sharding import reshaped
from ._codec import (
    AbstractCodec,
    as_float32,
    from_blocks,
    in_blocks,
    largest,
    relative,
    root,
    rounded_root,
)

_BLOCK = 128
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
    return min(_BLOCK, length + length % 2)
