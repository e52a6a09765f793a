"""Decays from the first step on."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._core.fields import Hyperparameter, hyperparameter, steps
from .._core.schedule import AbstractSchedule
from .._types import Scalar, Step
from ..tree.dtypes import as_canonical, canonical_float
from ._common import blend, cosine, fraction, ticks


class exponential_decay(AbstractSchedule):
    """A factor of `decay_rate` for every `transition_steps` steps.

        s(n) = init_value·decay_rate^p,   p = max(n − transition_begin, 0) / transition_steps

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `transition_steps`: how many steps one factor takes, ≥ 1.
    - `decay_rate`: the factor, > 0; above 1 the value grows.
    - `transition_begin`: the step at which the decay begins, ≥ 0.
    - `staircase`: whether to round p down, so that the value falls every `transition_steps`.
    - `end_value`: where the decay stops: a lower bound, or an upper one if `decay_rate` ≥ 1;
        none without it.

    Differs from Optax: a `decay_rate` of 0 is an error, not a constant.
    """

    init_value: Hyperparameter = hyperparameter()
    transition_steps: Step = steps(within="[1, inf)")
    decay_rate: Hyperparameter = hyperparameter(within="(0, inf)")
    transition_begin: Step = steps(0)
    staircase: bool = eqx.field(default=False, static=True)
    end_value: Hyperparameter | None = hyperparameter(None)

    def __call__(self, step: Step) -> Scalar:
        return exponential(self, self.init_value, ticks(step))


class cosine_decay(AbstractSchedule):
    """Half a cosine wave, from `init_value` down to `alpha·init_value`, and constant from there.

        s(n) = init_value·((1 − α)·(½(1 + cos(πn / decay_steps)))^exponent + α)

    **Arguments:**

    - `init_value`: the value at step 0.
    - `decay_steps`: how many steps the decay takes, ≥ 1.
    - `alpha`: the last value as a fraction of the first.
    - `exponent`: the power of the cosine term, > 0.

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    init_value: Hyperparameter = hyperparameter()
    decay_steps: Step = steps(within="[1, inf)")
    alpha: Hyperparameter = hyperparameter(0.0)
    exponent: Hyperparameter = hyperparameter(1.0, within="(0, inf)")

    def __call__(self, step: Step) -> Scalar:
        wave = cosine(fraction(step, self.decay_steps)) ** as_canonical(self.exponent)
        return as_canonical(self.init_value) * blend(1.0, self.alpha, wave)


def exponential(rule: Any, value: Any, step: Any) -> Scalar:
    """`value` after `step` steps of an exponential decay, with a schedule's other numbers."""
    dtype = canonical_float()
    past = jnp.maximum(step - ticks(rule.transition_begin), 0)
    length = ticks(rule.transition_steps)
    if rule.staircase:
        # Divided as integers: a rounded quotient may fall on the wrong side of a stair.
        power = (past // length).astype(dtype)
    else:
        power = past.astype(dtype) / length.astype(dtype)
    rate = as_canonical(rule.decay_rate)
    value = as_canonical(value) * rate**power
    if rule.end_value is None:
        return value
    end = as_canonical(rule.end_value)
    return jnp.where(rate < 1, jnp.maximum(value, end), jnp.minimum(value, end))
