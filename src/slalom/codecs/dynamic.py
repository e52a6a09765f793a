"""Eight bits for each number over seven decades."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._core.encoded import Spec, uniform
from ._codec import (
    AbstractCodec,
    as_float32,
    from_blocks,
    in_blocks,
    inverse,
    largest,
    stochastic_bits,
)

_BLOCK = 256
_DECADES = 7
_TOP = 1 - 0.9 / 512
"""Above this, 1 is the nearest code of those that must stay ≥ 0."""


class dynamic8(AbstractCodec):
    """Eight bits in blocks of 256 that share a float32 scale: 1.02 bytes per number.

    The 256 codes cover seven decades below the largest absolute value s of a block: of the numbers
    between s·10⁻ʲ and s·10⁻ʲ⁻¹ there are 2⁶⁻ʲ codes of each sign, in the middles of equal
    intervals, with 0 and s. A field that must stay ≥ 0 has twice as many codes in each decade, is
    rounded stochastically, and what is positive never becomes 0. The errors are at most 0.7 % of s,
    and less in each lower decade.

    **Arguments:**

    - `stochastic`: whether to round stochastically. Defaults to doing so where a field must stay
        ≥ 0.

    ??? cite "Dettmers et al., [8-bit Optimizers via Block-wise
        Quantization](https://arxiv.org/abs/2110.02861), 2021"
    """

    stochastic: bool | None = eqx.field(default=None, static=True)

    def encode(self, x: Float[Array, "*shape"], spec: Spec, bits: Any = None) -> dict[str, Array]:
        bits = stochastic_bits(self.stochastic, spec, bits)
        blocks = in_blocks(as_float32(x), _BLOCK)
        scales = largest(blocks)
        z = jnp.abs(blocks) * inverse(scales)[..., None]
        # The codes of a decade follow each other as the integers between two powers of two.
        above = [(z > 10.0**-j).astype(jnp.int32) for j in range(1, _DECADES)]
        decade = sum(above, jnp.zeros(z.shape, jnp.int32))
        within = jnp.clip((z * _power_of_ten(_DECADES - 1 - decade) - 0.1) / 0.9, 0, 1)
        first = decade + 1 if spec.nonnegative else decade
        position = _power_of_two(first) * (1 + within)
        if bits is not None:
            position = position - 0.5 + uniform(in_blocks(bits, _BLOCK))
        size = jnp.floor(position).astype(jnp.int32)
        if spec.nonnegative:
            size = jnp.where(z > _TOP, 256, jnp.clip(size, 2, 255)) - 1
            codes = jnp.where(blocks > 0, size, 0)
        else:
            top = jnp.where(blocks > 0, 128, 127)
            size = jnp.where(z > 1 - 0.9 / 256, top, jnp.clip(size, 1, 127))
            size = jnp.where(z < 0.275e-6, 0, size)
            codes = jnp.where(blocks < 0, -size, size) + 127
        return {"codes": from_blocks(codes.astype(jnp.uint8), x.shape[-1]), "scales": scales}

    def decode(self, arrays: dict[str, Any], spec: Spec) -> Float[Array, "*shape"]:
        codes = in_blocks(arrays["codes"], _BLOCK).astype(jnp.int32)
        if spec.nonnegative:
            size, top, extra = codes + 1, 256, 1
        else:
            size, top, extra = jnp.abs(codes - 127), 128, 0
        position = jnp.maximum(size, 1 + extra).astype(jnp.float32)
        exponent = (jax.lax.bitcast_convert_type(position, jnp.int32) >> 23) - 127
        within = (position + 0.5) * _power_of_two(-exponent) - 1
        z = (0.1 + 0.9 * within) / _power_of_ten(_DECADES - 1 - (exponent - extra))
        z = jnp.where(size == top, 1, jnp.where(size < 1 + extra, 0, z))
        if not spec.nonnegative:
            z = jnp.where(codes < 127, -z, z)
        return from_blocks(z * arrays["scales"][..., None], spec.shape[-1])


def _power_of_two(exponent: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _power_of_ten(exponent: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """10ⁿ for n from 0 to 6: a few selections, which fuse where a table would be read."""
    power = jnp.full(exponent.shape, 1, jnp.float32)
    for n in range(1, _DECADES):
        power = jnp.where(exponent == n, np.float32(10.0**n), power)
    return power
