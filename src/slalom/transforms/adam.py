"""Adam and its kin: a mean of gradients over the root of a mean of squares."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree, Real

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform, Context
from .._types import Params, Scalar, Updates


class ScaleByAdamState(eqx.Module):
    """What `ScaleByAdam` and its kin remember."""

    age: Int[Array, "*leaves"] = per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like()


def look_ahead(
    b1: Scalar, age: Int[Array, "*leaves"], nesterov: bool
) -> tuple[Real[Array, "*leaves"], Real[Array, "*leaves"]]:
    """The factors of m and of g in m̂ = from_mu·m + from_g·g, with and without Nesterov."""
    from_mu = tree.bias_correction(b1, age)
    if not nesterov:
        return from_mu, jnp.zeros_like(from_mu)
    return b1 * tree.bias_correction(b1, tree.increment(age)), tree.complement(b1) * from_mu


class ScaleByAdam(AbstractTransform):
    """Adam: divides a mean of gradients by the root of a mean of their squares.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        uₜ = m̂ₜ / (√(v̂ₜ + ε_root) + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   v̂ₜ = vₜ / (1 − β₂ᵗ)

    With `nesterov` m̂ₜ is β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ). The power t is the age
    of a leaf's own accumulators, so leaves that are reset mid-run are corrected from zero.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0; keeps the derivative of the update finite
        at zero gradients, for meta-learning.
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.
    - `nesterov`: whether to look ahead.
    - `nu_dtype`: how v is stored; without it the parameter's own, at least float32.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014; Dozat, Nesterov
        momentum into Adam, 2016"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(
            age=tree.fresh_age(),
            mu=tree.first_moment(params, self.mu_dtype),
            nu=tree.second_moment(params, self.nu_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByAdamState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByAdamState]:
        del params
        now = self.at(context)
        age = tree.increment(state.age)
        nu_scale = tree.bias_correction(now.b2, age)
        from_mu, from_g = look_ahead(now.b1, age, self.nesterov)

        def means(g, mu, nu, b1, c1, b2, c2):
            return b1 * mu + c1 * g, b2 * nu + c2 * tree.abs_squared(g)

        def update(g, mu, nu, eps, eps_root, from_mu, from_g, nu_scale):
            ahead = from_mu * mu + from_g * g if self.nesterov else from_mu * mu
            return ahead / (tree.root(nu * nu_scale + eps_root) + eps)

        mu, nu = tree.map_leaves(
            means,
            (updates, state.mu, state.nu),
            (now.b1, tree.complement(now.b1), now.b2, tree.complement(now.b2)),
            like=(state.mu, state.nu),
        )
        updates = tree.map_leaves(
            update,
            (updates, mu, nu),
            (now.eps, now.eps_root),
            (from_mu, from_g, nu_scale),
        )
        return updates, ScaleByAdamState(age, mu, nu)


class ScaleByAmsgradState(eqx.Module):
    """What `ScaleByAmsgrad` remembers."""

    age: Int[Array, "*leaves"] = per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like()
    nu_max: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByAmsgrad(AbstractTransform):
    """AMSGrad: Adam that divides by the root of the greatest mean of squares so far.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ,   vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        wₜ = max(wₜ₋₁, v̂ₜ),   uₜ = m̂ₜ / (√(wₜ + ε_root) + ε)

    m̂ₜ = mₜ / (1 − β₁ᵗ) and v̂ₜ = vₜ / (1 − β₂ᵗ), or mₜ and vₜ themselves, as the paper has them,
    without the corrections. PyTorch takes the maximum of vₜ and corrects that instead.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.
    - `bias_correction_mu`: whether to divide mₜ by 1 − β₁ᵗ.
    - `bias_correction_nu`: whether to divide vₜ by 1 − β₂ᵗ.
    - `nu_dtype`: how v and w are stored; without it the parameter's own, at least float32.

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
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAmsgradState:
        return ScaleByAmsgradState(
            age=tree.fresh_age(),
            mu=tree.first_moment(params, self.mu_dtype),
            nu=tree.second_moment(params, self.nu_dtype),
            nu_max=tree.second_moment(params, self.nu_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByAmsgradState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByAmsgradState]:
        del params
        now = self.at(context)
        age = tree.increment(state.age)
        ones = jnp.ones(age.shape, now.b1.dtype)

        mu_scale = tree.bias_correction(now.b1, age) if self.bias_correction_mu else ones
        nu_scale = tree.bias_correction(now.b2, age) if self.bias_correction_nu else ones

        def means(g, mu, nu, nu_max, b1, c1, b2, c2, nu_scale):
            nu = b2 * nu + c2 * tree.abs_squared(g)
            return b1 * mu + c1 * g, nu, jnp.maximum(nu_max, nu * nu_scale)

        def update(mu, nu_max, eps, eps_root, mu_scale):
            return mu * mu_scale / (tree.root(nu_max + eps_root) + eps)

        mu, nu, nu_max = tree.map_leaves(
            means,
            (updates, state.mu, state.nu, state.nu_max),
            (now.b1, tree.complement(now.b1), now.b2, tree.complement(now.b2)),
            (nu_scale,),
            like=(state.mu, state.nu, state.nu_max),
        )
        updates = tree.map_leaves(update, (mu, nu_max), (now.eps, now.eps_root), (mu_scale,))
        return updates, ScaleByAmsgradState(age, mu, nu, nu_max)


class ScaleByAdamax(AbstractTransform):
    """Adamax: divides a mean of gradients by their decaying maximum.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = max(β₂·vₜ₋₁, |gₜ| + ε)
        uₜ = mₜ / ((1 − β₁ᵗ)·vₜ)

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the maximum, in [0, 1).
    - `eps`: ε, > 0: nothing else keeps v from zero.
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.
    - `nu_dtype`: how v is stored; without it the parameter's own, at least float32.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="(0, inf)")
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(
            age=tree.fresh_age(),
            mu=tree.first_moment(params, self.mu_dtype),
            nu=tree.second_moment(params, self.nu_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByAdamState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByAdamState]:
        del params
        now = self.at(context)
        age = tree.increment(state.age)

        def means(g, mu, nu, b1, c1, b2, eps):
            return b1 * mu + c1 * g, jnp.maximum(b2 * nu, jnp.abs(g) + eps)

        def update(mu, nu, mu_scale):
            return mu * mu_scale / nu

        mu, nu = tree.map_leaves(
            means,
            (updates, state.mu, state.nu),
            (now.b1, tree.complement(now.b1), now.b2, now.eps),
            like=(state.mu, state.nu),
        )
        scales = (tree.bias_correction(now.b1, age),)
        return tree.map_leaves(update, (mu, nu), (), scales), ScaleByAdamState(age, mu, nu)
