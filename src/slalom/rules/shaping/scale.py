"""Transforms that scale updates by one number."""

from typing import ClassVar

import equinox as eqx
import jax

from ... import fields
from ..._core.fields.schedule import AbstractStatefulSchedule
from ..._core.protocol.rule import AbstractRule
from ...tree.types import Hyperparameter, Params, Tracer, is_function


class _AbstractScale(AbstractRule[None]):
    """Multiplies updates by a number."""

    step_size: fields.Number = fields.hyperparameter()

    keeps_zeros: ClassVar[bool] = True

    def direction(self, g, leaf):
        return g * self.step_size

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.step_size),) * len(jax.tree.leaves(params))


class Scale(_AbstractScale):
    """Multiplies updates by a factor: u ↦ s·u.

    **Arguments:**

    - `step_size`: the factor s; negative to descend.
    """


class ScaleByLearningRate(AbstractRule[None]):
    """Multiplies updates by the negative learning rate: u ↦ −η·u. The usual last link.

    **Arguments:**

    - `learning_rate`: η.
    - `flip_sign`: whether to multiply by −η. With `False` the factor is η, for use before a link
        that flips the sign.
    """

    learning_rate: fields.Number = fields.hyperparameter()
    flip_sign: bool = eqx.field(default=True, static=True, kw_only=True)

    sets_learning_rate: ClassVar[bool] = True

    keeps_zeros: ClassVar[bool] = True

    def direction(self, g, leaf):
        return g * (-self.learning_rate if self.flip_sign else self.learning_rate)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (-1 if self.flip_sign else 1,) * len(jax.tree.leaves(params))


class ScaleBySchedule(_AbstractScale):
    """Multiplies updates by a function of the step: u ↦ s(n)·u.

    It does not flip the sign. To descend with a learning-rate schedule, use
    `ScaleByLearningRate(schedule)`.

    **Arguments:**

    - `step_size`: the schedule s, or any function of the step that returns a scalar.
    """


def sign_of(factor: Hyperparameter | AbstractStatefulSchedule) -> int | None:
    """The sign of a factor, or `None` if it is unknown."""
    if is_function(factor) or isinstance(factor, AbstractStatefulSchedule | Tracer):
        return None
    return 0 if factor == 0 else (-1 if factor < 0 else 1)
