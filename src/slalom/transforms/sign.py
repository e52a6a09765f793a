"""Transforms that keep the sign and set the size themselves."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import AbstractTransform, Context
from .._types import Params, Updates


class ScaleByLionState(eqx.Module):
    """What `ScaleByLion` remembers."""

    mu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByLion(AbstractTransform):
    """Lion: the sign of an interpolation between momentum and gradient.

        uₜ = sign(cₜ)   with   cₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        mₜ = β₂·mₜ₋₁ + (1 − β₂)·gₜ

    Near zero the sign can be replaced: with `mode="smooth"` it is uₜ = tanh(s·cₜ), and with
    `mode="refined"` uₜ = cₜ where |cₜ| < 1. For complex leaves the sign is z / |z|, and these
    replace its absolute value.

    **Arguments:**

    - `b1`: β₁, the share of the momentum in the update, in [0, 1).
    - `b2`: β₂, the decay of the momentum, in (0, 1).
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.
    - `mode`: `"hard"`, `"smooth"` or `"refined"`.
    - `smooth_beta`: s, > 0; used by `"smooth"` only.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.99, within="(0, 1)")
    mu_dtype: np.dtype | None = dtype_field()
    mode: str = eqx.field(default="hard", static=True, kw_only=True)
    smooth_beta: Hyperparameter = hyperparameter(1.0, within="(0, inf)", kw_only=True)

    def __check_init__(self):
        if self.mode not in ("hard", "smooth", "refined"):
            raise ValueError(
                f"ScaleByLion.mode must be 'hard', 'smooth' or 'refined', got {self.mode!r}."
            )

    elementwise: ClassVar[bool] = True

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

        def mean(g, mu, b2, c2):
            return b2 * mu + c2 * g

        def update(g, mu, from_mu, from_g, smooth_beta):
            return self._sign(from_mu * mu + from_g * g, smooth_beta)

        mu = tree.map_leaves(
            mean, (updates, state.mu), (now.b2, tree.complement(now.b2)), like=(state.mu,)
        )
        updates = tree.map_leaves(update, (updates, mu), (from_mu, 1 - from_mu, now.smooth_beta))
        return updates, ScaleByLionState(mu)

    def _sign(self, c: Array, smooth_beta: Array) -> Array:
        if self.mode == "hard":
            return jnp.sign(c)
        if self.mode == "refined":
            return c / jnp.maximum(jnp.abs(c), 1)
        if jnp.iscomplexobj(c):
            return jnp.sign(c) * jnp.tanh(smooth_beta * jnp.abs(c))
        return jnp.tanh(smooth_beta * c)


class ScaleBySign(AbstractStatelessTransform):
    """Keeps the sign only: u ↦ sign(u), which for complex leaves is u / |u|; 0 stays 0.

    ??? cite "Bernstein et al., [signSGD](https://arxiv.org/abs/1802.04434), 2018"
    """

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params, context
        return tree.map_leaves(jnp.sign, (updates,))
