"""AdaBelief that divides by the deviations so far: ACProp."""

from typing import ClassVar

import jax.numpy as jnp

from ... import tree
from ..._core.fields.declare import Hyperparameter, hyperparameter
from ._adam import AbstractAdam


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

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-16, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(1e-16, within="[0, inf)")

    wide_mean: ClassVar[bool] = True

    def begin(self, now, state):
        now.c1, now.c2 = 1 - now.b1, 1 - now.b2
        now.first = state.age == 0
        now.nu_scale = tree.bias_correction(now.b2, jnp.maximum(state.age, 1))
        state.age = tree.increment(state.age)

    def advance(self, now, g, leaf):
        # XLA copies the old mean of squares: from the new one it would have lost digits.
        divisor = tree.root(tree.positive(leaf.nu) * now.nu_scale) + now.eps
        leaf.divided = g / jnp.where(now.first, 1, divisor)
        leaf.mu = now.b1 * leaf.mu + now.c1 * g
        square = tree.bounded_square(g - leaf.mu)
        leaf.nu = now.b2 * leaf.nu + (now.c2 * square + now.eps_root)

    def direction(self, now, g, leaf):
        return leaf.divided
