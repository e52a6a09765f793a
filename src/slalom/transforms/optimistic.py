"""Optimistic gradient descent."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, hyperparameter
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform
from .._types import Params, Updates


class ScaleByOptimisticGradientState(eqx.Module):
    """The state of `ScaleByOptimisticGradient`."""

    age: Int[Array, "*leaves"] = per_leaf()
    previous_gradient: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByOptimisticGradient(AbstractTransform[ScaleByOptimisticGradientState]):
    """Optimistic gradient: extrapolates from the previous update to the next one.

        uₜ = (α + β)·gₜ − β·gₜ₋₁   with   g₀ = g₁

    It damps the rotation that makes gradient descent circle in games, such as that of a generator
    and a discriminator.

    **Arguments:**

    - `alpha`: α, the factor of the gradient.
    - `beta`: β, the factor of the change of the gradient.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """

    alpha: Hyperparameter = hyperparameter(1.0)
    beta: Hyperparameter = hyperparameter(1.0)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByOptimisticGradientState:
        return ScaleByOptimisticGradientState(
            age=tree.fresh_count(), previous_gradient=tree.first_moment(params)
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

        now.first = state.age == 0

        # XLA copies the previous gradient, which is unavoidable: the change cannot be derived from
        # the new state, which is g alone.
        def rule(now, g, previous):
            change = jnp.where(now.first, 0, g - previous)
            return now.alpha * g + now.beta * change, g

        updates, previous = tree.map_leaves(rule, (updates, state.previous_gradient), now)
        return updates, ScaleByOptimisticGradientState(
            tree.increment(state.age), tree.cast_like(previous, state.previous_gradient)
        )
