"""Constants and straight or bent ways from one value to another."""

import jax.numpy as jnp

from .._core.fields import Hyperparameter, hyperparameter, steps
from .._core.schedule import AbstractSchedule
from .._types import Scalar, Step
from ..tree.dtypes import as_canonical
from ._common import blend, fraction, ticks


class constant(AbstractSchedule):
    """The same value at every step.

    **Arguments:**

    - `value`: the value.
    """

    value: Hyperparameter = hyperparameter()

    def __call__(self, step: Step) -> Scalar:
        del step
        return as_canonical(self.value)


class linear(AbstractSchedule):
    """A straight line from one value to another, and the end values outside it.

        s(n) = init_value·(1 − f) + end_value·f,   f = (n − transition_begin) / transition_steps

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `transition_steps`: how many steps the line takes, ≥ 1.
    - `transition_begin`: the step at which it begins, ≥ 0.
    """

    init_value: Hyperparameter = hyperparameter()
    end_value: Hyperparameter = hyperparameter()
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        done = fraction(ticks(step) - ticks(self.transition_begin), self.transition_steps)
        return blend(self.end_value, self.init_value, done)


class polynomial(AbstractSchedule):
    """A power of what is left of the way, from one value to another.

        s(n) = end_value + (init_value − end_value)·(1 − f)^power,
        f = (n − transition_begin) / transition_steps, held between 0 and 1

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `power`: the power, > 0; 1 makes the way straight.
    - `transition_steps`: how many steps the way takes, ≥ 1.
    - `transition_begin`: the step at which it begins, ≥ 0.
    """

    init_value: Hyperparameter = hyperparameter()
    end_value: Hyperparameter = hyperparameter()
    power: Hyperparameter = hyperparameter(within="(0, inf)")
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        length = ticks(self.transition_steps)
        # Clipped first: the difference from the last step might not fit an int32 otherwise.
        done = jnp.clip(ticks(step) - ticks(self.transition_begin), 0, length)
        left = fraction(length - done, length)
        return blend(self.init_value, self.end_value, left ** as_canonical(self.power))
