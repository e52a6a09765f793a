"""Transforms that multiply updates by one number."""

from typing import ClassVar

import equinox as eqx
import jax

from .. import tree
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import Context
from .._types import Params, Scalar, Tracer, Updates


class Scale(AbstractStatelessTransform):
    """Multiplies updates by a factor: u ↦ s·u.

    **Arguments:**

    - `step_size`: the factor s. Negative to descend.
    """

    step_size: Hyperparameter = hyperparameter()

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params
        return _scale(updates, self.at(context).step_size)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.step_size),) * len(jax.tree.leaves(params))


class ScaleByLearningRate(AbstractStatelessTransform):
    """Multiplies updates by the negative learning rate: u ↦ −η·u. The usual last link.

    **Arguments:**

    - `learning_rate`: η.
    - `flip_sign`: whether to multiply by −η; by η without it, for a link further left than the
        one that descends.
    """

    learning_rate: Hyperparameter = hyperparameter()
    flip_sign: bool = eqx.field(default=True, static=True, kw_only=True)

    sets_learning_rate: ClassVar[bool] = True

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params
        rate = self.at(context).learning_rate
        return _scale(updates, -rate if self.flip_sign else rate)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (-1 if self.flip_sign else 1,) * len(jax.tree.leaves(params))


class ScaleBySchedule(AbstractStatelessTransform):
    """Multiplies updates by a function of the clock: u ↦ s(n)·u.

    The sign is the schedule's own: to descend with a learning-rate schedule, use
    `ScaleByLearningRate(schedule)`.

    **Arguments:**

    - `step_size`: the schedule s, or any function of the step to a scalar.
    """

    step_size: Hyperparameter = hyperparameter()

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params
        return _scale(updates, self.at(context).step_size)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.step_size),) * len(jax.tree.leaves(params))


def _scale(updates: Updates, factor: Scalar) -> Updates:
    return tree.map_leaves(lambda u, s: u * s, (updates,), (factor,))


def sign_of(factor: Hyperparameter) -> int | None:
    """The sign of a factor, where it is known."""
    if callable(factor) or isinstance(factor, Tracer):
        return None
    return 0 if factor == 0 else (-1 if factor < 0 else 1)
