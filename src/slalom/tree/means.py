"""Running means: decays, ages and the correction of their bias."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Real

from .._types import Scalar


def complement(decay: Scalar) -> Scalar:
    """1 − decay, in the precision of the hyperparameter (exact for decay ≥ ½).

    **Arguments:**

    - `decay`: a decay in [0, 1], as `self.at(context)` gives it.

    **Returns:** a scalar.
    """
    return 1 - decay


def bias_correction(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """1 / (1 − decayᵗ), the factor that debiases a mean that started at zero and has age t ≥ 1.

    Written as −1 / expm1(t · log1p(−(1 − decay))): the naive form loses 5e-5 of its value to
    cancellation in float32 at t = 2, decay = 0.9999.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: how often it was fed, ≥ 1: one number, or an entry per leaf.

    **Returns:** as many factors, to be passed to `map_leaves` as `per_leaf`.
    """
    return -1 / jnp.expm1(age.astype(decay.dtype) * jnp.log1p(-complement(decay)))


def newest_weight(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """(1 − decay) / (1 − decayᵗ): what the newest of t values weighs in a debiased mean of them.

    With it, mean ← (1 − w)·mean + w·new is the exponential mean of the values seen so far, and
    needs no correction when it is read.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: how many values there are with the newest, ≥ 1: one number, or an entry per leaf.

    **Returns:** as many weights; exactly 1 at age 1.
    """
    weight = complement(decay) * bias_correction(decay, age)
    return jnp.where(age == 1, 1, weight)


def increment(count: Int[Array, "..."]) -> Int[Array, "..."]:
    """count + 1, which stays at the largest integer instead of turning negative.

    **Arguments:**

    - `count`: integers.

    **Returns:** the integers that follow.
    """
    largest = jnp.iinfo(count.dtype).max
    return jnp.where(count < largest, count + 1, largest)
