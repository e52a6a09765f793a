"""AdaBelief that divides by the deviations so far: ACProp."""

from typing import ClassVar

import jax.numpy as jnp

from ... import fields, tree
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules.adaptive._adam import AbstractAdam
from ...rules.shaping.decay import decayed_descent
from ...tree.types import Hyperparameter
from ...where.resolve import WhereLike


class ScaleByAcprop(AbstractAdam):
    """ACProp: divides gradients by the previous estimate of their deviation from a mean.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        sₜ = β₂·sₜ₋₁ + (1 − β₂)·|gₜ − mₜ|² + ε_root
        uₜ = gₜ / (√ŝₜ₋₁ + ε)   with   ŝₜ = sₜ / (1 − β₂ᵗ),   u₁ = g₁

    The mean only centers the squares. The first update is the gradient, as in the authors' code:
    the paper's s₀ = 0 would make it gigantic.

    Differs from Optax, where s averages |gₜ − mₜ₋₁|², which is larger than the paper's by 1 / β₁²,
    and u₁ = g₁ / (1 + ε).

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added to s in every step, ≥ 0.

    ??? cite "Zhuang et al., [Momentum Centering and Asynchronous Update for Adaptive Gradient
        Methods](https://arxiv.org/abs/2110.05454), 2021"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-16, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(1e-16, within="[0, inf)")

    wide_mean: ClassVar[bool] = True

    def begin(self, state):
        self.c1, self.c2 = 1 - self.b1, 1 - self.b2
        self.first = state.age == 0
        self.nu_scale = tree.bias_correction(self.b2, jnp.maximum(state.age, 1))
        state.age = tree.increment(state.age)

    def advance(self, g, leaf):
        # XLA copies the old mean of squares: from the new one it would have lost digits.
        divisor = tree.root(tree.positive(leaf.nu) * self.nu_scale) + self.eps
        self.divided = g / jnp.where(self.first, 1, divisor)
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        square = tree.bounded_square(g - leaf.mu)
        leaf.nu = self.b2 * leaf.nu + (self.c2 * square + self.eps_root)

    def direction(self, g, leaf):
        return self.divided


@advise_keywords
def acprop(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-16,
    eps_root: Hyperparameter = 1e-16,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    independent_decay: bool = False,
) -> AbstractTransform:
    """ACProp: divides gradients by the previous estimate of their deviation from a mean.

        p ↦ p − η·(gₜ / (√ŝₜ₋₁ + ε) + λ·p)

    s is a mean of |g − m|², where m is a mean of gradients.

    Differs from Optax in the deviation that s averages: see `ScaleByAcprop`.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`: as in `ScaleByAcprop`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAcprop`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhuang et al., [Momentum Centering and Asynchronous Update for Adaptive Gradient
        Methods](https://arxiv.org/abs/2110.05454), 2021"
    """
    return chain(
        ScaleByAcprop(b1, b2, eps, eps_root),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
