"""Running means: ages, decays and the correction of biases; and squares and roots that stay in
range and have finite derivatives."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Real

from .types import Scalar


def bias_correction(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """1 / (1 − decayᵗ), the factor that debiases a mean that started at zero and has age t ≥ 1.

    Written as 1 / −expm1(t · log1p(−(1 − decay))): the naive form loses 5e-5 of its value to
    cancellation in float32 at t = 2, decay = 0.9999.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: the number of values in the mean, ≥ 1: a scalar, or a vector with an entry per leaf.

    **Returns:** the factor, of the same shape as `age`.
    """
    later = -jnp.expm1(age.astype(decay.dtype) * log_of_decay(decay))
    # The division comes last: XLA computes it once, and repeats any operation after it for every
    # leaf.
    return 1 / jnp.where(age == 1, 1 - decay, later)


def log_of_decay(decay: Scalar) -> Scalar:
    """log(decay), to the last digits also close to 1, and with a finite derivative at 0.

    Below 1e-20 it is constant. The derivative ∞ would meet an exponential that is 0 there, and
    make the gradients of hyperparameters NaN.

    **Arguments:**

    - `decay`: the decay of a mean, in [0, 1).

    **Returns:** the logarithm, < 0.
    """
    least = max(1e-20, float(jnp.finfo(decay.dtype).tiny))
    is_small = decay < 0.5
    # Each branch must be finite where the other one is used.
    small = jnp.log(jnp.maximum(jnp.where(is_small, decay, 0.5), least))
    large = jnp.log1p(-(1 - jnp.where(is_small, 0.5, decay)))
    return jnp.where(is_small, small, large)


def newest_weight(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """(1 − decay) / (1 − decayᵗ), the weight of the newest of t values in their debiased mean.

    With this weight w, mean ← (1 − w)·mean + w·new is the exponential mean of the values so far,
    and needs no further correction.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: the number of values, the newest included, ≥ 1: a scalar, or a vector with an entry
        per leaf.

    **Returns:** the weight, of the same shape as `age`; exactly 1 at age 1.
    """
    weight = (1 - decay) * bias_correction(decay, age)
    return jnp.where(age == 1, 1, weight)


def moved(mean: Array, new: Array, weight: Scalar) -> Array:
    """mean + weight·(new − mean), and exactly `new` where the weight is 1.

    Unlike (1 − weight)·mean + weight·new it does not drift: the two factors are rounded separately,
    and over many steps the difference of their sum from 1 adds up.
    """
    change = new - mean
    # Both sums have the same derivatives; `new` alone would have none with respect to the weight.
    return jnp.where(weight == 1, new + (weight - 1) * change, mean + weight * change)


def increment(count: Int[Array, "..."]) -> Int[Array, "..."]:
    """count + 1; saturates at the largest integer instead of overflowing.

    **Arguments:**

    - `count`: an array of integers.

    **Returns:** an array of the same shape and dtype.
    """
    largest = jnp.iinfo(count.dtype).max
    return jnp.where(count < largest, count + 1, largest)


# --- squares and roots ------------------------------------------------------------------------


def abs_squared(x: Inexact[Array, "*shape"]) -> Real[Array, "*shape"]:
    """|x|², which is real even for complex x.

    **Arguments:**

    - `x`: a floating or complex array.

    **Returns:** a real array.
    """
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


@jax.custom_jvp
def root(x: Real[Array, "..."]) -> Real[Array, "..."]:
    """√x with derivative 0 at 0, for x that are squares, whose own derivative is 0 there.

    The derivative ∞ would make a gradient through an optimizer NaN if any gradient is zero.
    """
    return jnp.sqrt(x)


@root.defjvp
def _root_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = root(x)
    return y, jnp.where(y == 0, 0, t / jnp.where(y == 0, 1, 2 * y))


@jax.custom_jvp
def inverse_root(x: Real[Array, "..."]) -> Real[Array, "..."]:
    """1/√x; its derivative stays finite times zero even if x^(−3/2) overflows."""
    return jax.lax.rsqrt(x)


@inverse_root.defjvp
def _inverse_root_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = inverse_root(x)
    return y, t * y * y * y / -2


@jax.custom_jvp
def quotient(a: Inexact[Array, "..."], b: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """a/b; its derivative stays finite where b² underflows."""
    return a / b


@quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> Any:
    y = quotient(*primals)
    (_, b), (ta, tb) = primals, tangents
    return y, (ta - y * tb) / b


def running_maximum(old: Real[Array, "..."], new: Real[Array, "..."]) -> Real[Array, "..."]:
    """The larger of a stored number and a new one, which also replaces NaN.

    The derivative of `jnp.maximum` is that of the argument that equals the result. Both have none
    where XLA computes the new number twice, with different rounding.
    """
    return jnp.where(old > new, old, new)


@jax.custom_jvp
def sign(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """`jnp.sign`, with the derivative of x / |x| where x is complex."""
    return jnp.sign(x)


@sign.defjvp
def _sign_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = sign(x)
    if not jnp.iscomplexobj(x):
        return y, jnp.zeros_like(y)
    along = jnp.real(jnp.conj(y) * t).astype(x.dtype)
    size = jnp.where(x == 0, 1, jnp.abs(x)).astype(x.dtype)
    return y, jnp.where(x == 0, 0, quotient(t - y * along, size))


def bounded_square(x: Inexact[Array, "*shape"]) -> Real[Array, "*shape"]:
    """|x|², but at most a quarter of the largest finite number; NaN stays NaN.

    Otherwise a single gradient of 1e20 would make a running mean infinite, and all later updates
    that are divided by its root 0. The quarter leaves room for rounding in the mean and in the
    correction of its bias.

    **Arguments:**

    - `x`: a floating or complex array.

    **Returns:** a real array.
    """
    return bounded(abs_squared(x))


def bounded(square: Real[Array, "..."]) -> Real[Array, "..."]:
    """A square, or a sum of squares, with the bound of `bounded_square`."""
    return jnp.minimum(square, float(jnp.finfo(square.dtype).max) / 4)


def bounded_entries(x: Inexact[Array, "*shape"], size: int) -> Inexact[Array, "*shape"]:
    """The entries so bounded that no sum of as many of their products as `size` overflows.

    Infinities and NaN become NaN, which does not hide the error.
    """
    limit = math.sqrt(float(jnp.finfo(x.dtype).max) / (8 * max(size, 1)))

    def bounded_part(part: Array) -> Array:
        return jnp.where(jnp.isinf(part), jnp.nan, jnp.clip(part, -limit, limit))

    if jnp.iscomplexobj(x):
        return jax.lax.complex(bounded_part(x.real), bounded_part(x.imag))
    return bounded_part(x)


def divided(x: Inexact[Array, "..."], largest: Real[Array, "..."]) -> Inexact[Array, "..."]:
    """x / largest for |x| ≤ largest, which broadcasts; 0 / 0 = 0.

    The inverse of the largest numbers is subnormal, which processors treat as 0, so the divisor is
    brought closer to 1 first. The quotient of subnormal numbers is 0.
    """
    power = jnp.where(largest > 1, 0.25, 4.0).astype(largest.dtype)
    divisor = largest * power
    small = divisor < float(jnp.finfo(divisor.dtype).tiny)
    return (x * power) * jnp.where(small, 0, 1 / jnp.where(small, 1, divisor))


def positive(square: Real[Array, "..."]) -> Real[Array, "..."]:
    """A mean of squares as a divisor: at least the smallest normal number.

    With ε = 0 a zero gradient is divided by a positive number, so its update is 0 and not NaN.
    Where the squares of tiny gradients have underflowed, the updates stay small.

    **Arguments:**

    - `square`: a real array, ≥ 0.

    **Returns:** the array.
    """
    # A maximum costs nothing. Two selections around the quotient would make XLA keep the updates
    # in a buffer wherever something else reads them too.
    return jnp.maximum(square, float(jnp.finfo(square.dtype).tiny))
