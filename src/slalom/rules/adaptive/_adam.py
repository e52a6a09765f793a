"""Code shared by Adam and its variants."""

import abc
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.transform import State
from ...tree.types import Params
from ..momentum.momentum import first_moment


class ScaleByAdamState(eqx.Module):
    """The state of `ScaleByAdam` and its variants."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    nu: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")


class AbstractDecays:
    """The fields b1 and b2 of a rule, for type checkers."""

    # Abstract variables would come first in the signature of a rule.
    b1: fields.Number
    b2: fields.Number


class AbstractMoments(AbstractRule[State], AbstractDecays):
    """A rule with a mean of gradients and a mean of squares that both start at zero."""

    def _correct_biases(self, state: Any, nesterov: bool = False) -> None:
        """Adds one to `age`, and sets 1 − β₁, 1 − β₂ and the factors of both means."""
        age = state.age = tree.increment(state.age)
        self.c1, self.c2 = 1 - self.b1, 1 - self.b2
        self.mu_scale, self.g_scale = tree.bias_correction(self.b1, age), None
        self.nu_scale = tree.bias_correction(self.b2, age)
        if nesterov:
            self.g_scale = self.c1 * self.mu_scale
            self.mu_scale = self.b1 * tree.bias_correction(self.b1, tree.increment(age))

    @abc.abstractmethod
    def advance(self, g: Array, leaf: State) -> None:
        """As `AbstractRule.advance`."""

    def _debiased_mean(self, g: Array, mu: Array) -> Array:
        """m̂ₜ = mₜ / (1 − β₁ᵗ), or with Nesterov β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)."""
        if self.g_scale is None:
            return self.mu_scale * mu
        return self.mu_scale * mu + self.g_scale * g


class AbstractAdam(AbstractMoments[ScaleByAdamState]):
    """A rule with the state of Adam."""

    wide_mean: ClassVar[bool] = False
    """Whether the mean is at least float32 by default, because it is subtracted from gradients."""

    def init(self, params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(
            age=tree.fresh_count(),
            mu=tree.zeros_like(params, tree.accumulation_dtype)
            if self.wide_mean
            else first_moment(self, params, "b1"),
            nu=tree.second_moment(params),
        )

    @abc.abstractmethod
    def direction(self, g: Array, leaf: ScaleByAdamState) -> Array:
        """As `AbstractRule.direction`."""
