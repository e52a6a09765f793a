"""Further means and changes of gradients: AdEMAMix, Adan, and optimistic gradients."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from .._base import AbstractRule, AbstractTransform, advise_keywords
from ..momentum.momentum import first_moment
from ..shaping.descent import ScaleByLearningRate, decayed_descent
from .adam import ScaleByAdam


class ScaleByAdemamixState(eqx.Module):
    """The state of `ScaleByAdemamix`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    m1: PyTree[Inexact[Array, "..."]] = fields.param_like()
    m2: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    nu: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")


class ScaleByAdemamix(AbstractRule[ScaleByAdemamixState]):
    """AdEMAMix: Adam with a second, much slower mean of gradients.

        m₁,ₜ = β₁·m₁,ₜ₋₁ + (1 − β₁)·gₜ
        m₂,ₜ = β₃·m₂,ₜ₋₁ + (1 − β₃)·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        uₜ = (m̂₁,ₜ + α·m₂,ₜ) / (√(v̂ₜ + ε_root) + ε)

    with m̂₁,ₜ = m₁,ₜ / (1 − β₁ᵗ) and v̂ₜ = vₜ / (1 − β₂ᵗ). The bias of m₂ is not corrected, so the
    slow mean fills slowly.

    The paper warms up α and β₃ over T steps, often the whole training. Both may be schedules:

    ```python
    >>> T = 10_000
    >>> tx = sl.ScaleByAdemamix(
    ...     b3=sl.schedules.linear_half_life(0.9, 0.9999, T),
    ...     alpha=sl.schedules.linear(0.0, 5.0, T),
    ... )

    ```

    The authors' code evaluates them at the number of this update, from 1; here, as in Optax,
    update n uses `schedule(n)`, from 0.

    Differs from Optax: m₂ is stored in at least float32, and `mu_dtype` does not apply to v. In
    bfloat16 m₂ would not change at β₃ = 0.9999.

    **Arguments:**

    - `b1`: β₁, the decay of the fast mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `b3`: β₃, the decay of the slow mean, in [0, 1). The paper suggests smaller values for less
        than about 50 000 steps, such as 0.999.
    - `alpha`: α, the weight of the slow mean, ≥ 0; between 4 and 10 in the paper. The default is
        that of `optax.contrib.scale_by_ademamix`; `sl.ademamix` has a different one, as in Optax.
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `mu_dtype`: the dtype in which both means are stored; see `ScaleByAdam`. That of m₂ is at
        least float32 by default.

    ??? cite "Pagliardini, Ablin & Grangier, [The AdEMAMix Optimizer: Better, Faster,
        Older](https://arxiv.org/abs/2409.03137), 2024"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    b3: fields.Number = fields.hyperparameter(0.9999, within="[0, 1)")
    alpha: fields.Number = fields.hyperparameter(6.0, within="[0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field()

    def init(self, params: Params) -> ScaleByAdemamixState:
        return ScaleByAdemamixState(
            age=tree.fresh_count(),
            m1=first_moment(self, params, "b1"),
            m2=first_moment(self, params, "b3", wide=True),
            nu=tree.second_moment(params),
        )

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.c1, self.c2, self.c3 = 1 - self.b1, 1 - self.b2, 1 - self.b3
        self.m1_scale = tree.bias_correction(self.b1, age)
        self.nu_scale = tree.bias_correction(self.b2, age)

    def advance(self, g, leaf):
        leaf.m1 = self.b1 * leaf.m1 + self.c1 * g
        leaf.m2 = self.b3 * leaf.m2 + self.c3 * g
        leaf.nu = self.b2 * leaf.nu + self.c2 * tree.bounded_square(g)

    def direction(self, g, leaf):
        divisor = tree.root(tree.positive(leaf.nu) * self.nu_scale + self.eps_root) + self.eps
        return (self.m1_scale * leaf.m1 + self.alpha * leaf.m2) / divisor


@advise_keywords
def ademamix(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    b3: Hyperparameter = 0.9999,
    alpha: Hyperparameter = 5.0,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    independent_decay: bool = False,
) -> AbstractTransform:
    """AdEMAMix: AdamW with a second, much slower mean of gradients.

        p ↦ p − η·((m̂₁ + α·m₂) / (√v̂ + ε) + λ·p)

    m₂ is the slow mean. For warm-ups of α and β₃, pass schedules: see `ScaleByAdemamix`.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `b3`, `alpha`, `eps`, `eps_root`, `mu_dtype`: as in `ScaleByAdemamix`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdemamix`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Pagliardini, Ablin & Grangier, [The AdEMAMix Optimizer: Better, Faster,
        Older](https://arxiv.org/abs/2409.03137), 2024"
    """
    rule = ScaleByAdemamix(b1, b2, b3, alpha, eps, eps_root, mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


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
    rule = ScaleByAdan(b1, b2, b3, eps, eps_root, mu_dtype=mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


class ScaleByOptimisticGradientState(eqx.Module):
    """The state of `ScaleByOptimisticGradient`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    previous_gradient: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ScaleByOptimisticGradient(AbstractRule[ScaleByOptimisticGradientState]):
    """Optimistic gradient: extrapolates from the previous update to the next one.

        uₜ = (α + β)·gₜ − β·gₜ₋₁   with   g₀ = g₁

    It damps the rotation that makes gradient descent circle in games, such as a generator and a
    discriminator.

    **Arguments:**

    - `alpha`: α, the factor of the gradient.
    - `beta`: β, the factor of the change of the gradient.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """

    alpha: fields.Number = fields.hyperparameter(1.0)
    beta: fields.Number = fields.hyperparameter(1.0)

    def init(self, params: Params) -> ScaleByOptimisticGradientState:
        return ScaleByOptimisticGradientState(
            age=tree.fresh_count(), previous_gradient=tree.first_moment(params)
        )

    def begin(self, state):
        self.first = state.age == 0
        state.age = tree.increment(state.age)

    def advance(self, g, leaf):
        # XLA copies the previous gradient, which is unavoidable: the change cannot be derived from
        # the new state, which is g alone.
        self.change = jnp.where(self.first, 0, g - leaf.previous_gradient)
        leaf.previous_gradient = g

    def direction(self, g, leaf):
        return self.alpha * g + self.beta * self.change


@advise_keywords
def optimistic_gradient_descent(
    learning_rate: Hyperparameter,
    alpha: Hyperparameter = 1.0,
    beta: Hyperparameter = 1.0,
) -> AbstractTransform:
    """Optimistic gradient descent: extrapolates from the previous gradient to the next one.

        p ↦ p − η·((α + β)·gₜ − β·gₜ₋₁)

    **Arguments:**

    - `learning_rate`: η.
    - `alpha`, `beta`: as in `ScaleByOptimisticGradient`.

    **Returns:** a chain of `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """
    return ScaleByOptimisticGradient(alpha, beta) | ScaleByLearningRate(learning_rate)


@advise_keywords
def optimistic_adam_v2(
    learning_rate: Hyperparameter,
    *,
    alpha: Hyperparameter = 1.0,
    beta: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    nesterov: bool = True,
) -> AbstractTransform:
    """Optimistic Adam: extrapolates from Adam's previous update to the next one.

        p ↦ p − η·((α + β)·uₜ − β·uₜ₋₁)   with   u = m̂ / (√v̂ + ε)

    m̂ and v̂ are the means of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - `alpha`: α, the coefficient of Adam's update.
    - `beta`: β, the coefficient of the change since the previous update.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`, `nesterov`: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Daskalakis et al., [Training GANs with Optimism](https://arxiv.org/abs/1711.00141),
        2017"
    """
    rule = ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    return rule | ScaleByOptimisticGradient(alpha, beta) | ScaleByLearningRate(learning_rate)
