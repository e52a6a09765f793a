"""Adam with a maximum in place of the mean of squares: Adamax and AMSGrad."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from .._base import AbstractTransform, advise_keywords
from ..shaping.descent import ScaleByLearningRate, decayed_descent
from .adam import AbstractAdam, AbstractMoments, AbstractMomentsState


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

    eps: fields.Number = fields.hyperparameter(1e-8, within="(0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.c1 = 1 - self.b1
        self.mu_scale = tree.bias_correction(self.b1, age)

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        leaf.nu = tree.running_maximum(self.b2 * leaf.nu, jnp.abs(g) + self.eps)

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
    return ScaleByAdamax(b1, b2, eps, mu_dtype=mu_dtype) | ScaleByLearningRate(learning_rate)


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
    rule = ScaleByAdamax(b1, b2, eps, mu_dtype=mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


class ScaleByAmsgradState(AbstractMomentsState):
    """The state of `ScaleByAmsgrad`."""

    nu_max: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")


class ScaleByAmsgrad(AbstractMoments[ScaleByAmsgradState]):
    """AMSGrad: Adam with the maximum of all means of squares so far.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ,   vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        wₜ = max(wₜ₋₁, v̂ₜ),   uₜ = m̂ₜ / (√(wₜ + ε_root) + ε)

    with m̂ₜ = mₜ / (1 − β₁ᵗ) and v̂ₜ = vₜ / (1 − β₂ᵗ). The paper does not correct the bias: there
    m̂ₜ = mₜ and v̂ₜ = vₜ. PyTorch takes the maximum of vₜ and corrects the bias of the maximum.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `bias_correction_mu`: whether to divide mₜ by 1 − β₁ᵗ.
    - `bias_correction_nu`: whether to divide vₜ by 1 − β₂ᵗ.

    ??? cite "Reddi, Kale & Kumar, [On the Convergence of Adam and
        Beyond](https://openreview.net/forum?id=ryQu7f-RZ), 2018"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field()
    bias_correction_mu: bool = eqx.field(default=True, static=True)
    bias_correction_nu: bool = eqx.field(default=True, static=True)

    def init(self, params: Params) -> ScaleByAmsgradState:
        return ScaleByAmsgradState(**self._fresh_moments(params), nu_max=tree.second_moment(params))

    def begin(self, state):
        self._correct_biases(state)
        one = jnp.ones(state.age.shape, self.b1.dtype)
        self.mu_scale = self.mu_scale if self.bias_correction_mu else one
        self.nu_scale = self.nu_scale if self.bias_correction_nu else one

    def advance(self, g, leaf):
        super().advance(g, leaf)
        leaf.nu_max = tree.running_maximum(leaf.nu_max, leaf.nu * self.nu_scale)

    def direction(self, g, leaf):
        divisor = tree.root(tree.positive(leaf.nu_max) + self.eps_root) + self.eps
        return leaf.mu * self.mu_scale / divisor


@advise_keywords
def amsgrad(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> AbstractTransform:
    """AMSGrad: Adam with the maximum of all means of squares so far.

        p ↦ p − η·m̂ₜ / (√wₜ + ε)   with   wₜ = max(wₜ₋₁, v̂ₜ)

    m̂ and v̂ are the means of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`, `bias_correction_mu`, `bias_correction_nu`: as in
        `ScaleByAmsgrad`.

    **Returns:** a chain of `ScaleByAmsgrad` and `ScaleByLearningRate`.

    ??? cite "Reddi, Kale & Kumar, [On the Convergence of Adam and
        Beyond](https://openreview.net/forum?id=ryQu7f-RZ), 2018"
    """
    corrections = bias_correction_mu, bias_correction_nu
    rule = ScaleByAmsgrad(b1, b2, eps, eps_root, mu_dtype, *corrections)
    return rule | ScaleByLearningRate(learning_rate)
