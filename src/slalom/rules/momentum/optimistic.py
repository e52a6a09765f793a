"""Optimistic gradient descent."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from ... import tree
from ..._core.fields.declare import Hyperparameter, hyperparameter
from ..._core.protocol.rule import AbstractRule
from ..._core.state.marks import param_like, per_leaf
from ...tree.types import Params


class ScaleByOptimisticGradientState(eqx.Module):
    """The state of `ScaleByOptimisticGradient`."""

    age: Int[Array, "*leaves"] = per_leaf()
    previous_gradient: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByOptimisticGradient(AbstractRule[ScaleByOptimisticGradientState]):
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

    def init(self, params: Params) -> ScaleByOptimisticGradientState:
        return ScaleByOptimisticGradientState(
            age=tree.fresh_count(), previous_gradient=tree.first_moment(params)
        )

    def begin(self, now, state):
        now.first = state.age == 0
        state.age = tree.increment(state.age)

    def advance(self, now, g, leaf):
        # XLA copies the previous gradient, which is unavoidable: the change cannot be derived from
        # the new state, which is g alone.
        leaf.change = jnp.where(now.first, 0, g - leaf.previous_gradient)
        leaf.previous_gradient = g

    def direction(self, now, g, leaf):
        return now.alpha * g + now.beta * leaf.change
