"""Running means and maxima: ages, decays and the correction of biases."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Real

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


def bias_factors(
    decay: Scalar, age: Int[Array, "*leaves"], nesterov: bool
) -> tuple[Real[Array, "*leaves"], Real[Array, "*leaves"] | None]:
    """The factors of a mean and of the newest gradient that correct the bias of the mean.

    With Nesterov momentum it is the next mean, as if the same gradient came again: β·mₜ / (1 −
    βᵗ⁺¹) + (1 − β)·gₜ / (1 − βᵗ). Without, the mean alone has a factor: mₜ / (1 − βᵗ).
    """
    factor = bias_correction(decay, age)
    if not nesterov:
        return factor, None
    return decay * bias_correction(decay, increment(age)), (1 - decay) * factor


def with_newest(mean: Array, g: Array, from_mean: Any, from_g: Any) -> Array:
    """The mean and the newest gradient, with their factors. A factor `None` is left out."""
    if from_mean is None:
        return mean
    return from_mean * mean if from_g is None else from_mean * mean + from_g * g


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


def running_maximum(old: Real[Array, "..."], new: Real[Array, "..."]) -> Real[Array, "..."]:
    """The larger of a stored number and a new one, which also replaces NaN.

    The derivative of `jnp.maximum` is that of the argument that equals the result. Both have none
    where XLA computes the new number twice, with different rounding.
    """
    return jnp.where(old > new, old, new)
