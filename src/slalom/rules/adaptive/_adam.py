"""Code shared by Adam and its variants."""

import abc
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Inexact, Int, PyTree

from ... import tree
from ..._core.protocol.rule import AbstractRule
from ..._core.state.marks import param_like, per_leaf
from ...tree.types import Params
from ..momentum.momentum import first_moment


class ScaleByAdamState(eqx.Module):
    """The state of `ScaleByAdam` and its variants."""

    age: Int[Array, "*leaves"] = per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")


class AbstractAdam(AbstractRule[ScaleByAdamState]):
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
    def advance(self, now: Any, g: Array, leaf: Any) -> None:
        """As `AbstractRule.advance`."""


def begin_adam(now: SimpleNamespace, state: Any, nesterov: bool = False) -> None:
    """Adds one to `age`, and to `now` 1 − β₁, 1 − β₂ and the factors of both means."""
    age = state.age = tree.increment(state.age)
    now.c1, now.c2 = 1 - now.b1, 1 - now.b2
    now.mu_scale, now.g_scale = tree.bias_correction(now.b1, age), None
    now.nu_scale = tree.bias_correction(now.b2, age)
    if nesterov:
        now.g_scale = now.c1 * now.mu_scale
        now.mu_scale = now.b1 * tree.bias_correction(now.b1, tree.increment(age))


def debiased_mean(now: SimpleNamespace, g: Array, mu: Array) -> Array:
    """m̂ₜ = mₜ / (1 − β₁ᵗ), or with Nesterov β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)."""
    if now.g_scale is None:
        return now.mu_scale * mu
    return now.mu_scale * mu + now.g_scale * g
