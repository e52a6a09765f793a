"""Constant, linear and polynomial schedules."""

from .._core.fields import Hyperparameter, hyperparameter, steps
from .._core.schedule import AbstractSchedule
from .._types import Scalar, Step
from ..tree.dtypes import as_canonical
from ._common import as_step, fractions, interpolate, power


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
    """Interpolates linearly between two values, and is constant before and after.

        s(n) = init_value·(1 − f) + end_value·f,   f = (n − transition_begin) / transition_steps

    where f is clipped to [0, 1].

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `transition_steps`: the length of the transition in steps, ≥ 1.
    - `transition_begin`: the step at which the transition begins, ≥ 0.
    """

    init_value: Hyperparameter = hyperparameter()
    end_value: Hyperparameter = hyperparameter()
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        past = as_step(step) - as_step(self.transition_begin)
        weights = fractions(past, self.transition_steps)
        return interpolate(self.init_value, self.end_value, weights)


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

    init_value: Hyperparameter = hyperparameter()
    end_value: Hyperparameter = hyperparameter()
    power: Hyperparameter = hyperparameter(within="(0, inf)")
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        past = as_step(step) - as_step(self.transition_begin)
        weights = power(fractions(past, self.transition_steps), self.power)
        return interpolate(self.init_value, self.end_value, weights)
