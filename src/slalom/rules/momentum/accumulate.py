"""Transforms that divide by accumulated squares: Adagrad and Adadelta."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, Scalar, WhereLike
from .._base import AbstractRule, AbstractTransform, Context, advise_keywords
from ..shaping.descent import ScaleByLearningRate, decayed


class ScaleByRssState(eqx.Module):
    """The state of `ScaleByRss`."""

    sum_of_squares: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")


class ScaleByRss(AbstractRule[ScaleByRssState]):
    """Adagrad: divides updates by the root of the sum of all their squares.

        sₜ = sₜ₋₁ + |gₜ|²
        uₜ = gₜ / √(sₜ + ε)   where sₜ > 0,   else   0

    **Arguments:**

    - `initial_accumulator_value`: s₀, ≥ 0.
    - `eps`: ε, ≥ 0.

    ??? cite "Duchi, Hazan & Singer, [Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization](https://jmlr.org/papers/v12/duchi11a.html), 2011"
    """

    initial_accumulator_value: fields.Number = fields.hyperparameter(0.1, within="[0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-7, within="[0, inf)")

    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByRssState:
        start = self.at(Context(step=0)).initial_accumulator_value
        return ScaleByRssState(tree.second_moment(params, value=start))

    def advance(self, g, leaf):
        leaf.sum_of_squares = tree.bounded(leaf.sum_of_squares + tree.abs_squared(g))

    def direction(self, g, leaf):
        return divide_by_root(g, leaf.sum_of_squares, self.eps)


def divide_by_root(g: Array, total: Array, eps: Scalar) -> Array:
    """g / √(total + ε), and 0 where the total is 0."""
    return g * tree.inverse_root(tree.positive(total) + eps)


class ScaleByAdadeltaState(eqx.Module):
    """The state of `ScaleByAdadelta`."""

    e_g: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    e_x: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")


class ScaleByAdadelta(AbstractRule[ScaleByAdadeltaState]):
    """Adadelta: gives each update the running size of the previous updates.

        vₜ = ρ·vₜ₋₁ + (1 − ρ)·|gₜ|²
        uₜ = √(xₜ₋₁ + ε) / √(vₜ + ε) · gₜ
        xₜ = ρ·xₜ₋₁ + (1 − ρ)·|uₜ|²

    Differs from Optax, where the root of the quotient makes the update 0 for gradients of 3e16 and
    more.

    **Arguments:**

    - `rho`: ρ, the decay of both means of squares, in [0, 1).
    - `eps`: ε, > 0; with ε = 0 all updates would be zero.

    ??? cite "Zeiler, [ADADELTA](https://arxiv.org/abs/1212.5701), 2012"
    """

    rho: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")

    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(
            e_g=tree.second_moment(params),
            e_x=tree.second_moment(params),
        )

    def begin(self, state):
        self.rest = 1 - self.rho

    def advance(self, g, leaf):
        square = tree.bounded_square(g)
        leaf.e_g = self.rho * leaf.e_g + self.rest * square
        # |g|² / v is at most 1 / (1 − ρ), and no product with it overflows or underflows.
        ratio = square / (leaf.e_g + self.eps)
        leaf.e_x = self.rho * leaf.e_x + self.rest * (ratio * (leaf.e_x + self.eps))

    def direction(self, g, leaf):
        # From xₜ instead of xₜ₋₁, which XLA would copy (see `_core/engine`):
        # xₜ = ρ·xₜ₋₁ + (1 − ρ)·|gₜ|²·(xₜ₋₁ + ε) / (vₜ + ε), solved for xₜ₋₁ + ε.
        size = tree.root(leaf.e_x + self.rho * self.eps)
        divisor = self.rho * (leaf.e_g + self.eps) + self.rest * tree.bounded_square(g)
        # Not √(a / b), which is 0 for gradients from 3e16 on.
        return size * tree.inverse_root(tree.positive(divisor)) * g


@advise_keywords
def adagrad(
    learning_rate: Hyperparameter,
    initial_accumulator_value: Hyperparameter = 0.1,
    eps: Hyperparameter = 1e-7,
) -> AbstractTransform:
    """Adagrad: divides gradients by the root of the sum of all their squares.

        p ↦ p − η·gₜ / √(sₜ + ε)   with   sₜ = sₜ₋₁ + |gₜ|²

    **Arguments:**

    - `learning_rate`: η.
    - `initial_accumulator_value`, `eps`: as in `ScaleByRss`.

    **Returns:** a chain of `ScaleByRss` and `ScaleByLearningRate`.

    ??? cite "Duchi, Hazan & Singer, [Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization](https://jmlr.org/papers/v12/duchi11a.html), 2011"
    """
    return ScaleByRss(initial_accumulator_value, eps) | ScaleByLearningRate(learning_rate)


@advise_keywords
def adadelta(
    learning_rate: Hyperparameter = 1.0,
    rho: Hyperparameter = 0.9,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """Adadelta: gives each step the running size of the previous steps.

        p ↦ p − η·√(x + ε) / √(v + ε)·g

    v and x are decaying means of the squares of the gradients and of the steps.

    Differs from Optax: the learning rate defaults to 1, as in the paper. Optax without a learning
    rate does not flip the sign, so its updates ascend.

    **Arguments:**

    - `learning_rate`: η.
    - `rho`, `eps`: as in `ScaleByAdadelta`.
    - `weight_decay`: λ, ≥ 0. λ·p is added to the gradients, as in L2 regularization.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `AddDecayedWeights`, `ScaleByAdadelta` and `ScaleByLearningRate`.

    ??? cite "Zeiler, [ADADELTA](https://arxiv.org/abs/1212.5701), 2012"
    """
    rule = decayed(weight_decay, decay_where) | ScaleByAdadelta(rho, eps)
    return rule | ScaleByLearningRate(learning_rate)


class ApplyEveryState(eqx.Module):
    """The state of `ApplyEvery`."""

    mini_step: Int[Array, ""]
    grad_acc: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ApplyEvery(AbstractRule[ApplyEveryState]):
    """Emits the sum of the last k updates in every k-th step, and zeros in the other steps.

    The other links of a chain run in every step: a momentum that follows still decays. To run a
    whole transform once in k steps, at a fraction of the cost, use `tx.every_k(k)`.

    Differs from Optax: the sum is kept in at least float32, and a NaN affects only its own window.

    **Arguments:**

    - `k`: the number of steps in a window, an int ≥ 1.
    """

    k: int = fields.count_field(1)

    def init(self, params: Params) -> ApplyEveryState:
        return ApplyEveryState(
            mini_step=tree.fresh_count(),
            grad_acc=tree.zeros_like(params, tree.accumulation_dtype),
        )

    def begin(self, state):
        self.first, self.last = state.mini_step == 0, state.mini_step == self.k - 1
        state.mini_step = jnp.where(self.last, 0, state.mini_step + 1)

    def advance(self, g, leaf):
        leaf.grad_acc = jnp.where(self.first, g, leaf.grad_acc + g)

    def direction(self, g, leaf):
        return jnp.where(self.last, leaf.grad_acc, 0)

    def has_updated(self, state: ApplyEveryState) -> Bool[Array, "*runs"]:
        return state.mini_step == 0
