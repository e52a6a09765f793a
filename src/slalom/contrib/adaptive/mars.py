"""Adam on gradients whose variance is reduced by the gradient before: MARS."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.engine.matrices import matrices
from ...rules._base import AbstractRule, AbstractTransform, advise_keywords
from ...rules.adaptive.adam import AbstractMoments, AbstractMomentsState
from ...rules.shaping.clip import clip_factor
from ...rules.shaping.descent import decayed_descent
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike


class ScaleByMarsState(AbstractMomentsState):
    """The state of `ScaleByMars`."""

    previous_gradient: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ScaleByMars(AbstractMoments[ScaleByMarsState]):
    """MARS: Adam on gradients that are corrected by their change, which reduces their variance.

        cₜ = gₜ + γ·β₁ / (1 − β₁)·(gₜ − gₜ₋₁)   with   g₀ = g₁
        c̃ₜ = cₜ / max(1, ‖cₜ‖)
        mₜ = β₁·mₜ₋₁ + (1 − β₁)·c̃ₜ,   vₜ = β₂·vₜ₋₁ + (1 − β₂)·|c̃ₜ|²
        uₜ = m̂ₜ / (√v̂ₜ + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   v̂ₜ = vₜ / (1 − β₂ᵗ)

    The norm is taken of one leaf, as in the authors' code. In the paper, it covers the whole
    gradient.

    This is the approximate form, with which the paper's results were obtained: gₜ₋₁ is the gradient
    of the previous step. The exact form takes the old parameters' gradient on the new batch. It
    costs a second gradient in each step, and needs no state for gₜ₋₁. To use it, compute cₜ from
    both gradients and pass it instead of the gradient, with `gamma=0.0`.

    Differs from the authors' code, where g₀ = 0, which scales the first gradient by
    1 + γ·β₁ / (1 − β₁).

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `gamma`: γ, the strength of the correction, ≥ 0; 0 is Adam with clipping.
    - `eps`: ε, added after the root, ≥ 0.
    - `mu_dtype`: the dtype in which m and the last gradient are stored; see `ScaleByAdam`.

    ??? cite "Yuan et al., [MARS: Unleashing the Power of Variance Reduction for Training Large
        Models](https://arxiv.org/abs/2411.10438), 2024"
    """

    b1: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.99, within="[0, 1)")
    gamma: fields.Number = fields.hyperparameter(0.025, within="[0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    over: ClassVar[str] = "leaf"
    written_last: ClassVar[tuple[str, ...]] = ("previous_gradient",)

    def init(self, params: Params) -> ScaleByMarsState:
        previous = tree.first_moment(params, self.mu_dtype)
        return ScaleByMarsState(**self._fresh_moments(params), previous_gradient=previous)

    def begin(self, state):
        super().begin(state)
        self.correction = jnp.where(state.age > 1, self.gamma * self.b1 / self.c1, 0)

    def advance(self, g, leaf):
        super().advance(_corrected(g, leaf.previous_gradient, self.correction), leaf)
        leaf.previous_gradient = g

    def direction(self, g, leaf):
        return self._debiased_mean(g, leaf.mu) / self._divisor(leaf.nu)


class CorrectByMarsState(eqx.Module):
    """The state of `CorrectByMars`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    previous_gradient: PyTree[Inexact[Array, "..."]] = fields.param_like()


class CorrectByMars(AbstractRule[CorrectByMarsState]):
    """MARS's correction alone, in front of any rule for matrices: gradients plus their change.

        cₜ = gₜ + γ·β₁ / (1 − β₁)·(gₜ − gₜ₋₁)   with   g₀ = g₁
        uₜ = cₜ / max(1, ‖cₜ‖)

    The norm is taken of each matrix. In front of Muon it makes MARS-M, in the approximate form:

    ```python
    >>> mars_m = (
    ...     sl.contrib.CorrectByMars()
    ...     | sl.Ema(0.95, debias=False)
    ...     | sl.Orthogonalize(scale="match_rms_adamw")
    ...     | sl.AddDecayedWeights(0.1)
    ...     | sl.ScaleByLearningRate(1e-3)
    ... )

    ```

    `ScaleByMars` describes both forms, and is the correction together with Adam.

    **Arguments:**

    - `b1`: β₁, the decay of the mean that follows it, in [0, 1).
    - `gamma`: γ, the strength of the correction, ≥ 0.
    - `mu_dtype`: the dtype in which the last gradient is stored; see `ScaleByAdam`.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "Liu et al., [MARS-M: When Variance Reduction Meets
        Matrices](https://arxiv.org/abs/2510.21800), 2025"
    """

    b1: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    gamma: fields.Number = fields.hyperparameter(0.025, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "matrix"

    def init(self, params: Params) -> CorrectByMarsState:
        matrices(self, params)
        return CorrectByMarsState(tree.fresh_count(), tree.first_moment(params, self.mu_dtype))

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.correction = jnp.where(age > 1, self.gamma * self.b1 / (1 - self.b1), 0)

    def advance(self, g, leaf):
        self.corrected = _corrected(g, leaf.previous_gradient, self.correction)
        leaf.previous_gradient = g

    def direction(self, g, leaf):
        return self.corrected


def _corrected(g: Array, last: Array, correction: Array) -> Array:
    # Bounded, so that the square of the norm does not overflow.
    c = tree.bounded_entries(g + correction * (g - last), g.size)
    return c * clip_factor(tree.norm(c), 1.0)


@advise_keywords
def mars(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.99,
    gamma: Hyperparameter = 0.025,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """MARS-AdamW: AdamW on gradients that are corrected by their change, and clipped to norm 1.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)

    m̂ and v̂ are means of the corrected gradients of `ScaleByMars`.

    The authors' code uses it for matrices only, and AdamW for the other parameters:

    ```python
    >>> adamw = sl.adamw(3e-3, b2=0.95, weight_decay=0.1)
    >>> tx = sl.contrib.mars(3e-3).partition({sl.where.ndim(max=1): adamw})

    ```

    **Arguments:**

    - `learning_rate`: η; 3e-3 in the paper.
    - `b1`, `b2`, `gamma`, `eps`: as in `ScaleByMars`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: as in `ScaleByMars`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByMars`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Yuan et al., [MARS: Unleashing the Power of Variance Reduction for Training Large
        Models](https://arxiv.org/abs/2411.10438), 2024"
    """
    rule = ScaleByMars(b1, b2, gamma, eps, mu_dtype=mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
