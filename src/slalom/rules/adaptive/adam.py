"""Adam, AMSGrad and Adamax: a mean of gradients over the root of a mean of squares."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import tree
from ..._core.fields.declare import Hyperparameter, dtype_field, hyperparameter
from ..._core.protocol.rule import AbstractRule
from ..._core.state.marks import param_like, per_leaf
from ...tree.types import Params
from ..momentum._first_moment import first_moment
from ._adam import (
    AbstractAdam,
    ScaleByAdamState as ScaleByAdamState,
    begin_adam,
    debiased_mean,
)


class ScaleByAdam(AbstractAdam):
    """Adam: divides a mean of gradients by the root of a mean of their squares.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        uₜ = m̂ₜ / (√(v̂ₜ + ε_root) + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   v̂ₜ = vₜ / (1 − β₂ᵗ)

    With `nesterov`, m̂ₜ is β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ). Each leaf counts t from
    the start of its own accumulators, so the correction is also right after a reset.

    Differs from Optax: `mu_dtype` is a floating dtype even for complex parameters, whose m is
    stored in its complex counterpart (complex64 for half precision). Complex dtypes are refused.
    With ε = 0 the update of a zero gradient is 0, not NaN.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0. A positive value keeps the derivative of the
        update finite at zero gradients, for meta-learning.
    - `mu_dtype`: the floating dtype in which m is stored; complex parameters use its complex
        counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters. In
        bfloat16 decays above 0.996 are refused.
    - `nesterov`: whether to use Nesterov momentum.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014; Dozat, Nesterov
        momentum into Adam, 2016"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)

    def begin(self, now, state):
        begin_adam(now, state, self.nesterov)

    def advance(self, now, g, leaf):
        leaf.mu = now.b1 * leaf.mu + now.c1 * g
        leaf.nu = now.b2 * leaf.nu + now.c2 * tree.bounded_square(g)

    def direction(self, now, g, leaf):
        divisor = tree.root(tree.positive(leaf.nu) * now.nu_scale + now.eps_root) + now.eps
        return debiased_mean(now, g, leaf.mu) / divisor


class ScaleByAmsgradState(eqx.Module):
    """The state of `ScaleByAmsgrad`."""

    age: Int[Array, "*leaves"] = per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")
    nu_max: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")


class ScaleByAmsgrad(AbstractRule[ScaleByAmsgradState]):
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

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field()
    bias_correction_mu: bool = eqx.field(default=True, static=True)
    bias_correction_nu: bool = eqx.field(default=True, static=True)

    def init(self, params: Params) -> ScaleByAmsgradState:
        return ScaleByAmsgradState(
            age=tree.fresh_count(),
            mu=first_moment(self, params, "b1"),
            nu=tree.second_moment(params),
            nu_max=tree.second_moment(params),
        )

    def begin(self, now, state):
        age = state.age = tree.increment(state.age)
        now.c1, now.c2 = 1 - now.b1, 1 - now.b2
        one = jnp.ones(age.shape, now.b1.dtype)
        now.mu_scale = tree.bias_correction(now.b1, age) if self.bias_correction_mu else one
        now.nu_scale = tree.bias_correction(now.b2, age) if self.bias_correction_nu else one

    def advance(self, now, g, leaf):
        leaf.mu = now.b1 * leaf.mu + now.c1 * g
        leaf.nu = now.b2 * leaf.nu + now.c2 * tree.bounded_square(g)
        leaf.nu_max = jnp.maximum(leaf.nu_max, leaf.nu * now.nu_scale)

    def direction(self, now, g, leaf):
        divisor = tree.root(tree.positive(leaf.nu_max) + now.eps_root) + now.eps
        return leaf.mu * now.mu_scale / divisor


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

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="(0, inf)")
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)

    def begin(self, now, state):
        age = state.age = tree.increment(state.age)
        now.c1 = 1 - now.b1
        now.mu_scale = tree.bias_correction(now.b1, age)

    def advance(self, now, g, leaf):
        leaf.mu = now.b1 * leaf.mu + now.c1 * g
        leaf.nu = jnp.maximum(now.b2 * leaf.nu, jnp.abs(g) + now.eps)

    def direction(self, now, g, leaf):
        return leaf.mu * now.mu_scale / leaf.nu
