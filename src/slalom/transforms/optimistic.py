"""Transforms that extrapolate from the previous update."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._core.fields import Hyperparameter, hyperparameter
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform, Context
from .._types import Params, Updates


class ScaleByOptimisticGradientState(eqx.Module):
    """What `ScaleByOptimisticGradient` remembers."""

    age: Int[Array, "*leaves"] = per_leaf()
    previous_gradient: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByOptimisticGradient(AbstractTransform):
    """Optimistic gradient: extrapolates from the previous update to the next one.

        uₜ = (α + β)·gₜ − β·gₜ₋₁   with   g₀ = g₁

    It damps the rotation of games, such as of a generator and a discriminator, that makes
    gradient descent circle.

    **Arguments:**

    - `alpha`: α, the share of the gradient itself.
    - `beta`: β, the share of its change.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """

    alpha: Hyperparameter = hyperparameter(1.0)
    beta: Hyperparameter = hyperparameter(1.0)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByOptimisticGradientState:
        return ScaleByOptimisticGradientState(
            age=tree.fresh_age(), previous_gradient=tree.first_moment(params)
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByOptimisticGradientState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByOptimisticGradientState]:
        del params
        now = self.at(context)

        # The one copy that XLA makes of the old gradient is needed: what is kept is g and nothing
        # else, so the change cannot be derived from what is kept.
        def rule(g, previous, alpha, beta, age):
            change = jnp.where(age == 0, 0, g - previous)
            return alpha * g + beta * change, g

        made, previous = tree.map_leaves(
            rule, (updates, state.previous_gradient), (now.alpha, now.beta), (state.age,)
        )
        return made, ScaleByOptimisticGradientState(
            tree.increment(state.age), tree.cast_like(previous, state.previous_gradient)
        )
