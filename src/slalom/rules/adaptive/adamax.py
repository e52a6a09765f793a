"""Adamax: Adam with a decaying maximum in place of the mean of squares."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ... import fields, tree
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...tree.types import Hyperparameter
from ...where.resolve import WhereLike
from ..shaping.decay import decayed_descent
from ..shaping.scale import ScaleByLearningRate
from ._adam import AbstractAdam


class ScaleByAdamax(AbstractAdam):
    """Adamax: divides a mean of gradients by a decaying maximum of their absolute values.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = max(β₂·vₜ₋₁, |gₜ| + ε)
        uₜ = mₜ / ((1 − β₁ᵗ)·vₜ)

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the maximum, in [0, 1).
    - `eps`: ε, > 0; keeps v from being zero.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="(0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.c1 = 1 - self.b1
        self.mu_scale = tree.bias_correction(self.b1, age)

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        leaf.nu = jnp.maximum(self.b2 * leaf.nu, jnp.abs(g) + self.eps)

    def direction(self, g, leaf):
        return leaf.mu * self.mu_scale / leaf.nu


@advise_keywords
def adamax(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Adamax: Adam with a decaying maximum in place of the mean of squares.

        p ↦ p − η·m̂ₜ / vₜ   with   vₜ = max(β₂·vₜ₋₁, |gₜ| + ε)

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `mu_dtype`: as in `ScaleByAdamax`.

    **Returns:** a chain of `ScaleByAdamax` and `ScaleByLearningRate`.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014"
    """
    return chain(
        ScaleByAdamax(b1, b2, eps, mu_dtype=mu_dtype),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def adamaxw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Adamax with decoupled weight decay.

        p ↦ p − η·(m̂ₜ / vₜ + λ·p)   with   vₜ = max(β₂·vₜ₋₁, |gₜ| + ε)

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`: as in `ScaleByAdamax`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: as in `ScaleByAdamax`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdamax`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014; Loshchilov & Hutter,
        [Decoupled Weight Decay Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """
    return chain(
        ScaleByAdamax(b1, b2, eps, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
