"""Transforms that give each number its own step size."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from .. import _tree as tree
from .._fields import Hyperparameter, dtype_field, hyperparameter, param_like, per_leaf
from .._transform import AbstractTransform, Context
from .._types import Params, Updates


class ScaleByAdamState(eqx.Module):
    """What `ScaleByAdam` remembers."""

    age: Int[Array, " leaves"] = per_leaf()
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
            age=tree.fresh_age(params),
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


class ScaleByLionState(eqx.Module):
    """What `ScaleByLion` remembers."""

    mu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByLion(AbstractTransform):
    """Lion: the sign of an interpolation between momentum and gradient.

        uₜ = sign(β₁·mₜ₋₁ + (1 − β₁)·gₜ)
        mₜ = β₂·mₜ₋₁ + (1 − β₂)·gₜ

    For complex leaves the sign is z / |z|.

    **Arguments:**

    - `b1`: β₁, the share of the momentum in the update, in [0, 1).
    - `b2`: β₂, the decay of the momentum, in (0, 1).
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.99, within="(0, 1)")
    mu_dtype: np.dtype | None = dtype_field()

    def init(self, params: Params) -> ScaleByLionState:
        return ScaleByLionState(mu=tree.first_moment(params, self.mu_dtype))

    def update(
        self,
        updates: Updates,
        state: ScaleByLionState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByLionState]:
        del params
        now = self.at(context)
        # sign(β₁·m + (1−β₁)·g) in terms of the new momentum m': read after m' is written, the
        # old one would be copied by XLA, at 2.7 times the time. It is why β₂ = 0 is excluded.
        from_mu = now.b1 / now.b2

        def rule(g, mu, b2, c2, from_mu, from_g):
            mu = b2 * mu + c2 * g
            return jnp.sign(from_mu * mu + from_g * g), mu

        updates, mu = tree.map_leaves(
            rule,
            (updates, state.mu),
            (now.b2, tree.complement(now.b2), from_mu, 1 - from_mu),
        )
        return updates, ScaleByLionState(tree.cast_like(mu, state.mu))


class ScaleByRmsState(eqx.Module):
    """What `ScaleByRms` remembers."""

    age: Int[Array, " leaves"] | None = per_leaf()
    """Only with `bias_correction`."""
    nu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByRms(AbstractTransform):
    """RMSProp: divides updates by the root of a mean of their squares.

        vₜ = γ·vₜ₋₁ + (1 − γ)·|gₜ|²
        uₜ = gₜ / √(vₜ + ε)             or, with `eps_in_sqrt=False`,   gₜ / (√vₜ + ε)

    **Arguments:**

    - `decay`: γ, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `initial_scale`: v₀, ≥ 0.
    - `eps_in_sqrt`: whether ε stands under the root.
    - `bias_correction`: whether to divide vₜ by 1 − γᵗ.
    - `nu_dtype`: how v is stored; without it the parameter's own dtype, at least float32.

    ??? cite "Tieleman & Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012"
    """

    decay: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    initial_scale: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    eps_in_sqrt: bool = eqx.field(default=True, static=True)
    bias_correction: bool = eqx.field(default=False, static=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByRmsState:
        return ScaleByRmsState(
            age=tree.fresh_age(params) if self.bias_correction else None,
            nu=tree.second_moment(params, self.nu_dtype, self.at(Context(step=0)).initial_scale),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByRmsState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByRmsState]:
        del params
        now = self.at(context)
        age = None if state.age is None else tree.increment(state.age)
        scales = () if age is None else (tree.bias_correction(now.decay, age),)

        def rule(g, nu, decay, rest, eps, *scales):
            nu = decay * nu + rest * tree.abs_squared(g)
            debiased = math.prod(scales, start=nu)
            if self.eps_in_sqrt:
                return g / jnp.sqrt(debiased + eps), nu
            return g / (jnp.sqrt(debiased) + eps), nu

        updates, nu = tree.map_leaves(
            rule,
            (updates, state.nu),
            (now.decay, tree.complement(now.decay), now.eps),
            scales,
        )
        return updates, ScaleByRmsState(age, tree.cast_like(nu, state.nu))


class ScaleByStddevState(eqx.Module):
    """What `ScaleByStddev` remembers."""

    age: Int[Array, " leaves"] | None = per_leaf()
    """Only with `bias_correction`."""
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByStddev(AbstractTransform):
    """Centered RMSProp: divides updates by their running standard deviation.

        mₜ = γ·mₜ₋₁ + (1 − γ)·gₜ,   vₜ = γ·vₜ₋₁ + (1 − γ)·|gₜ|²
        uₜ = gₜ / √(vₜ − |mₜ|² + ε)     or, with `eps_in_sqrt=False`,   gₜ / (√(vₜ − |mₜ|²) + ε)

    vₜ − |mₜ|² is a variance; where rounding makes it negative it counts as 0.

    **Arguments:**

    - `decay`: γ, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `initial_scale`: v₀, ≥ 0.
    - `eps_in_sqrt`: whether ε stands under the root.
    - `bias_correction`: whether to divide mₜ and vₜ by 1 − γᵗ.
    - `mu_dtype`: how m is stored; without it the parameter's own dtype, at least float32, since
        it is subtracted from a number of its own size.
    - `nu_dtype`: how v is stored; without it the parameter's own dtype, at least float32.

    ??? cite "Graves, [Generating Sequences With Recurrent Neural
        Networks](https://arxiv.org/abs/1308.0850), 2013"
    """

    decay: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    initial_scale: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    eps_in_sqrt: bool = eqx.field(default=True, static=True)
    bias_correction: bool = eqx.field(default=False, static=True)
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByStddevState:
        return ScaleByStddevState(
            age=tree.fresh_age(params) if self.bias_correction else None,
            mu=tree.zeros_like(params, tree.accumulation_dtype)
            if self.mu_dtype is None
            else tree.first_moment(params, self.mu_dtype),
            nu=tree.second_moment(params, self.nu_dtype, self.at(Context(step=0)).initial_scale),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByStddevState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByStddevState]:
        del params
        now = self.at(context)
        age = None if state.age is None else tree.increment(state.age)
        scales = () if age is None else (tree.bias_correction(now.decay, age),)

        def rule(g, mu, nu, decay, rest, eps, *scales):
            mu = decay * mu + rest * g
            nu = decay * nu + rest * tree.abs_squared(g)
            mean, square = mu, nu
            for scale in scales:
                mean, square = scale * mean, scale * square
            variance = jnp.maximum(square - tree.abs_squared(mean), 0)
            if self.eps_in_sqrt:
                return g / jnp.sqrt(variance + eps), mu, nu
            return g / (jnp.sqrt(variance) + eps), mu, nu

        updates, mu, nu = tree.map_leaves(
            rule,
            (updates, state.mu, state.nu),
            (now.decay, tree.complement(now.decay), now.eps),
            scales,
        )
        return updates, ScaleByStddevState(
            age, tree.cast_like(mu, state.mu), tree.cast_like(nu, state.nu)
        )
