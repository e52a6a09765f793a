"""Adam that estimates its learning rate from the sum of its steps: D-Adaptation."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import fields, tree
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.messages import advise_keywords
from ...rules.rate_free._sums import (
    AbstractEstimatingAdam,
    AbstractEstimatingState,
    bounded,
    larger,
)
from ...rules.shaping.decay import where_field
from ...tree.types import Hyperparameter, Params, Scalar
from ...where.resolve import Where, WhereLike


class ScaleByDAdaptAdamState(AbstractEstimatingState):
    """The state of `ScaleByDAdaptAdam`."""


class ScaleByDAdaptAdam(AbstractEstimatingAdam[ScaleByDAdaptAdamState]):
    """D-Adaptation: Adam with a learning rate d that grows with the sum of its steps.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·η·gₜ   with   η = γ·d·√(1 − β₂ᵗ) / (1 − β₁ᵗ)
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        uₜ = −mₜ / (√vₜ + ε) − λ·η·p
        rₜ = √β₂·rₜ₋₁ + η·⟨gₜ, sₜ₋₁ / (√vₜ₋₁ + ε)⟩,   sₜ = √β₂·sₜ₋₁ + η·gₜ
        d ← max(d, rₜ / ‖sₜ‖₁)

    with d = d₀ at first. There is one d for all leaves that this transform sees, so under
    `.partition` each group has its own. It never decreases, and with ε = 0 it does not depend on
    the scale of the loss; `opt.metrics` has it as `estim_lr`. A reset of all parameters restarts
    it. Use this as the last link: it includes the learning rate and the sign.

    In the paper s and r have factors 1 − √β₂ and its square, which cancel in the quotient. rₜ
    divides by √vₜ₋₁ as in the authors' code.

    Differs from Optax: d and r are stored in at least float32 for half-precision parameters, where
    Optax stores them in the parameters' dtype. v and s are, too. A gradient that is zero everywhere
    in the first step changes nothing, where Optax makes d NaN.

    **Arguments:**

    - `learning_rate`: γ, ≥ 0. The authors recommend 1, with a schedule that decays it to 0.
    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `estim_lr0`: d₀, the initial estimate, > 0. It should be too small rather than too large.
    - `weight_decay`: λ, ≥ 0.
    - `bias_correction`: whether η has the factor √(1 − β₂ᵗ) / (1 − β₁ᵗ). Optax has it; the
        algorithm of the paper does not, and it is off by default in the authors' code.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Defazio & Mishchenko, [Learning-Rate-Free Learning by
        D-Adaptation](https://arxiv.org/abs/2301.07733), 2023"
    """

    learning_rate: fields.Number = fields.hyperparameter(1.0, within="[0, inf)")
    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    estim_lr0: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    bias_correction: bool = eqx.field(default=True, static=True, kw_only=True)
    decay_where: Where | None = where_field()
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByDAdaptAdamState:
        return ScaleByDAdaptAdamState(**self._fresh(params))

    def begin(self, state):
        state.age = tree.increment(state.age)
        self.c1, self.c2, self.root_b2 = 1 - self.b1, 1 - self.b2, tree.root(self.b2)
        self.rate = self.step_size(state.estim_lr, state.age)

    def measure(self, g, leaf):
        return {"product": self.rate * tree.inner(g, leaf.grad_sum / _divisor(self.eps, leaf.nu))}

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + self.c1 * (self.rate * g)
        leaf.nu = self.b2 * leaf.nu + self.c2 * tree.bounded_square(g)
        leaf.grad_sum = self.root_b2 * leaf.grad_sum + self.rate * g

    def reduce(self, g, leaf):
        return {"size": jnp.sum(jnp.abs(leaf.grad_sum))}

    def finish(self, sums, state):
        r = bounded(self.root_b2 * state.numerator_weighted + bounded(sums["product"]))
        state.numerator_weighted = r
        state.estim_lr = larger(state.estim_lr, r, bounded(sums["size"]))

    def direction(self, g, leaf):
        decay = self.weight_decay * self.p if self.plan else 0
        return -(leaf.mu / _divisor(self.eps, leaf.nu) + self.rate * decay)


def _divisor(eps: Scalar, nu: Array) -> Array:
    return tree.root(tree.positive(nu)) + eps


@advise_keywords
def dadapt_adamw(
    learning_rate: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    estim_lr0: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    bias_correction: bool = True,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """D-Adaptation: AdamW whose learning rate grows with the sum of its steps.

        p ↦ p − m / (√v + ε) − λ·γ·d·p

    m is a mean of γ·d·g, and d an estimate of the distance to the solution. `sl.prodigy` is its
    successor, which grows faster.

    **Arguments:**

    - `learning_rate`: γ. The authors recommend 1, with a schedule that decays it to 0.
    - `b1`, `b2`, `eps`, `estim_lr0`, `weight_decay`, `decay_where`, `bias_correction`, `mu_dtype`:
        as in `ScaleByDAdaptAdam`.

    **Returns:** a `ScaleByDAdaptAdam`.

    ??? cite "Defazio & Mishchenko, [Learning-Rate-Free Learning by
        D-Adaptation](https://arxiv.org/abs/2301.07733), 2023"
    """
    return ScaleByDAdaptAdam(
        learning_rate,
        b1,
        b2,
        eps,
        estim_lr0,
        weight_decay,
        bias_correction=bias_correction,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )
