"""Schedules that combine other schedules."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from .._core.fields.declare import Number, choice_field, hyperparameter, steps_in_order
from .._core.fields.schedule import AbstractSchedule, as_schedule
from .._core.text.printing import Infix
from ..tree.dtypes import as_canonical
from ..tree.types import Hyperparameter, Scalar, Step, is_function
from ._common import as_step
from .basic import constant


class join(AbstractSchedule):
    """Several schedules in sequence; each one counts its steps from 0.

    **Arguments:**

    - `schedules`: at least one schedule, function of the step, or number.
    - `boundaries`: the steps at which the second and every later schedule begins, ≥ 0 and
        strictly increasing.

    ```python
    >>> warmup = sl.schedules.linear(0.0, 1.0, transition_steps=2)
    >>> sl.schedules.join([warmup, 1.0], [2]).values(4)
    Array([0. , 0.5, 1. , 1. ], dtype=float32)

    ```
    """

    schedules: tuple[AbstractSchedule, ...]
    boundaries: tuple[Step, ...]

    def __init__(
        self,
        schedules: Sequence[Hyperparameter],
        boundaries: Sequence[Step],
    ):
        for name, value in (("schedules", schedules), ("boundaries", boundaries)):
            if not isinstance(value, Sequence):
                raise TypeError(
                    f"join.{name} must be a list, got {value!r}. Write `sl.schedules.join([first, "
                    "second], [step])`."
                )
        self.schedules = tuple(as_schedule(s) if is_function(s) else constant(s) for s in schedules)
        if len(self.schedules) != len(boundaries) + 1:
            raise ValueError(
                "join takes one boundary fewer than schedules, got "
                f"{len(self.schedules)} schedules and {len(boundaries)} boundaries."
            )
        self.boundaries = steps_in_order("join.boundaries", boundaries)

    def __call__(self, step: Step) -> Scalar:
        step = as_step(step)
        value = as_canonical(self.schedules[0](step))
        for at, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            boundary = as_step(at)
            # Both branches of a `where` are computed, and no schedule is defined for step < 0.
            later = as_canonical(schedule(jnp.maximum(step - boundary, 0)))
            value = jnp.where(step < boundary, value, later)
        return value

    @classmethod
    def after(cls, first: AbstractSchedule, other: Any, at: Step) -> "join":
        """`first` until the step `at`, then `other`. A joined `first` is extended, not nested."""
        if isinstance(first, join):
            return join([*first.schedules, other], [*first.boundaries, at])
        return join([first, other], [at])


_OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "+": (operator.add, 1),
    "-": (operator.sub, 1),
    "*": (operator.mul, 2),
    "/": (operator.truediv, 2),
}
"""The function and the precedence of each operator."""


class CombinedSchedule(AbstractSchedule):
    """Arithmetic on two schedules, or on a schedule and a number, such as `2 * s`.

    **Arguments:**

    - `symbol`: `"+"`, `"-"`, `"*"` or `"/"`.
    - `left`: the left operand, a number or a schedule.
    - `right`: the right operand, a number or a schedule.
    """

    symbol: str = choice_field(*_OPERATIONS, required=True)
    left: Number = hyperparameter()
    right: Number = hyperparameter()

    takes_schedules: ClassVar[bool] = True

    def __check_init__(self):
        if self.symbol == "/" and isinstance(self.right, float) and self.right == 0:
            raise ZeroDivisionError(f"The schedule {self.left!r} is divided by zero.")

    def __call__(self, step: Step) -> Scalar:
        function, _ = _OPERATIONS[self.symbol]
        return function(_value_at(self.left, step), _value_at(self.right, step))

    def _code(self) -> Infix:
        _, precedence = _OPERATIONS[self.symbol]
        return Infix(self.symbol, (self.left, self.right), precedence)


class NegatedSchedule(AbstractSchedule):
    """The negative of a schedule, `-s`.

    **Arguments:**

    - `schedule`: the schedule.
    """

    schedule: AbstractSchedule = eqx.field(converter=as_schedule)

    def __call__(self, step: Step) -> Scalar:
        return -_value_at(self.schedule, step)

    def _code(self) -> Infix:
        return Infix("-", (self.schedule,), 3)


def _value_at(operand: Any, step: Step) -> Scalar:
    """A number, or a schedule's value at `step`, in the canonical float dtype."""
    return as_canonical(operand(step) if isinstance(operand, AbstractSchedule) else operand)
