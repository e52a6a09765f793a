"""Variants of Adam: ACProp, LaProp, simplified AdEMAMix, and AdamC."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ... import fields, tree
from ...rules._base import AbstractRule, AbstractTransform, advise_keywords
from ...rules.adaptive.adam import AbstractAdam, ScaleByAdam
from ...rules.adaptive.adam_variants import AbstractBelief
from ...rules.shaping.descent import decay_mask, decayed_descent, where_field
from ...tree.types import Hyperparameter, WhereLike
from ...where.resolve import Where


class ScaleByAcprop(AbstractBelief):
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

    def begin(self, state):
        self.c1, self.c2 = 1 - self.b1, 1 - self.b2
        self.first = state.age == 0
        self.nu_scale = tree.bias_correction(self.b2, jnp.maximum(state.age, 1))
        state.age = tree.increment(state.age)

    def advance(self, g, leaf):
        # XLA copies the old mean of squares: from the new one it would have lost digits.
        self.divided = g / jnp.where(self.first, 1, self._divisor(leaf.nu))
        super().advance(g, leaf)

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
    rule = ScaleByAcprop(b1, b2, eps, eps_root)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


class ScaleByLaprop(AbstractAdam):
    """LaProp: Adam in the other order, dividing by the root of squares before averaging.

        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ / (√v̂ₜ + ε)   with   v̂ₜ = vₜ / (1 − β₂ᵗ)
        uₜ = mₜ / (1 − β₁ᵗ)

    This decouples β₁ from β₂: any pair of them is stable.

    The learning rate stays outside the mean, as in the paper. The authors' code averages
    ηₜ·gₜ / (√v̂ₜ + ε) instead and divides by the mean of ηₜ; both agree as long as η is constant.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Ziyin, Wang & Ueda, [LaProp: Separating Momentum and Adaptivity in
        Adam](https://arxiv.org/abs/2002.04839), 2020"
    """

    eps: fields.Number = fields.hyperparameter(1e-15, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def advance(self, g, leaf):
        leaf.nu = self.b2 * leaf.nu + self.c2 * tree.bounded_square(g)
        leaf.mu = self.b1 * leaf.mu + self.c1 * (g / self._divisor(leaf.nu))

    def direction(self, g, leaf):
        return self.mu_scale * leaf.mu


@advise_keywords
def laprop(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-15,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """LaProp: AdamW in the other order, dividing by the root of squares before averaging.

        p ↦ p − η·(m̂ₜ + λ·p)   with   mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ / (√v̂ₜ + ε)

    The authors' code subtracts λ·p in each step, as `independent_decay=True` does.

    **Arguments:**

    - `learning_rate`: η; 4e-4 in the authors' code.
    - `b1`, `b2`, `eps`: as in `ScaleByLaprop`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: as in `ScaleByLaprop`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByLaprop`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Ziyin, Wang & Ueda, [LaProp: Separating Momentum and Adaptivity in
        Adam](https://arxiv.org/abs/2002.04839), 2020"
    """
    rule = ScaleByLaprop(b1, b2, eps, mu_dtype=mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


class ScaleBySimplifiedAdemamix(AbstractAdam):
    """Simplified AdEMAMix: Adam whose numerator mixes a long sum of gradients with the newest one.

        mₜ = β₁·mₜ₋₁ + gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        uₜ = (mₜ + α·gₜ) / (√(v̂ₜ + ε_root) + ε)   with   v̂ₜ = vₜ / (1 − β₂ᵗ)

    m is a sum, not a mean: it is as large as about 1 / (1 − β₁) gradients, so learning rates are
    smaller than Adam's by this factor. At α = 0 this is Adam without the correction of the bias of
    m, with the learning rate η·(1 − β₁).

    **Arguments:**

    - `b1`: β₁, the decay of the sum, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `alpha`: α, the weight of the newest gradient, ≥ 0. The paper uses up to 200, for small
        batches.
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Morwani et al., [Connections between Schedule-Free Optimizers, AdEMAMix, and
        Accelerated SGD Variants](https://arxiv.org/abs/2502.02431), 2025"
    """

    b1: fields.Number = fields.hyperparameter(0.99, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    alpha: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + g
        leaf.nu = self.b2 * leaf.nu + self.c2 * tree.bounded_square(g)

    def direction(self, g, leaf):
        return (leaf.mu + self.alpha * g) / self._divisor(leaf.nu, self.eps_root)


@advise_keywords
def simplified_ademamix(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.99,
    b2: Hyperparameter = 0.95,
    alpha: Hyperparameter = 0.0,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Simplified AdEMAMix: AdamW on a mix of a long sum of gradients and the newest one.

        p ↦ p − η·((mₜ + α·gₜ) / (√v̂ₜ + ε) + λ·p)   with   mₜ = β₁·mₜ₋₁ + gₜ

    **Arguments:**

    - `learning_rate`: η; smaller than for Adam, by a factor of about 1 − β₁.
    - `b1`, `b2`, `alpha`, `eps`, `eps_root`: as in `ScaleBySimplifiedAdemamix`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: as in `ScaleBySimplifiedAdemamix`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleBySimplifiedAdemamix`, `AddDecayedWeights` and
    `ScaleByLearningRate`.

    ??? cite "Morwani et al., [Connections between Schedule-Free Optimizers, AdEMAMix, and
        Accelerated SGD Variants](https://arxiv.org/abs/2502.02431), 2025"
    """
    rule = ScaleBySimplifiedAdemamix(b1, b2, alpha, eps, eps_root, mu_dtype=mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


class ScaleByLearningRateWithCorrectedDecay(AbstractRule[None]):
    """The last link of AdamC: a learning rate, and a decay that falls with its square.

        u ↦ −η·(u + λ·(η / η_max)·p)

    Weights in front of a normalization layer settle at a norm at which decay and gradient are in
    balance. If a schedule lowers η and the decay is η·λ, that norm falls, and the gradients grow
    near the end of training. With λ·η / η_max it stays the same. A constant η = η_max gives AdamW.

    **Arguments:**

    - `learning_rate`: η.
    - `max_learning_rate`: η_max, the largest value of the schedule, > 0.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    ??? cite "Defazio, [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025"
    """

    learning_rate: fields.Number = fields.hyperparameter()
    max_learning_rate: fields.Number = fields.hyperparameter(within="(0, inf)")
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    decay_where: Where | None = where_field()

    needs: ClassVar[tuple[str, ...]] = ("params",)
    sets_learning_rate: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = -1

    def plans(self, params):
        return decay_mask(self.decay_where, params)

    def begin(self, state):
        self.decay = self.weight_decay * (self.learning_rate / self.max_learning_rate)

    def direction(self, g, leaf):
        return -self.learning_rate * (g + self.decay * self.p if self.plan else g)


@advise_keywords
def adamc(
    learning_rate: Hyperparameter,
    max_learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    nesterov: bool = False,
) -> AbstractTransform:
    """AdamC: AdamW whose decay falls with the square of the learning rate.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·(η / η_max)·p)

    m̂ and v̂ are the means of `ScaleByAdam`.

    While AdamW's decay is η·λ·p, this one falls with the square of the learning rate, so that the
    norms of the weights do not shrink at the end of a schedule. The paper corrects the decay of
    layers that a normalization follows, but not the last layer: give the last one `sl.adamw` in a
    partition.

    **Arguments:**

    - `learning_rate`: η.
    - `max_learning_rate`: η_max, the largest value of the schedule, > 0.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`: as in `ScaleByAdam`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `nesterov`: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRateWithCorrectedDecay`.

    ```python
    >>> schedule = sl.schedules.cosine_decay(3e-3, decay_steps=1_000)
    >>> tx = sl.contrib.adamc(schedule, max_learning_rate=3e-3, weight_decay=0.1)

    ```

    ??? cite "Defazio, [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025"
    """
    rule = ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return rule | ScaleByLearningRateWithCorrectedDecay(
        learning_rate, max_learning_rate, weight_decay, decay_where=decay_where
    )
