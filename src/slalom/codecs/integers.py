"""Eight bits for each number, by plain arithmetic."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from .._core.engine.encoded import Spec, uniform
from ._codec import (
    AbstractCodec,
    as_bits,
    as_float32,
    from_bits,
    from_blocks,
    in_blocks,
    largest,
    refuse_linear,
    relative,
    root,
    rounded,
    rounded_root,
    stochastic_bits,
    up_to_bfloat16,
)

_BLOCK = 32


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
            refuse_linear(self)

    def encode(self, x: Float[Array, "*shape"], spec: Spec, bits: Any = None) -> dict[str, Array]:
        bits = stochastic_bits(self.stochastic, spec, bits)
        bits = None if bits is None else in_blocks(bits, _BLOCK)
        x = as_float32(x)
        blocks = in_blocks(root(x) if spec.nonnegative else x, _BLOCK)
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
        codes = in_blocks(arrays["codes"], _BLOCK).astype(jnp.float32)
        scales = from_bits(arrays["scales"])[..., None]
        if spec.nonnegative:
            x = jnp.square(codes * (scales * np.float32(1 / 255)))
        else:
            z = codes * np.float32(1 / 127)
            x = (z / (2 - jnp.abs(z)) if self.companded else z) * scales
        return from_blocks(x, spec.shape[-1])
