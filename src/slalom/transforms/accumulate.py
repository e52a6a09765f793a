"""Transforms that divide by what has accumulated, and set the size of a step themselves."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like
from .._core.transform import AbstractTransform, Context
from .._types import Params, Updates


class ScaleByRssState(eqx.Module):
    """What `ScaleByRss` remembers."""

    sum_of_squares: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByRss(AbstractTransform):
    """Adagrad: divides updates by the root of the sum of all their squares.

        sₜ = sₜ₋₁ + |gₜ|²
        uₜ = gₜ / √(sₜ + ε)   where sₜ > 0,   else   0

    **Arguments:**

    - `initial_accumulator_value`: s₀, ≥ 0.
    - `eps`: ε, ≥ 0.
    - `accumulator_dtype`: how s is stored; without it the parameter's own dtype, at least
        float32.

    ??? cite "Duchi, Hazan & Singer, [Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization](https://jmlr.org/papers/v12/duchi11a.html), 2011"
    """

    initial_accumulator_value: Hyperparameter = hyperparameter(0.1, within="[0, inf)")
    eps: Hyperparameter = hyperparameter(1e-7, within="[0, inf)")
    accumulator_dtype: np.dtype | None = dtype_field(kw_only=True)

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByRssState:
        start = self.at(Context(step=0)).initial_accumulator_value
        return ScaleByRssState(tree.second_moment(params, self.accumulator_dtype, start))

    def update(
        self,
        updates: Updates,
        state: ScaleByRssState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByRssState]:
        del params

        def rule(g, total, eps):
            total = total + tree.abs_squared(g)
            return g * jnp.where(total == 0, 0, jax.lax.rsqrt(total + eps)), total

        updates, total = tree.map_leaves(
            rule, (updates, state.sum_of_squares), (self.at(context).eps,)
        )
        return updates, ScaleByRssState(tree.cast_like(total, state.sum_of_squares))


class ScaleByAdadeltaState(eqx.Module):
    """What `ScaleByAdadelta` remembers."""

    e_g: PyTree[Inexact[Array, "..."]] = param_like()
    e_x: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByAdadelta(AbstractTransform):
    """Adadelta: gives updates the size that updates had before.

        vₜ = ρ·vₜ₋₁ + (1 − ρ)·|gₜ|²
        uₜ = √(xₜ₋₁ + ε) / √(vₜ + ε) · gₜ
        xₜ = ρ·xₜ₋₁ + (1 − ρ)·|uₜ|²

    **Arguments:**

    - `rho`: ρ, the decay of both means of squares, in [0, 1).
    - `eps`: ε, > 0: without it the first update is zero, and so are all others.
    - `accumulator_dtype`: how v and x are stored; without it the parameter's own dtype, at least
        float32.

    ??? cite "Zeiler, [ADADELTA](https://arxiv.org/abs/1212.5701), 2012"
    """

    rho: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-6, within="(0, inf)")
    accumulator_dtype: np.dtype | None = dtype_field(kw_only=True)

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(
            e_g=tree.second_moment(params, self.accumulator_dtype),
            e_x=tree.second_moment(params, self.accumulator_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByAdadeltaState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByAdadeltaState]:
        del params
        now = self.at(context)

        def rule(g, e_g, e_x, rho, rest, eps):
            square = tree.abs_squared(g)
            e_g = rho * e_g + rest * square
            e_x = rho * e_x + rest * ((e_x + eps) / (e_g + eps) * square)
            # u in terms of the new xₜ: read after xₜ is written, xₜ₋₁ would be copied by XLA.
            # x = ρ·xₜ₋₁ + (1 − ρ)·q·(xₜ₋₁ + ε) with q = |g|² / (v + ε), solved for xₜ₋₁ + ε.
            divisor = rho * (e_g + eps) + rest * square
            ratio = jnp.sqrt((e_x + rho * eps) / jnp.where(divisor > 0, divisor, 1))
            return ratio * g, e_g, e_x

        updates, e_g, e_x = tree.map_leaves(
            rule,
            (updates, state.e_g, state.e_x),
            (now.rho, tree.complement(now.rho), now.eps),
        )
        return updates, ScaleByAdadeltaState(
            tree.cast_like(e_g, state.e_g), tree.cast_like(e_x, state.e_x)
        )
