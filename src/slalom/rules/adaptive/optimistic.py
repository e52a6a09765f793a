"""Optimistic gradient descent."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params
from .._base import AbstractRule, AbstractTransform, advise_keywords
from ..shaping.descent import ScaleByLearningRate
from .adam import ScaleByAdam


class ScaleByOptimisticGradientState(eqx.Module):
    """The state of `ScaleByOptimisticGradient`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    previous_gradient: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ScaleByOptimisticGradient(AbstractRule[ScaleByOptimisticGradientState]):
    """Optimistic gradient: extrapolates from the previous update to the next one.

        uₜ = (α + β)·gₜ − β·gₜ₋₁   with   g₀ = g₁

    It damps the rotation that makes gradient descent circle in games, such as a generator and a
    discriminator.

    **Arguments:**

    - `alpha`: α, the factor of the gradient.
    - `beta`: β, the factor of the change of the gradient.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """

    alpha: fields.Number = fields.hyperparameter(1.0)
    beta: fields.Number = fields.hyperparameter(1.0)

    def init(self, params: Params) -> ScaleByOptimisticGradientState:
        return ScaleByOptimisticGradientState(
            age=tree.fresh_count(), previous_gradient=tree.first_moment(params)
        )

    def begin(self, state):
        self.first = state.age == 0
        state.age = tree.increment(state.age)

    def advance(self, g, leaf):
        # XLA copies the previous gradient, which is unavoidable: the change cannot be derived from
        # the new state, which is g alone.
        self.change = jnp.where(self.first, 0, g - leaf.previous_gradient)
        leaf.previous_gradient = g

    def direction(self, g, leaf):
        return self.alpha * g + self.beta * self.change


@advise_keywords
def optimistic_gradient_descent(
    learning_rate: Hyperparameter,
    alpha: Hyperparameter = 1.0,
    beta: Hyperparameter = 1.0,
) -> AbstractTransform:
    """Optimistic gradient descent: extrapolates from the previous gradient to the next one.

        p ↦ p − η·((α + β)·gₜ − β·gₜ₋₁)

    **Arguments:**

    - `learning_rate`: η.
    - `alpha`, `beta`: as in `ScaleByOptimisticGradient`.

    **Returns:** a chain of `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """
    return ScaleByOptimisticGradient(alpha, beta) | ScaleByLearningRate(learning_rate)


@advise_keywords
def optimistic_adam_v2(
    learning_rate: Hyperparameter,
    *,
    alpha: Hyperparameter = 1.0,
    beta: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    nesterov: bool = True,
) -> AbstractTransform:
    """Optimistic Adam: extrapolates from Adam's previous update to the next one.

        p ↦ p − η·((α + β)·uₜ − β·uₜ₋₁)   with   u = m̂ / (√v̂ + ε)

    m̂ and v̂ are the means of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - `alpha`: α, the coefficient of Adam's update.
    - `beta`: β, the coefficient of the change since the previous update.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`, `nesterov`: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Daskalakis et al., [Training GANs with Optimism](https://arxiv.org/abs/1711.00141),
        2017"
    """
    rule = ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return rule | ScaleByOptimisticGradient(alpha, beta) | ScaleByLearningRate(learning_rate)
