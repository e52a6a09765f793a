"""Steps without a learning rate: DoWG, COCOB and D-Adaptation."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ...rules._base import AbstractRule, AbstractTransform, Context, advise_keywords, chain
from ...rules.rate_free._sums import (
    AbstractEstimatingAdam,
    AbstractEstimatingState,
    bounded,
    larger,
)
from ...rules.rate_free.step_sizes import AbstractByDistance
from ...rules.shaping.descent import ScaleByLearningRate, decayed, where_field
from ...tree.types import Hyperparameter, Params, Scalar, WhereLike
from ...where.resolve import Where


class ScaleByDowgState(eqx.Module):
    """The state of `ScaleByDowg`."""

    estim_sq_dist: Float[Array, ""] = fields.until_reset()
    weighted_sq_norm_grads: Float[Array, ""] = fields.until_reset()
    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class ScaleByDowg(AbstractByDistance[ScaleByDowgState]):
    """DoWG: the squared distance traveled over the root of a weighted sum of squared gradients.

        Dₜ = max(Dₜ₋₁, ‖pₜ − p₀‖²),   Vₜ = Vₜ₋₁ + Dₜ·‖gₜ‖²
        uₜ = Dₜ / (√Vₜ + ε) · gₜ

    The norms are those of all leaves together that this transform sees, so under `.partition` each
    group has its own step size. It replaces a learning rate:
    `sl.contrib.ScaleByDowg() | sl.Scale(-1.0)` descends.

    Sums are stored in at least float32, and p₀ in the parameter's own dtype, which is exact. The
    square of a huge norm stays finite, so later steps do not vanish.

    **Arguments:**

    - `init_estim_sq_dist`: D₋₁, a guess of the squared distance to the solution, > 0. Defaults to
        ε. It should be too small rather than too large.
    - `eps`: ε, > 0.

    ??? cite "Khaled, Mishchenko & Jin, [DoWG Unleashed](https://arxiv.org/abs/2305.16284), 2023"
    """

    init_estim_sq_dist: fields.OptionalNumber = fields.hyperparameter(None, within="(0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-4, within="(0, inf)")

    metric_fields: ClassVar[tuple[str, ...]] = ("estim_sq_dist",)

    def init(self, params: Params) -> ScaleByDowgState:
        tree.check_inexact(params)
        dtype = tree.sum_dtype(params)
        now = self.at(Context(step=0))
        first = now.eps if now.init_estim_sq_dist is None else now.init_estim_sq_dist
        return ScaleByDowgState(jnp.array(first, dtype), jnp.zeros((), dtype), tree.copy(params))

    def finish(self, sums, state):
        distance = state.estim_sq_dist = jnp.maximum(state.estim_sq_dist, bounded(sums["distance"]))
        total = tree.bounded(state.weighted_sq_norm_grads + distance * bounded(sums["square"]))
        state.weighted_sq_norm_grads = total
        self.factor = distance / (tree.root(total) + self.eps)

    def direction(self, g, leaf):
        return g * self.factor


@advise_keywords
def dowg(
    learning_rate: Hyperparameter = 1.0,
    init_estim_sq_dist: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-4,
    weight_decay: Hyperparameter | None = None,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """DoWG: the squared distance traveled over the root of a weighted sum of squared gradients.

        p ↦ p − η·D / (√V + ε)·g

    D is the squared distance traveled, and V the sum of D·‖g‖².

    With weight decay, g is the gradient plus λ·p.

    **Arguments:**

    - `learning_rate`: η, a factor of the step size; 1 in the paper.
    - `init_estim_sq_dist`, `eps`: as in `ScaleByDowg`.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `AddDecayedWeights`, if there is a decay, `ScaleByDowg` and
    `ScaleByLearningRate`.

    ??? cite "Khaled, Mishchenko & Jin, [DoWG Unleashed](https://arxiv.org/abs/2305.16284), 2023"
    """
    links = [] if weight_decay is None else [decayed(weight_decay, decay_where)]
    return chain(*links, ScaleByDowg(init_estim_sq_dist, eps), ScaleByLearningRate(learning_rate))


class ScaleByCocobState(eqx.Module):
    """The state of `ScaleByCocob`."""

    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")
    cumulative_gradients: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The sum of the negative gradients."""
    scale: PyTree[Float[Array, "..."]] = fields.param_like("exact")
    """The largest absolute gradient."""
    subgradients: PyTree[Float[Array, "..."]] = fields.param_like("exact")
    """The sum of the absolute gradients."""
    reward: PyTree[Float[Array, "..."]] = fields.param_like("exact")


