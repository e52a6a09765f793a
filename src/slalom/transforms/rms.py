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
from ..tree.means import moved
from ..tree.norms import quotient
from ._xla import written_after


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
    - `eps`: ε, ≥ 0. The quotient is 0 where the divisor is 0.
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
            nu = now.decay * nu + now.rest * tree.abs_squared(g)
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
    """The variance."""


class ScaleByStddev(AbstractTransform):
    """Centered RMSProp: divides updates by their running standard deviation.

        sₜ = γ·sₜ₋₁ + γ·(1 − γ)·|gₜ − mₜ₋₁|²
        mₜ = γ·mₜ₋₁ + (1 − γ)·gₜ
        uₜ = gₜ / √(sₜ + ε)             or, with `eps_in_sqrt=False`,   gₜ / (√sₜ + ε)

    s is the variance vₜ − |mₜ|² of the paper, where v is the mean of squares. With
    `bias_correction`, m and v are divided by 1 − γᵗ before their difference is taken, so the
    variance of the first gradient is 0 and the first update is gₜ / √ε or gₜ / ε. The state then
    has the corrected mean and variance.

    Differs from Optax, which computes v and m and their difference: for gradients that vary by a
    thousandth of their size, half of its updates are off by 5 % or more. In the first corrected
    step it divides by rounding errors.

    **Arguments:**

    - `decay`: γ, in [0, 1).
    - `eps`: ε, ≥ 0. The quotient is 0 where the divisor is 0.
    - `initial_scale`: s₀, ≥ 0.
    - `eps_in_sqrt`: whether to add ε under the root.
    - `bias_correction`: whether to divide mₜ and vₜ by 1 − γᵗ.
    - `mu_dtype`: the dtype in which m is stored. Defaults to the parameter's dtype, but at
        least float32, because gₜ − mₜ₋₁ cancels.
    - `nu_dtype`: the dtype in which s is stored. Defaults to the parameter's dtype, but at
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
        if age is None:
            now.weight = 1 - now.decay
            now.keep = now.decay
        else:
            now.weight = tree.newest_weight(now.decay, age)
            # 1 − weight without cancellation, and at age 1 the factor of the initial scale.
            before = tree.bias_correction(now.decay, jnp.maximum(age - 1, 1))
            now.keep = now.decay * tree.bias_correction(now.decay, age)
            now.keep = now.keep * jnp.where(age == 1, 1, 1 / before)
        now.spread = jnp.where(now.weight == 1, 0, now.keep * now.weight)

        def rule(now, g, mu, nu):
            nu = now.keep * nu + now.spread * tree.abs_squared(g - mu)
            # XLA would otherwise copy the old mean, which the variance reads.
            mu = written_after(moved(mu, g, now.weight), never=nu < 0)
            return _divide(g, nu, now.eps, self.eps_in_sqrt), mu, nu

        updates, mu, nu = tree.map_leaves(rule, (updates, state.mu, state.nu), now)
        return updates, ScaleByStddevState(
            age, tree.cast_like(mu, state.mu), tree.cast_like(nu, state.nu)
        )


def _divide(g: Array, square: Array, eps: Scalar, eps_in_sqrt: bool) -> Array:
    """g / √(square + ε), or g / (√square + ε); 0 where the divisor is 0."""
    if eps_in_sqrt:
        return quotient(g, tree.root(square + eps))
    return quotient(g, tree.root(square) + eps)
