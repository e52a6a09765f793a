"""Adam and its kin: a mean of gradients over the root of a mean of squares."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._fields import Hyperparameter, dtype_field, hyperparameter, param_like, per_leaf
from .._transform import AbstractTransform, Context
from .._types import Params, Updates


class ScaleByAdamState(eqx.Module):
    """What `ScaleByAdam` remembers."""

    age: Int[Array, "*leaves"] = per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like()


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
        # u = (from_mu·m + from_g·g) / …, both rules in one form.
        from_mu = tree.bias_correction(now.b1, age)
        from_g = jnp.zeros_like(from_mu)
        if self.nesterov:
            from_g = tree.complement(now.b1) * from_mu
            from_mu = now.b1 * tree.bias_correction(now.b1, tree.increment(age))

        def rule(g, mu, nu, b1, c1, b2, c2, eps, eps_root, from_mu, from_g, nu_scale):
            mu = b1 * mu + c1 * g
            nu = b2 * nu + c2 * tree.abs_squared(g)
            ahead = from_mu * mu + from_g * g if self.nesterov else from_mu * mu
            return ahead / (jnp.sqrt(nu * nu_scale + eps_root) + eps), mu, nu

        decays = (now.b1, tree.complement(now.b1), now.b2, tree.complement(now.b2))
        updates, mu, nu = tree.map_leaves(
            rule,
            (updates, state.mu, state.nu),
            (*decays, now.eps, now.eps_root),
            (from_mu, from_g, nu_scale),
        )
        return updates, ScaleByAdamState(
            age, tree.cast_like(mu, state.mu), tree.cast_like(nu, state.nu)
        )
