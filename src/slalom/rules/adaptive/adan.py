"""Adam with a mean of gradient differences: Adan."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from .._base import AbstractRule, AbstractTransform, advise_keywords, chain
from ..momentum.momentum import first_moment
from ..shaping.decay import decayed_descent


class ScaleByAdanState(eqx.Module):
    """The state of `ScaleByAdan`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    m: PyTree[Inexact[Array, "..."]] = fields.param_like()
    v: PyTree[Inexact[Array, "..."]] = fields.param_like()
    n: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    g: PyTree[Inexact[Array, "..."]] = fields.param_like()


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

    b1: fields.Number = fields.hyperparameter(0.98, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.92, within="[0, 1)")
    b3: fields.Number = fields.hyperparameter(0.99, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    written_last: ClassVar[tuple[str, ...]] = ("g",)

    def init(self, params: Params) -> ScaleByAdanState:
        return ScaleByAdanState(
            age=tree.fresh_count(),
            m=first_moment(self, params, "b1"),
            v=first_moment(self, params, "b2"),
            n=tree.second_moment(params),
            g=tree.first_moment(params, self.mu_dtype),
        )

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.c1, self.c2, self.c3 = 1 - self.b1, 1 - self.b2, 1 - self.b3
        self.m_scale = tree.bias_correction(self.b1, age)
        self.v_scale = self.b2 * tree.bias_correction(self.b2, age)
        self.n_scale = tree.bias_correction(self.b3, age)
        self.has_previous = age > 1

    def advance(self, g, leaf):
        difference = jnp.where(self.has_previous, g - leaf.g, 0)
        leaf.m = self.b1 * leaf.m + self.c1 * g
        leaf.v = self.b2 * leaf.v + self.c2 * difference
        leaf.n = self.b3 * leaf.n + self.c3 * tree.bounded_square(g + self.b2 * difference)
        leaf.g = g

    def direction(self, g, leaf):
        divisor = tree.root(tree.positive(leaf.n) * self.n_scale + self.eps_root) + self.eps
        return (self.m_scale * leaf.m + self.v_scale * leaf.v) / divisor


@advise_keywords
def adan(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.98,
    b2: Hyperparameter = 0.92,
    b3: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Adan: Nesterov momentum from the differences of successive gradients.

        p ↦ p − η·((m̂ + β₂·v̂) / (√(n̂ + ε_root) + ε) + λ·p)

    m, v and n are the means of `ScaleByAdan`: of gradients, of differences, and of squares.

    The paper divides by 1 + η·λ instead of subtracting η·λ·p; both agree to first order in η.
    Differs from Optax in one coefficient: see `ScaleByAdan`. ε_root is 1e-8 as in Optax. The paper
    and other packages have none, and take longer first steps where a gradient is below 0.01: write
    `eps_root=0.0` to follow them.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `b3`, `eps`, `eps_root`: as in `ScaleByAdan`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: as in `ScaleByAdan`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdan`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Xie et al., [Adan](https://arxiv.org/abs/2208.06677), 2022"
    """
    return chain(
        ScaleByAdan(b1, b2, b3, eps, eps_root, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
