"""Floating dtypes with fewer bits."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._core.engine.encoded import Spec, uniform
from .._core.text.printing import code
from ..tree.rounding import power_of_two_below, stochastic
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
    stochastic_bits,
)

_BLOCK = 64


class cast(AbstractCodec):
    """A floating dtype with fewer bits: 2 bytes per element in bfloat16, or 1.03 in a float8.

    bfloat16 has the range of float32. The other dtypes do not, so blocks of 64 share a scale, a
    power of two, in 2 more bytes, and a field that must stay ≥ 0 is stored as its root; what is
    positive never becomes 0.

    What must stay ≥ 0 is rounded stochastically: a mean of squares with the decay 0.999 changes by
    a thousandth, and bfloat16 has steps of 0.4 to 0.8 %, so rounding to the nearest would stall it
    at a quarter of its limit. In a float8, whose steps are 6 to 12 %, every field is. The error is
    then at most one unit in the last place, and the mean of many roundings is right.

    Other fields are rounded to the nearest, so that rules can write bfloat16 themselves. A mean of
    gradients then stalls close to a constant gradient: at 0.98 of it with the decay 0.9, and at
    0.80 with 0.99. `sl.codecs.cast("bfloat16", stochastic=True)` reaches it, in a slower step.

    **Arguments:**

    - `dtype`: `"bfloat16"`, `"float16"`, `"float8_e4m3fn"` or another floating dtype of at most 16
        bits.
    - `stochastic`: whether to round stochastically. Defaults to doing so in a float8, and where a
        field must stay ≥ 0.
    """

    dtype: np.dtype = eqx.field(static=True, converter=lambda dtype: _as_dtype(dtype))
    stochastic: bool | None = eqx.field(default=None, static=True)

    def plain_dtype(self, spec: Spec) -> np.dtype | None:
        bits = stochastic_bits(self.stochastic, spec, True)
        return self.dtype if self._is_wide and bits is None else None

    def is_elementwise(self, spec: Spec) -> bool:
        return self._is_wide

    @property
    def _is_wide(self) -> bool:
        """Whether the dtype has the range of float32."""
        return float(jnp.finfo(self.dtype).max) > 1e38

    def encode(self, x: Float[Array, "*shape"], spec: Spec, bits: Any = None) -> dict[str, Array]:
        chosen = True if self.stochastic is None and self.dtype.itemsize == 1 else self.stochastic
        bits = stochastic_bits(chosen, spec, bits)
        x = as_float32(x)
        if self._is_wide:
            return {"codes": _rounded(x, self.dtype, bits)}
        blocks = in_blocks(root(x) if spec.nonnegative else x, _BLOCK)
        scales = power_of_two_below(largest(blocks))
        # The largest number of a block is then at least a quarter of the largest of the dtype.
        y = relative(blocks, scales) * _top(self.dtype)
        bits = None if bits is None else in_blocks(bits, _BLOCK)
        y = _rounded(y, self.dtype, bits, squared=spec.nonnegative)
        if spec.nonnegative:
            least = jnp.asarray(jnp.finfo(self.dtype).tiny, self.dtype)
            y = jnp.where((blocks > 0) & (y < least), least, y)
        codes = from_blocks(y, x.shape[-1])
        if self.dtype.itemsize == 1:
            # On a CPU, XLA cannot write a piece of a float8 array without converting all of it.
            codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        return {"codes": codes, "scales": as_bits(scales.astype(jnp.bfloat16))}

    def decode(self, arrays: dict[str, Any], spec: Spec) -> Float[Array, "*shape"]:
        codes = arrays["codes"]
        if self.dtype.itemsize == 1:
            codes = jax.lax.bitcast_convert_type(codes, self.dtype)
        codes = codes.astype(jnp.float32)
        if self._is_wide:
            return codes
        scales = from_bits(arrays["scales"])[..., None]
        x = in_blocks(codes, _BLOCK) * np.float32(1 / _top(self.dtype)) * scales
        return from_blocks(jnp.square(x) if spec.nonnegative else x, spec.shape[-1])


def _as_dtype(dtype: Any) -> np.dtype:
    try:
        dtype = np.dtype(getattr(jnp, dtype) if isinstance(dtype, str) else dtype)
    except (AttributeError, TypeError):
        dtype = None if dtype is None else dtype
    small = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    if not small or jnp.finfo(dtype).bits not in (8, 16):
        raise TypeError(
            "cast.dtype must be a floating dtype of 8 or 16 bits, such as 'bfloat16', 'float16' or "
            f"'float8_e4m3fn', got {code(dtype)}."
        )
    return dtype


def _top(dtype: np.dtype) -> float:
    """A power of two such that numbers below twice of it are in the range of the dtype."""
    return 2.0 ** (int(np.floor(np.log2(float(jnp.finfo(dtype).max)))) - 1)


def _rounded(x: Float[Array, "*shape"], dtype: np.dtype, bits: Any, squared: bool = False) -> Array:
    """The nearest number of the dtype, or with bits one of the two next to `x`, unbiased.

    It is unbiased because the bits that are cut off carry over with their own probability. If
    `squared`, the square is unbiased.
    """
    if bits is None:
        return x.astype(dtype)
    if dtype == jnp.bfloat16:
        return stochastic(x, dtype, bits)
    cut = 23 - jnp.finfo(dtype).nmant
    integers = jax.lax.bitcast_convert_type(x, jnp.uint32)
    kept = np.uint32(2**32 - 2**cut)
    if squared:
        below, above = (
            jax.lax.bitcast_convert_type(n & kept, jnp.float32)
            for n in (integers, integers + np.uint32(2**cut))
        )
        # Of numbers near 1, so that no product underflows.
        up = uniform(bits) * ((above - below) * (above + below)) < (x - below) * (x + below)
        new = jnp.where(up, above, below)
    else:
        carried = (integers + (bits >> np.uint32(32 - cut))) & kept
        new = jax.lax.bitcast_convert_type(carried, jnp.float32)
    return jnp.where(jnp.isfinite(x), new, x).astype(dtype)
