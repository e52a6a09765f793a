"""Numbers that belong to all leaves together, such as an estimate of the learning rate."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Params, Scalar
from ...where.resolve import Where
from .._base import Context
from ..adaptive.adam import AbstractMoments, AbstractMomentsState, MomentsState
from ..shaping.descent import decay_mask


class AbstractEstimatingState(AbstractMomentsState):
    """The state of Adam with an estimate of the learning rate."""

    estim_lr: Float[Array, ""] = fields.until_reset()
    numerator_weighted: Float[Array, ""] = fields.until_reset()
    grad_sum: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")


class _AbstractEstimatingFields:
    # Abstract variables would come first in the signature of a rule.
    learning_rate: fields.Number
    estim_lr0: fields.Number
    bias_correction: bool
    decay_where: Where | None


class AbstractEstimatingAdam(AbstractMoments[MomentsState], _AbstractEstimatingFields):
    """Adam with an estimate d of the learning rate, the `estim_lr` of its state: the last link of
    a chain."""

    over: ClassVar[str] = "sums"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    sets_learning_rate: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = -1
    metric_fields: ClassVar[tuple[str, ...]] = ("estim_lr",)

    def _fresh(self, params: Params) -> dict[str, Any]:
        """The fields of `AbstractEstimatingState` at first."""
        first, dtype = self.at(Context(step=0)).estim_lr0, tree.sum_dtype(params)
        return {
            **self._fresh_moments(params),
            "estim_lr": jnp.array(first, dtype),
            "numerator_weighted": jnp.zeros((), dtype),
            "grad_sum": tree.zeros_like(params, tree.accumulation_dtype),
        }

    def plans(self, params: Params) -> tuple[bool, ...]:
        return decay_mask(self.decay_where, params)

    def step_size(self, d: Scalar, age: Int[Array, "*leaves"]) -> Array:
        """η = γ·d, with the factor √(1 − β₂ᵗ) / (1 − β₁ᵗ) if the bias is corrected."""
        rate = number(self.learning_rate, d) * d
        if not self.bias_correction:
            return rate
        root = jnp.sqrt(tree.bias_correction(self.b2, age))
        correction = tree.bias_correction(self.b1, age) / root
        return rate * correction.astype(rate.dtype)


def number(value: Any, like: Scalar) -> Scalar:
    """A number in the dtype of another one."""
    return jnp.asarray(value, like.dtype)


def bounded(x: Array) -> Array:
    """The nearest number of at most a quarter of the largest finite size; NaN stays NaN.

    An infinite sum would stay infinite in every mean that it enters.
    """
    largest = float(jnp.finfo(x.dtype).max) / 4
    return jnp.clip(x, -largest, largest)


def larger(estimate: Scalar, numerator: Scalar, denominator: Scalar) -> Scalar:
    """The larger of an estimate and a quotient; the estimate itself if the quotient is not finite,
    or the denominator 0."""
    some = denominator > 0
    quotient = tree.quotient(jnp.where(some, numerator, 0), jnp.where(some, denominator, 1))
    return jnp.where(jnp.isfinite(quotient) & (quotient > estimate), quotient, estimate)
