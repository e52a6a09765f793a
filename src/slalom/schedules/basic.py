"""Constant, linear and polynomial schedules."""

import jax.numpy as jnp

from .._core.fields.declare import Number, hyperparameter, steps
from .._core.fields.schedule import AbstractSchedule
from ..tree.dtypes import as_canonical
from ..tree.means import log_of_decay
from ..tree.types import Scalar, Step
from ._common import as_step, fractions, interpolate, power


class constant(AbstractSchedule):
    """The same value at every step.

    **Arguments:**

    - `value`: the value.
    """

    value: Number = hyperparameter()

    def __call__(self, step: Step) -> Scalar:
        del step
        return as_canonical(self.value)


class linear(AbstractSchedule):
    """Interpolates linearly between two values, and is constant before and after.

        s(n) = init_value·(1 − f) + end_value·f,   f = (n − transition_begin) / transition_steps

    where f is clipped to [0, 1].

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `transition_steps`: the length of the transition in steps, ≥ 1.
    - `transition_begin`: the step at which the transition begins, ≥ 0.
    """

    init_value: Number = hyperparameter()
    end_value: Number = hyperparameter()
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        past = as_step(step) - as_step(self.transition_begin)
        weights = fractions(past, self.transition_steps)
        return interpolate(self.init_value, self.end_value, weights)


class linear_half_life(AbstractSchedule):
    """The decay of a mean whose half-life grows or shrinks linearly.

        1 / log s(n) = (1 − f) / log init_value + f / log end_value,   f = n / transition_steps

    where f is clipped to [0, 1]. The half-life of a decay β is log ½ / log β steps. Interpolated
    linearly, β itself would spend nearly all steps at short half-lives.

    **Arguments:**

    - `init_value`: the decay at step 0, in (0, 1).
    - `end_value`: the decay from step `transition_steps` on, in (0, 1).
    - `transition_steps`: the length of the transition in steps, ≥ 1.

    ```python
    >>> sl.schedules.linear_half_life(0.9, 0.9999, 10_000)(5_000)
    Array(0.99980015, dtype=float32)

    ```

    ??? cite "Pagliardini, Ablin & Grangier, [The AdEMAMix Optimizer: Better, Faster,
        Older](https://arxiv.org/abs/2409.03137), 2024"
    """

    init_value: Number = hyperparameter(within="(0, 1)")
    end_value: Number = hyperparameter(within="(0, 1)")
    transition_steps: Step = steps(within="[1, inf)")

    def __call__(self, step: Step) -> Scalar:
        weights = fractions(step, self.transition_steps)
        first, last = as_canonical(self.init_value), as_canonical(self.end_value)
        inverse = interpolate(1 / log_of_decay(first), 1 / log_of_decay(last), weights)
        value = jnp.where(weights.second == 0, first, jnp.exp(1 / inverse))
        return jnp.where(weights.first == 0, last, value)


class polynomial(AbstractSchedule):
    """Polynomial decay from one value to another.

        s(n) = end_value + (init_value − end_value)·(1 − f)^power,
        f = (n − transition_begin) / transition_steps

    where f is clipped to [0, 1].

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `power`: the exponent, > 0; 1 gives a linear schedule.
    - `transition_steps`: the length of the transition in steps, ≥ 1.
    - `transition_begin`: the step at which the transition begins, ≥ 0.
    """

    init_value: Number = hyperparameter()
    end_value: Number = hyperparameter()
    power: Number = hyperparameter(within="(0, inf)")
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        past = as_step(step) - as_step(self.transition_begin)
        weights = power(fractions(past, self.transition_steps), self.power)
        return interpolate(self.init_value, self.end_value, weights)
