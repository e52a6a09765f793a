"""The simplified form of AdEMAMix."""

from typing import Any

import numpy as np

from ... import fields, tree
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules.adaptive._adam import AbstractAdam
from ...rules.shaping.decay import decayed_descent
from ...tree.types import Hyperparameter
from ...where.resolve import WhereLike


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

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.c2 = 1 - self.b2
        self.nu_scale = tree.bias_correction(self.b2, age)

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + g
        leaf.nu = self.b2 * leaf.nu + self.c2 * tree.bounded_square(g)

    def direction(self, g, leaf):
        divisor = tree.root(tree.positive(leaf.nu) * self.nu_scale + self.eps_root) + self.eps
        return (leaf.mu + self.alpha * g) / divisor


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
    return chain(
        ScaleBySimplifiedAdemamix(b1, b2, alpha, eps, eps_root, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