class ScaleByCocob(AbstractRule[ScaleByCocobState]):
    """COCOB: each element bets on the sign of its next gradient; no learning rate.

        Lₜ = max(Lₜ₋₁, |gₜ|),   Gₜ = Gₜ₋₁ + |gₜ|,   θₜ = θₜ₋₁ − gₜ
        Rₜ = max(Rₜ₋₁ − gₜ·(p − p₀), 0)
        p + uₜ = p₀ + θₜ·(Lₜ + Rₜ) / (Lₜ·max(Gₜ + Lₜ, α·Lₜ))

    with L₀ = ε. The first steps have the size 1/α. This is Algorithm 2 of the paper,
    COCOB-Backprop. Use this as the last link: the updates already descend. Complex numbers bet as
    vectors: |g| is the absolute value and g·(p − p₀) the real part of the inner product.

    The sums are stored in at least float32, and p₀ in the parameter's own dtype, which is exact.

    Differs from Optax, where the sums are stored in the parameter's dtype: in bfloat16 they stop
    growing after a few hundred steps.

    **Arguments:**

    - `alpha`: α, > 0; a larger one makes the first steps smaller.
    - `eps`: ε, > 0, the scale of the gradients before the first one.

    ??? cite "Orabona & Tommasi, [Training Deep Networks without Learning Rates Through Coin
        Betting](https://arxiv.org/abs/1705.07795), 2017"
    """

    alpha: fields.Number = fields.hyperparameter(100.0, within="(0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="(0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    update_sign: ClassVar[int | None] = -1

    def init(self, params: Params) -> ScaleByCocobState:
        eps = self.at(Context(step=0)).eps
        return ScaleByCocobState(
            init_params=tree.copy(params),
            cumulative_gradients=tree.zeros_like(params, tree.accumulation_dtype),
            scale=tree.second_moment(params, value=eps),
            subgradients=tree.second_moment(params),
            reward=tree.second_moment(params),
        )

    def advance(self, g, leaf):
        size, change = jnp.abs(g), self.p - leaf.init_params
        gain = (jnp.conj(g) * change).real if jnp.iscomplexobj(g) else g * change
        leaf.cumulative_gradients = leaf.cumulative_gradients - g
        leaf.scale = jnp.maximum(leaf.scale, size)
        leaf.subgradients = leaf.subgradients + size
        # XLA would move a last maximum with 0 into `direction`, which would read the old one.
        leaf.reward = jnp.maximum(leaf.reward, gain) - gain

    def direction(self, g, leaf):
        bound = jnp.maximum(leaf.subgradients + leaf.scale, self.alpha * leaf.scale)
        wealth = (leaf.scale + leaf.reward) / bound
        return (leaf.init_params - self.p) + leaf.cumulative_gradients / leaf.scale * wealth


@advise_keywords
def cocob(
    learning_rate: Hyperparameter = 1.0,
    alpha: Hyperparameter = 100.0,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """COCOB: each element bets on the sign of its next gradient, without a learning rate.

        p ↦ p₀ + θ·(L + R) / (L·max(G + L, α·L))

    L is the largest |g| so far, G the sum of |g|, θ that of −g, and R the reward.

    With weight decay, the gradient is g plus λ·p.

    **Arguments:**

    - `learning_rate`: a factor of the gradients; 1 in the paper. The step size does not depend on
        it as long as ε is small compared with the gradients; a schedule weights them.
    - `alpha`, `eps`: as in `ScaleByCocob`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `AddDecayedWeights`, `ScaleByLearningRate` and `ScaleByCocob`.

    ??? cite "Orabona & Tommasi, [Training Deep Networks without Learning Rates Through Coin
        Betting](https://arxiv.org/abs/1705.07795), 2017"
    """
    rate = ScaleByLearningRate(learning_rate, flip_sign=False)
    return decayed(weight_decay, decay_where) | rate | ScaleByCocob(alpha, eps)


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
