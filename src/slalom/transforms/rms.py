"""RMSProp: division by a running root mean square."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform
from .._types import Params, Scalar, Updates


class ScaleByRmsState(eqx.Module):
    """The state of `ScaleByRms`."""

    age: Int[Array, "*leaves"] | None = per_leaf()
    """`None` unless `bias_correction` is set."""
    nu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByRms(AbstractTransform):
    """RMSProp: divides updates by the root of a mean of their squares.

        vₜ = γ·vₜ₋₁ + (1 − γ)·|gₜ|²
        uₜ = gₜ / √(vₜ + ε)             or, with `eps_in_sqrt=False`,   gₜ / (√vₜ + ε)

    **Arguments:**

    - `decay`: γ, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `initial_scale`: v₀, ≥ 0.
    - `eps_in_sqrt`: whether to add ε under the root.
    - `bias_correction`: whether to divide vₜ by 1 − γᵗ.
    - `nu_dtype`: the dtype in which v is stored. Defaults to the parameter's dtype, but at
        least float32.

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
            age=tree.fresh_count() if self.bias_correction else None,
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
        now.rest = 1 - now.decay
        now.debias = None if age is None else tree.bias_correction(now.decay, age)

        def rule(now, g, nu):
            nu = now.decay * nu + now.rest * tree.bounded_square(g)
            debiased = nu if now.debias is None else nu * now.debias
            return _divide(g, debiased, now.eps, self.eps_in_sqrt), nu

        updates, nu = tree.map_leaves(rule, (updates, state.nu), now)
        return updates, ScaleByRmsState(age, tree.cast_like(nu, state.nu))


class ScaleByStddevState(eqx.Module):
    """The state of `ScaleByStddev`."""

    age: Int[Array, "*leaves"] | None = per_leaf()
    """`None` unless `bias_correction` is set."""
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByStddev(AbstractTransform):
    """Centered RMSProp: divides updates by their running standard deviation.

        mₜ = γ·mₜ₋₁ + (1 − γ)·gₜ,   vₜ = γ·vₜ₋₁ + (1 − γ)·|gₜ|²
        uₜ = gₜ / √(vₜ − |mₜ|² + ε)     or, with `eps_in_sqrt=False`,   gₜ / (√(vₜ − |mₜ|²) + ε)

    vₜ − |mₜ|² is a variance; if rounding makes it negative, it counts as 0.

    **Arguments:**

    - `decay`: γ, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `initial_scale`: v₀, ≥ 0.
    - `eps_in_sqrt`: whether to add ε under the root.
    - `bias_correction`: whether to divide mₜ and vₜ by 1 − γᵗ.
    - `mu_dtype`: the dtype in which m is stored. Defaults to the parameter's dtype, but at
        least float32, because vₜ − |mₜ|² cancels.
    - `nu_dtype`: the dtype in which v is stored. Defaults to the parameter's dtype, but at
        least float32.

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
            age=tree.fresh_count() if self.bias_correction else None,
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
        now.rest = 1 - now.decay
        now.debias = None if age is None else tree.bias_correction(now.decay, age)

        def rule(now, g, mu, nu):
            mu = now.decay * mu + now.rest * g
            nu = now.decay * nu + now.rest * tree.bounded_square(g)
            mean, square = mu, nu
            if now.debias is not None:
                mean, square = now.debias * mu, now.debias * nu
            variance = jnp.maximum(square - tree.abs_squared(mean), 0)
            return _divide(g, variance, now.eps, self.eps_in_sqrt), mu, nu

        updates, mu, nu = tree.map_leaves(rule, (updates, state.mu, state.nu), now)
        return updates, ScaleByStddevState(
            age, tree.cast_like(mu, state.mu), tree.cast_like(nu, state.nu)
        )


def _divide(g: Array, square: Array, eps: Scalar, eps_in_sqrt: bool) -> Array:
    """g / √(square + ε), or g / (√square + ε)."""
    square = tree.positive(square)
    if eps_in_sqrt:
        return g / tree.root(square + eps)
    return g / (tree.root(square) + eps)
