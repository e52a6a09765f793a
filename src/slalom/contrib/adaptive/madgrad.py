"""Dual averaging with a cube root: MADGRAD."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ...rules._base import AbstractRule, AbstractTransform, advise_keywords
from ...rules.shaping.descent import decayed
from ...tree.types import Hyperparameter, Params, WhereLike


class ScaleByMadgradState(eqx.Module):
    """The state of `ScaleByMadgrad`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    grad_sum_of_squares: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    grad_sum: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class ScaleByMadgrad(AbstractRule[ScaleByMadgradState]):
    """MADGRAD: dual averaging from the start, divided by the cube root of a sum of squares.

        λₜ = ηₜ·√t
        sₜ = sₜ₋₁ + λₜ·gₜ
        vₜ = vₜ₋₁ + λₜ·|gₜ|²
        zₜ = p₀ − sₜ / (∛vₜ + ε)
        pₜ = γ·pₜ₋₁ + (1 − γ)·zₜ,   uₜ = pₜ − pₜ₋₁

    Use it as the last link: it includes the learning rate, as a weight of the gradients, and the
    sign. Each leaf counts t from the start of its own sums. s and v are stored in at least float32,
    p₀ in the parameter's own dtype, which is exact.

    Differs from Optax, and from the authors' code, which add ε to the learning rate. Here λ is that
    of the paper, so that a learning rate of 0 leaves the sums as they are.

    **Arguments:**

    - `learning_rate`: η, ≥ 0.
    - `momentum`: γ, the weight of the old parameters, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.

    ??? cite "Defazio & Jelassi, [Adaptivity without Compromise: A Momentumized, Adaptive, Dual
        Averaged Gradient Method for Stochastic Optimization](https://arxiv.org/abs/2101.11075),
        2021"
    """

    learning_rate: fields.Number = fields.hyperparameter(within="[0, inf)")
    momentum: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    sets_learning_rate: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = -1

    def init(self, params: Params) -> ScaleByMadgradState:
        return ScaleByMadgradState(
            age=tree.fresh_count(),
            grad_sum_of_squares=tree.second_moment(params),
            grad_sum=tree.zeros_like(params, tree.accumulation_dtype),
            init_params=tree.copy(params),
        )

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.weight = self.learning_rate * jnp.sqrt(age.astype(self.learning_rate.dtype))
        self.share = 1 - self.momentum

    def advance(self, g, leaf):
        # Bounded before the sum: XLA would move a minimum after it into the kernel that writes
        # the parameters, which would then read the old sum (see `_core/engine`).
        squares = leaf.grad_sum_of_squares
        room = float(jnp.finfo(squares.dtype).max) / 4 - squares
        square = jnp.minimum(self.weight * tree.bounded_square(g), room)
        leaf.grad_sum = leaf.grad_sum + self.weight * g
        leaf.grad_sum_of_squares = squares + square

    def direction(self, g, leaf):
        divisor = jnp.cbrt(tree.positive(leaf.grad_sum_of_squares)) + self.eps
        return self.share * ((leaf.init_params - self.p) - leaf.grad_sum / divisor)


@advise_keywords
def madgrad(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter = 0.9,
    weight_decay: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-6,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """MADGRAD: dual averaging from the start, divided by the cube root of a sum of squares.

        p ↦ γ·p + (1 − γ)·(p₀ − s / (∛v + ε))

    s and v are weighted sums of the gradients and of their squares.

    Differs from Optax, which adds ε to the learning rate: see `ScaleByMadgrad`.

    **Arguments:**

    - `learning_rate`: η, ≥ 0.
    - `momentum`: as in `ScaleByMadgrad`.
    - `weight_decay`: λ, ≥ 0. λ·p is added to the gradients, as in L2 regularization. Defaults to
        no decay.
    - `eps`: as in `ScaleByMadgrad`.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `AddDecayedWeights`, if there is a decay, and `ScaleByMadgrad`.

    ??? cite "Defazio & Jelassi, [Adaptivity without Compromise: A Momentumized, Adaptive, Dual
        Averaged Gradient Method for Stochastic Optimization](https://arxiv.org/abs/2101.11075),
        2021"
    """
    rule = ScaleByMadgrad(learning_rate, momentum, eps)
    if weight_decay is None:
        return rule
    return decayed(weight_decay, decay_where) | rule
