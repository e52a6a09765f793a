"""Momentum of gradients that were divided first: LaProp."""

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

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-15, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def begin(self, state):
        self._correct_biases(state)

    def advance(self, g, leaf):
        leaf.nu = self.b2 * leaf.nu + self.c2 * tree.bounded_square(g)
        divisor = tree.root(tree.positive(leaf.nu) * self.nu_scale) + self.eps
        leaf.mu = self.b1 * leaf.mu + self.c1 * (g / divisor)

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
    return chain(
        ScaleByLaprop(b1, b2, eps, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
