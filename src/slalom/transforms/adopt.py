"""Adam that divides before it averages, by the mean of the squares so far: ADOPT."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Real

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.transform import AbstractTransform
from .._types import Params, Updates
from ._adam import ScaleByAdamState
from ._first_moment import first_moment
from ._xla import written_after


def _fourth_root(step: Real[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """n^¼."""
    return jnp.sqrt(jnp.sqrt(step))


class ScaleByAdopt(AbstractTransform[ScaleByAdamState]):
    """ADOPT: momentum of gradients that are divided by the root of the squares before them.

        nₜ = clip(gₜ / max(√vₜ₋₁, ε), −cₜ, cₜ),   n₁ = 0
        mₜ = β₁·mₜ₋₁ + (1 − β₁)·nₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²,   v₁ = |g₁|²
        uₜ = mₜ,   or, with `nesterov`,   uₜ = β₁·mₜ + (1 − β₁)·nₜ

    with cₜ = (t − 1)^¼. The first step only measures the squares: its update is 0. Since vₜ₋₁ does
    not depend on gₜ, ADOPT converges with any β₂. The norm of a complex number is clipped.

    The authors' code counts t like this; `pytorch-optimizer` has cₜ = t^¼.

    **Arguments:**

    - `b1`: β₁, the decay of the momentum, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, the least divisor, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `nesterov`: whether to use Nesterov momentum.
    - `use_clipping`: whether to clip n. The paper recommends it.
    - `clip_value_fn`: a function of t − 1, a floating array, that returns cₜ. Defaults to its
        fourth root.
    - `nu_dtype`: the dtype in which v is stored, which is real also for complex parameters.
        Defaults to the parameter's dtype, but at least float32.

    ??? cite "Taniguchi et al., [ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal
        Rate](https://arxiv.org/abs/2411.02853), 2024"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.9999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-6, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)
    use_clipping: bool = eqx.field(default=True, static=True, kw_only=True)
    clip_value_fn: Callable[[Any], Any] = eqx.field(default=_fourth_root, static=True, kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdamState:
        return ScaleByAdamState(
            age=tree.fresh_count(),
            mu=first_moment(self, params, "b1"),
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
        now.first = state.age == 0
        now.c1 = 1 - now.b1
        now.keep = jnp.where(now.first, 0, now.b2)
        now.c2 = 1 - now.keep
        if self.use_clipping:
            limit = self.clip_value_fn(jnp.asarray(state.age, now.b1.dtype))
            now.limit = jnp.asarray(limit, now.b1.dtype)

        def moments(now, g, mu, nu):
            mu = now.b1 * mu + now.c1 * self._divided(now, g, nu)
            nu = now.keep * nu + now.c2 * tree.bounded_square(g)
            return mu, written_after(nu, never=(nu < 0) & (mu == 0))

        def ahead(now, g, mu, nu):
            return now.b1 * mu + now.c1 * self._divided(now, g, nu)

        old = (state.mu, state.nu)
        mu, nu = tree.map_leaves(moments, (updates, *old), now, like=old)
        if self.nesterov:
            # XLA copies the old mean of squares: from the new one it would have lost digits.
            updates = tree.map_leaves(ahead, (updates, mu, state.nu), now)
        else:
            updates = tree.widened(mu)
        return updates, ScaleByAdamState(tree.increment(state.age), mu, nu)

    def _divided(self, now: Any, g: Array, nu: Array) -> Array:
        n = g / jnp.maximum(tree.root(tree.positive(nu)), now.eps)
        if self.use_clipping and jnp.iscomplexobj(n):
            n = n * jnp.minimum(1, now.limit / jnp.maximum(jnp.abs(n), now.limit))
        elif self.use_clipping:
            n = jnp.clip(n, -now.limit, now.limit)
        return jnp.where(now.first, 0, n)
