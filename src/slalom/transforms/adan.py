"""Adam with a mean of gradient differences: Adan."""

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


class ScaleByAdanState(eqx.Module):
    """What `ScaleByAdan` remembers."""

    age: Int[Array, "*leaves"] = per_leaf()
    m: PyTree[Inexact[Array, "..."]] = param_like()
    v: PyTree[Inexact[Array, "..."]] = param_like()
    n: PyTree[Inexact[Array, "..."]] = param_like()
    g: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByAdan(AbstractTransform):
    """Adan: Nesterov momentum from the differences of successive gradients.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·dₜ   with   dₜ = gₜ − gₜ₋₁,   d₁ = 0
        nₜ = β₃·nₜ₋₁ + (1 − β₃)·|gₜ + β₂·dₜ|²
        uₜ = (m̂ₜ + β₂·v̂ₜ) / (√(n̂ₜ + ε_root) + ε)

    with m̂ₜ = mₜ / (1 − β₁ᵗ), and so on. The paper's β are 1 − β here, as in its authors' code.

    Differs from Optax: there 1 − β₂ stands in front of d and v̂, where the paper, in these
    letters, has β₂.

    **Arguments:**

    - `b1`: β₁, the decay of the mean of gradients, in [0, 1).
    - `b2`: β₂, the decay of the mean of differences, in [0, 1).
    - `b3`: β₃, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `mu_dtype`: how m, v and the last gradient are stored; the parameter's own dtype without it.
    - `nu_dtype`: how n is stored; without it the parameter's own dtype, at least float32.

    ??? cite "Xie et al., [Adan](https://arxiv.org/abs/2208.06677), 2022"
    """

    b1: Hyperparameter = hyperparameter(0.98, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.92, within="[0, 1)")
    b3: Hyperparameter = hyperparameter(0.99, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByAdanState:
        return ScaleByAdanState(
            age=tree.fresh_age(),
            m=tree.first_moment(params, self.mu_dtype),
            v=tree.first_moment(params, self.mu_dtype),
            n=tree.second_moment(params, self.nu_dtype),
            g=tree.first_moment(params, self.mu_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByAdanState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByAdanState]:
        del params
        now = self.at(context)
        age = tree.increment(state.age)

        def means(g, m, v, n, last, b1, c1, b2, c2, b3, c3, age):
            difference = jnp.where(age > 1, g - last, 0)
            m = b1 * m + c1 * g
            v = b2 * v + c2 * difference
            n = b3 * n + c3 * tree.abs_squared(g + b2 * difference)
            # n is never negative, so what is kept is g. That it seems to depend on v and n lets
            # XLA write it last, in place: else the old gradient, which these read, is copied.
            return m, v, n, jnp.where((n < 0) & (v == 0), 0, g)

        def update(m, v, n, eps, eps_root, m_scale, v_scale, n_scale):
            return (m_scale * m + v_scale * v) / (tree.root(n * n_scale + eps_root) + eps)

        decays = (
            *(now.b1, tree.complement(now.b1)),
            *(now.b2, tree.complement(now.b2)),
            *(now.b3, tree.complement(now.b3)),
        )
        old = (state.m, state.v, state.n, state.g)
        m, v, n, last = tree.map_leaves(means, (updates, *old), decays, (age,), like=old)
        updates = tree.map_leaves(
            update,
            (m, v, n),
            (now.eps, now.eps_root),
            (
                tree.bias_correction(now.b1, age),
                now.b2 * tree.bias_correction(now.b2, age),
                tree.bias_correction(now.b3, age),
            ),
        )
        return updates, ScaleByAdanState(age, m, v, n, last)
