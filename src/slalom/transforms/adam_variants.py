"""Adam with another mean of squares, or another start: Belief, Yogi, RAdam."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Real

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.transform import AbstractTransform, Context
from .._types import Params, Scalar, Updates
from .adam import ScaleByAdamState, look_ahead


class ScaleByBelief(AbstractTransform):
    """AdaBelief: divides a mean of gradients by how far they are from it.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        sₜ = β₂·sₜ₋₁ + (1 − β₂)·|gₜ − mₜ|² + ε_root
        uₜ = m̂ₜ / (√ŝₜ + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   ŝₜ = sₜ / (1 − β₂ᵗ)

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added to s in every step, ≥ 0.
    - `nesterov`: whether to look ahead, as in `ScaleByAdam`.
    - `mu_dtype`: how m is stored; without it the parameter's own dtype, at least float32, since
        it is subtracted from a number of its own size.
    - `nu_dtype`: how s is stored; without it the parameter's own dtype, at least float32.

    ??? cite "Zhuang et al., [AdaBelief Optimizer](https://arxiv.org/abs/2010.07468), 2020"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-16, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(1e-16, within="[0, inf)")
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(
            age=tree.fresh_age(),
            mu=tree.zeros_like(params, tree.accumulation_dtype)
            if self.mu_dtype is None
            else tree.first_moment(params, self.mu_dtype),
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
        from_mu, from_g = look_ahead(now.b1, age, self.nesterov)

        def rule(g, mu, nu, b1, c1, b2, c2, eps, eps_root, from_mu, from_g, nu_scale):
            mu = b1 * mu + c1 * g
            # Added in this order: a last sum with one array in it would be taken along into what
            # reads ν, and the old ν, which that would read, copied by XLA.
            nu = b2 * nu + (c2 * tree.abs_squared(g - mu) + eps_root)
            ahead = from_mu * mu + from_g * g if self.nesterov else from_mu * mu
            return ahead / (tree.root(nu * nu_scale) + eps), mu, nu

        decays = (now.b1, tree.complement(now.b1), now.b2, tree.complement(now.b2))
        updates, mu, nu = tree.map_leaves(
            rule,
            (updates, state.mu, state.nu),
            (*decays, now.eps, now.eps_root),
            (from_mu, from_g, tree.bias_correction(now.b2, age)),
        )
        return updates, ScaleByAdamState(
            age, tree.cast_like(mu, state.mu), tree.cast_like(nu, state.nu)
        )


class ScaleByYogi(AbstractTransform):
    """Yogi: Adam whose mean of squares moves by additions, so that it falls slowly.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = vₜ₋₁ − (1 − β₂)·sign(vₜ₋₁ − |gₜ|²)·|gₜ|²
        uₜ = m̂ₜ / (√(v̂ₜ + ε_root) + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   v̂ₜ = vₜ / (1 − β₂ᵗ)

    Differs from Optax: there the mean m starts at `initial_accumulator_value` too, so that
    parameters move whose gradients are zero. Here it starts at 0, as in the paper.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, in [0, 1): 1 − β₂ is the size of the additions.
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `initial_accumulator_value`: v₀, ≥ 0.
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.
    - `nu_dtype`: how v is stored; without it the parameter's own dtype, at least float32.

    ??? cite "Zaheer et al., [Adaptive Methods for Nonconvex
        Optimization](https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization),
        2018"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-3, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    initial_accumulator_value: Hyperparameter = hyperparameter(1e-6, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdamState:
        start = self.at(Context(step=0)).initial_accumulator_value
        return ScaleByAdamState(
            age=tree.fresh_age(),
            mu=tree.first_moment(params, self.mu_dtype),
            nu=tree.second_moment(params, self.nu_dtype, start),
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

        def means(g, mu, nu, b1, c1, c2):
            square = tree.abs_squared(g)
            return b1 * mu + c1 * g, nu - c2 * jnp.sign(nu - square) * square

        def update(mu, nu, eps, eps_root, mu_scale, nu_scale):
            return mu * mu_scale / (tree.root(nu * nu_scale + eps_root) + eps)

        mu, nu = tree.map_leaves(
            means,
            (updates, state.mu, state.nu),
            (now.b1, tree.complement(now.b1), tree.complement(now.b2)),
            like=(state.mu, state.nu),
        )
        updates = tree.map_leaves(
            update,
            (mu, nu),
            (now.eps, now.eps_root),
            (tree.bias_correction(now.b1, age), tree.bias_correction(now.b2, age)),
        )
        return updates, ScaleByAdamState(age, mu, nu)


class ScaleByRadam(AbstractTransform):
    """RAdam: Adam that rectifies the variance of its early steps.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ,   vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        ρ∞ = 2 / (1 − β₂) − 1,   ρₜ = ρ∞ − 2t·β₂ᵗ / (1 − β₂ᵗ)
        rₜ = √((ρₜ − 4)(ρₜ − 2)·ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)·ρₜ))
        uₜ = rₜ·m̂ₜ / (√(v̂ₜ + ε_root) + ε)   where ρₜ ≥ threshold,   else   m̂ₜ

    with m̂ₜ = mₜ / (1 − β₁ᵗ) and v̂ₜ = vₜ / (1 − β₂ᵗ). In float32 the formula of ρₜ cancels and
    leaves two digits at the default β₂; here it is computed without cancelling.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `threshold`: from which ρₜ on to divide, ≥ 4.
    - `nesterov`: whether to look ahead, as in `ScaleByAdam`.
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.
    - `nu_dtype`: how v is stored; without it the parameter's own dtype, at least float32.

    ??? cite "Liu et al., [On the Variance of the Adaptive Learning Rate and
        Beyond](https://arxiv.org/abs/1908.03265), 2019"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    threshold: Hyperparameter = hyperparameter(5.0, within="[4, inf)")
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)
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
        from_mu, from_g = look_ahead(now.b1, age, self.nesterov)
        rho, limit = _degrees_of_freedom(now.b2, age)
        rectified = rho >= now.threshold
        # What is not used must be finite too: a derivative would multiply it by 0.
        rho = jnp.where(rectified, rho, 5)
        limit = jnp.where(rectified, limit, 5)
        scale = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)

        def means(g, mu, nu, b1, c1, b2, c2):
            return b1 * mu + c1 * g, b2 * nu + c2 * tree.abs_squared(g)

        def update(g, mu, nu, eps, eps_root, from_mu, from_g, nu_scale, rectified, scale):
            ahead = from_mu * mu + from_g * g if self.nesterov else from_mu * mu
            divided = scale / (tree.root(nu * nu_scale + eps_root) + eps)
            return ahead * jnp.where(rectified > 0, divided, 1)

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
            (
                from_mu,
                from_g,
                tree.bias_correction(now.b2, age),
                rectified.astype(rho.dtype),
                jnp.sqrt(scale),
            ),
        )
        return updates, ScaleByAdamState(age, mu, nu)


