"""Adam with a mean of gradient differences: Adan."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import tree
from ..._core.fields.declare import Hyperparameter, dtype_field, hyperparameter
from ..._core.protocol.rule import AbstractRule
from ..._core.state.marks import param_like, per_leaf
from ...tree.types import Params
from ..momentum._first_moment import first_moment


class ScaleByAdanState(eqx.Module):
    """The state of `ScaleByAdan`."""

    age: Int[Array, "*leaves"] = per_leaf()
    m: PyTree[Inexact[Array, "..."]] = param_like()
    v: PyTree[Inexact[Array, "..."]] = param_like()
    n: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")
    g: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByAdan(AbstractRule[ScaleByAdanState]):
    """Adan: Nesterov momentum from the differences of successive gradients.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·dₜ   with   dₜ = gₜ − gₜ₋₁,   d₁ = 0
        nₜ = β₃·nₜ₋₁ + (1 − β₃)·|gₜ + β₂·dₜ|²
        uₜ = (m̂ₜ + β₂·v̂ₜ) / (√(n̂ₜ + ε_root) + ε)

    with m̂ₜ = mₜ / (1 − β₁ᵗ), and so on. The paper's β are 1 − β here, as in its authors' code.

    Differs from Optax, where the factor of d and v̂ is 1 − β₂ instead of the paper's β₂ (in the
    notation used here).

    **Arguments:**

    - `b1`: β₁, the decay of the mean of gradients, in [0, 1).
    - `b2`: β₂, the decay of the mean of differences, in [0, 1).
    - `b3`: β₃, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `mu_dtype`: the dtype in which m, v and the last gradient are stored; see `ScaleByAdam`.

    ??? cite "Xie et al., [Adan](https://arxiv.org/abs/2208.06677), 2022"
    """

    b1: Hyperparameter = hyperparameter(0.98, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.92, within="[0, 1)")
    b3: Hyperparameter = hyperparameter(0.99, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    eps_root: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)

    written_last: ClassVar[tuple[str, ...]] = ("g",)

    def init(self, params: Params) -> ScaleByAdanState:
        return ScaleByAdanState(
            age=tree.fresh_count(),
            m=first_moment(self, params, "b1"),
            v=first_moment(self, params, "b2"),
            n=tree.second_moment(params),
            g=tree.first_moment(params, self.mu_dtype),
        )

    def begin(self, now, state):
        age = state.age = tree.increment(state.age)
        now.c1, now.c2, now.c3 = 1 - now.b1, 1 - now.b2, 1 - now.b3
        now.m_scale = tree.bias_correction(now.b1, age)
        now.v_scale = now.b2 * tree.bias_correction(now.b2, age)
        now.n_scale = tree.bias_correction(now.b3, age)
        now.has_previous = age > 1

    def advance(self, now, g, leaf):
        difference = jnp.where(now.has_previous, g - leaf.g, 0)
        leaf.m = now.b1 * leaf.m + now.c1 * g
        leaf.v = now.b2 * leaf.v + now.c2 * difference
        leaf.n = now.b3 * leaf.n + now.c3 * tree.bounded_square(g + now.b2 * difference)
        leaf.g = g

    def direction(self, now, g, leaf):
        divisor = tree.root(tree.positive(leaf.n) * now.n_scale + now.eps_root) + now.eps
        return (now.m_scale * leaf.m + now.v_scale * leaf.v) / divisor
