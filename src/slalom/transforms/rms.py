"""Transforms that divide by a running root mean square, without a mean of gradients."""

import math
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform, Context
from .._types import Params, Updates


class ScaleByRmsState(eqx.Module):
    """What `ScaleByRms` remembers."""

    age: Int[Array, "*leaves"] | None = per_leaf()
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

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByRmsState:
        return ScaleByRmsState(
            age=tree.fresh_age() if self.bias_correction else None,
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
                return g / tree.root(debiased + eps), nu
            return g / (tree.root(debiased) + eps), nu

        updates, nu = tree.map_leaves(
            rule,
            (updates, state.nu),
            (now.decay, tree.complement(now.decay), now.eps),
            scales,
        )
        return updates, ScaleByRmsState(age, tree.cast_like(nu, state.nu))


class ScaleByStddevState(eqx.Module):
    """What `ScaleByStddev` remembers."""

    age: Int[Array, "*leaves"] | None = per_leaf()
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

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByStddevState:
        return ScaleByStddevState(
            age=tree.fresh_age() if self.bias_correction else None,
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
                return g / tree.root(variance + eps), mu, nu
            return g / (tree.root(variance) + eps), mu, nu

        updates, mu, nu = tree.map_leaves(
            rule,
            (updates, state.mu, state.nu),
            (now.decay, tree.complement(now.decay), now.eps),
            scales,
        )
        return updates, ScaleByStddevState(
            age, tree.cast_like(mu, state.mu), tree.cast_like(nu, state.nu)
        )
