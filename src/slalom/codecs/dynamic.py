"""Eight bits for each number over seven decades."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._core.engine.encoded import Spec, uniform
from ._codec import (
    AbstractCodec,
    as_float32,
    from_blocks,
    in_blocks,
    largest,
    relative,
    stochastic_bits,
)

_BLOCK = 256
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
        blocks = in_blocks(as_float32(x), _BLOCK)
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
        share = 0.5 if bits is None else uniform(in_blocks(bits, _BLOCK))
        size = jnp.floor(position + share).astype(jnp.int32) - 1
        if spec.nonnegative:
            codes = jnp.where(blocks > 0, jnp.clip(size, 1, 255), 0)
        else:
            size = jnp.clip(size, 0, 127)
            codes = jnp.where(blocks < 0, -size, size) + 127
        return {"codes": from_blocks(codes.astype(jnp.uint8), x.shape[-1]), "scales": scales}

    def decode(self, arrays: dict[str, Any], spec: Spec) -> Float[Array, "*shape"]:
        codes = in_blocks(arrays["codes"], _BLOCK).astype(jnp.int32)
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
