"""Decay from the first step on."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._core.fields.declare import Number, OptionalNumber, hyperparameter, steps
from .._core.fields.schedule import AbstractSchedule
from ..tree.dtypes import as_canonical, canonical_float
from ..tree.types import Scalar, Step
from ._common import as_step, cosine, fractions, interpolate, power


class exponential_decay(AbstractSchedule):
    """Exponential decay by a factor of `decay_rate` every `transition_steps` steps.

        s(n) = init_value·decay_rate^p,   p = max(n − transition_begin, 0) / transition_steps

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `transition_steps`: the number of steps per factor, ≥ 1.
    - `decay_rate`: the factor, > 0. The value grows if it is above 1. In float32 it is rounded to
        a multiple of 6e-8 below 1: use more `transition_steps` rather than a factor closer to 1.
    - `transition_begin`: the step at which the decay begins, ≥ 0.
    - `staircase`: whether to round p down, so that the value changes once every
        `transition_steps` steps.
    - `end_value`: a lower bound on the value, or an upper bound if `decay_rate` ≥ 1. Defaults to
        no bound.

    Differs from Optax: a `decay_rate` of 0 is an error, not a constant schedule.
    """

    init_value: Number = hyperparameter()
    transition_steps: Step = steps(within="[1, inf)")
    decay_rate: Number = hyperparameter(within="(0, inf)")
    transition_begin: Step = steps(0)
    staircase: bool = eqx.field(default=False, static=True)
    end_value: OptionalNumber = hyperparameter(None)

    def __call__(self, step: Step) -> Scalar:
        return exponential(self, self.init_value, as_step(step))


class cosine_decay(AbstractSchedule):
    """Cosine decay from `init_value` to `alpha·init_value`, constant afterwards.

        s(n) = init_value·((1 − α)·(½(1 + cos πf))^exponent + α),   f = min(n / decay_steps, 1)

    **Arguments:**

    - `init_value`: the value at step 0.
    - `decay_steps`: the length of the decay in steps, ≥ 1.
    - `alpha`: α, the final value as a fraction of the initial value.
    - `exponent`: the exponent of the cosine term, > 0.

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    init_value: Number = hyperparameter()
    decay_steps: Step = steps(within="[1, inf)")
    alpha: Number = hyperparameter(0.0)
    exponent: Number = hyperparameter(1.0, within="(0, inf)")

    def __call__(self, step: Step) -> Scalar:
        weights = power(cosine(fractions(step, self.decay_steps)), self.exponent)
        return as_canonical(self.init_value) * interpolate(1.0, self.alpha, weights)


def exponential(rule: Any, value: Any, step: Any) -> Scalar:
    """`value` after `step` steps of the exponential decay that the fields of `rule` describe."""
    dtype = canonical_float()
    past = jnp.maximum(step - as_step(rule.transition_begin), 0)
    length = as_step(rule.transition_steps)
    if rule.staircase:
        # Divided as integers: a float quotient may round to the wrong side of an integer.
        power = (past // length).astype(dtype)
    else:
        power = past.astype(dtype) / length.astype(dtype)
    rate = as_canonical(rule.decay_rate)
    value = as_canonical(value) * rate**power
    if rule.end_value is None:
        return value
    end = as_canonical(rule.end_value)
    return jnp.where(rate < 1, jnp.maximum(value, end), jnp.minimum(value, end))