def _degrees_of_freedom(
    b2: Scalar, age: Int[Array, "*leaves"]
) -> tuple[Real[Array, "*leaves"], Scalar]:
    """RAdam's ρₜ and ρ∞.

    With x = −log β₂ and L(y) = coth y − 1/y it is ρₜ = L(x/2) + t·(1 − L(t·x/2)): the two great
    terms of the usual formula, which agree in all but their last digits, have left it.
    """
    t = age.astype(b2.dtype)
    x = -jnp.log1p(-tree.complement(b2))
    return _langevin(x / 2) + t * (1 - _langevin(t * x / 2)), 2 / tree.complement(b2) - 1


def _langevin(y: Real[Array, "*shape"]) -> Real[Array, "*shape"]:
    """coth y − 1/y for y ≥ 0."""
    small = y < 0.5
    near, far = jnp.where(small, y, 0), jnp.where(small, 1, y)
    square = jnp.square(near)
    series = jnp.zeros_like(near)
    for coefficient in reversed(_LANGEVIN):
        series = coefficient + square * series
    return jnp.where(small, near * series, 1 + 2 / jnp.expm1(2 * far) - 1 / far)


_LANGEVIN = (
    1 / 3,
    -1 / 45,
    2 / 945,
    -1 / 4725,
    2 / 93555,
    -1382 / 638512875,
    4 / 18243225,
    -3617 / 162820783125,
    87734 / 38979295480125,
    -349222 / 1531329465290625,
    310732 / 13447856940643125,
)
"""The Taylor coefficients of y, y³, y⁵, …: enough for double precision up to y = ½."""
