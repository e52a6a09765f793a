"""Adam with another mean of squares, start or order: Belief, Yogi, RAdam, and ADOPT."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Real

from ... import fields, tree
from ..._core.fields.schedule import call_schedule
from ...tree.moments import log_of_decay
from ...tree.types import Hyperparameter, Params, Scalar, WhereLike
from .._base import AbstractTransform, Context, advise_keywords
from ..momentum.momentum import first_moment
from ..shaping.descent import ScaleByLearningRate, decayed_descent
from .adam import AbstractAdam, ScaleByAdamState


class AbstractBelief(AbstractAdam):
    """A rule with a mean of the squared deviations of gradients from their mean."""

    eps: fields.Number = fields.hyperparameter(1e-16, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(1e-16, within="[0, inf)")

    wide_mean: ClassVar[bool] = True

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        # For the order of the sums see `_core/engine`.
        square = self.c2 * tree.bounded_square(g - leaf.mu) + self.eps_root
        leaf.nu = self.b2 * leaf.nu + square


class ScaleByBelief(AbstractBelief):
    """AdaBelief: divides a mean of gradients by their deviation from it.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        sₜ = β₂·sₜ₋₁ + (1 − β₂)·|gₜ − mₜ|² + ε_root
        uₜ = m̂ₜ / (√ŝₜ + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   ŝₜ = sₜ / (1 − β₂ᵗ)

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added to s in every step, ≥ 0.
    - `nesterov`: whether to use Nesterov momentum, as in `ScaleByAdam`.

    ??? cite "Zhuang et al., [AdaBelief Optimizer](https://arxiv.org/abs/2010.07468), 2020"
    """

    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)

    def begin(self, state):
        self._correct_biases(state, self.nesterov)

    def direction(self, g, leaf):
        return self._debiased_mean(g, leaf.mu) / self._divisor(leaf.nu)


class ScaleByYogi(AbstractAdam):
    """Yogi: Adam with a mean of squares that changes additively, and so falls slowly.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = vₜ₋₁ − (1 − β₂)·sign(vₜ₋₁ − |gₜ|²)·|gₜ|²
        uₜ = m̂ₜ / (√(v̂ₜ + ε_root) + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   v̂ₜ = vₜ / (1 − β₂ᵗ)

    Differs from Optax, where the mean m starts at `initial_accumulator_value` too, which moves
    parameters whose gradients are zero. Here it starts at 0, as in the paper.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, in [0, 1); 1 − β₂ is the relative size of the changes of v.
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `initial_accumulator_value`: v₀, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Zaheer et al., [Adaptive Methods for Nonconvex
        Optimization](https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization),
        2018"
    """

    eps: fields.Number = fields.hyperparameter(1e-3, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    initial_accumulator_value: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByAdamState:
        start = self.at(Context(step=0)).initial_accumulator_value
        return ScaleByAdamState(
            age=tree.fresh_count(),
            mu=first_moment(self, params, "b1"),
            nu=tree.second_moment(params, value=start),
        )

    def advance(self, g, leaf):
        square = tree.bounded_square(g)
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        leaf.nu = leaf.nu - self.c2 * jnp.sign(leaf.nu - square) * square

    def direction(self, g, leaf):
        return self._debiased_mean(g, leaf.mu) / self._divisor(leaf.nu, self.eps_root)


class ScaleByRadam(AbstractAdam):
    """RAdam: Adam that rectifies the variance of the first steps.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ,   vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²
        ρ∞ = 2 / (1 − β₂) − 1,   ρₜ = ρ∞ − 2t·β₂ᵗ / (1 − β₂ᵗ)
        rₜ = √((ρₜ − 4)(ρₜ − 2)·ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)·ρₜ))
        uₜ = rₜ·m̂ₜ / (√(v̂ₜ + ε_root) + ε)   where ρₜ ≥ threshold,   else   m̂ₜ

    with m̂ₜ = mₜ / (1 − β₁ᵗ) and v̂ₜ = vₜ / (1 − β₂ᵗ). In float32 the formula of ρₜ leaves two
    correct digits at the default β₂; here it is computed without cancellation, after any number of
    steps. Differs from Optax, which evaluates the formula as it stands.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `threshold`: the smallest ρₜ at which to divide, ≥ 4.
    - `nesterov`: whether to use Nesterov momentum, as in `ScaleByAdam`.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Liu et al., [On the Variance of the Adaptive Learning Rate and
        Beyond](https://arxiv.org/abs/1908.03265), 2019"
    """

    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    threshold: fields.Number = fields.hyperparameter(5.0, within="[4, inf)")
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def begin(self, state):
        self._correct_biases(state, self.nesterov)
        rho, limit = _degrees_of_freedom(self.b2, state.age)
        self.rectified = rho >= self.threshold
        # The unused branch must be finite too: a derivative multiplies it by 0.
        rho = jnp.where(self.rectified, rho, 5)
        limit = jnp.where(self.rectified, limit, 5)
        self.r = jnp.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))

    def direction(self, g, leaf):
        factor = jnp.where(self.rectified, self.r / self._divisor(leaf.nu, self.eps_root), 1)
        return self._debiased_mean(g, leaf.mu) * factor


def _degrees_of_freedom(
    b2: Scalar, age: Int[Array, "*leaves"]
) -> tuple[Real[Array, "*leaves"], Scalar]:
    """RAdam's ρₜ and ρ∞.

    With x = −log β₂ and L(y) = coth y − 1/y, ρₜ = L(x/2) + t·(1 − L(t·x/2)). The two large terms
    of the usual formula, which agree in all but their last digits, cancel symbolically.
    """
    t = age.astype(b2.dtype)
    x = -log_of_decay(b2)
    start, _ = _langevin(x / 2)
    _, rest = _langevin(t * x / 2)
    return start + t * rest, 2 / (1 - b2) - 1


def _langevin(y: Real[Array, "*shape"]) -> tuple[Array, Array]:
    """L(y) = coth y − 1/y and 1 − L(y), for y ≥ 0."""
    small = y < 0.5
    near, far = jnp.where(small, y, 0), jnp.where(small, 1, y)
    square = jnp.square(near)
    series = jnp.zeros_like(near)
    for coefficient in reversed(_LANGEVIN):
        series = coefficient + square * series
    # The exponential is bounded since its derivative is ∞/∞ where it overflows.
    tail = 2 / jnp.expm1(jnp.minimum(2 * far, 80))
    value = jnp.where(small, near * series, 1 + tail - 1 / far)
    # At large ages the difference from 1 is all that counts, and 1 − L would round to 0.
    rest = jnp.where(small, 1 - near * series, 1 / far - tail)
    return value, rest


_LANGEVIN = (
    1 / 3,
    -1 / 45,
    2 / 945,
    -1 / 4725,
    2 / 93555,
    -1382 / 638512875,
    4 / 18243225,
    -3617 / 162820783125,
    87734 / 38979295480125,
    -349222 / 1531329465290625,
    310732 / 13447856940643125,
)
"""The Taylor coefficients of y, y³, y⁵, …, enough for double precision up to y = ½."""


def _fourth_root(step: Real[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """n^¼."""
    return jnp.sqrt(jnp.sqrt(step))


class ScaleByAdopt(AbstractAdam):
    """ADOPT: momentum of gradients that are divided by the root of the previous mean of squares.

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
    - `eps`: ε, the smallest divisor, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `nesterov`: whether to use Nesterov momentum.
    - `use_clipping`: whether to clip n. The paper recommends it.
    - `clip_value_fn`: a function of t − 1, a floating array, that returns cₜ. Defaults to its
        fourth root.

    ??? cite "Taniguchi et al., [ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal
        Rate](https://arxiv.org/abs/2411.02853), 2024"
    """

    b2: fields.Number = fields.hyperparameter(0.9999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)
    use_clipping: bool = eqx.field(default=True, static=True, kw_only=True)
    clip_value_fn: Callable[[Any], Any] = eqx.field(default=_fourth_root, static=True, kw_only=True)

    written_last: ClassVar[tuple[str, ...]] = ("nu",)

    def begin(self, state):
        self.first = state.age == 0
        self.c1 = 1 - self.b1
        self.keep = jnp.where(self.first, 0, self.b2)
        self.c2 = 1 - self.keep
        if self.use_clipping:
            step = jnp.asarray(state.age, self.b1.dtype)
            limit = call_schedule("ScaleByAdopt.clip_value_fn", self.clip_value_fn, step)
            self.limit = jnp.asarray(limit, self.b1.dtype)
        state.age = tree.increment(state.age)

    def advance(self, g, leaf):
        # With Nesterov, XLA copies the old mean of squares: the new one has lost digits of it.
        n = g / jnp.maximum(tree.root(tree.positive(leaf.nu)), self.eps)
        if self.use_clipping and jnp.iscomplexobj(n):
            n = n * jnp.minimum(1, self.limit / jnp.maximum(jnp.abs(n), self.limit))
        elif self.use_clipping:
            n = jnp.clip(n, -self.limit, self.limit)
        self.divided = jnp.where(self.first, 0, n)
        leaf.mu = self.b1 * leaf.mu + self.c1 * self.divided
        leaf.nu = self.keep * leaf.nu + self.c2 * tree.bounded_square(g)

    def direction(self, g, leaf):
        return self.b1 * leaf.mu + self.c1 * self.divided if self.nesterov else leaf.mu


@advise_keywords
def adabelief(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-16,
    eps_root: Hyperparameter = 1e-16,
    *,
    nesterov: bool = False,
) -> AbstractTransform:
    """AdaBelief: a mean of gradients, divided by their deviation from it.

        p ↦ p − η·m̂ₜ / (√ŝₜ + ε)   with   sₜ = β₂·sₜ₋₁ + (1 − β₂)·|gₜ − mₜ|²

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`, `nesterov`: as in `ScaleByBelief`.

    **Returns:** a chain of `ScaleByBelief` and `ScaleByLearningRate`.

    ??? cite "Zhuang et al., [AdaBelief Optimizer](https://arxiv.org/abs/2010.07468), 2020"
    """
    rule = ScaleByBelief(b1, b2, eps, eps_root, nesterov=nesterov)
    return rule | ScaleByLearningRate(learning_rate)


@advise_keywords
def yogi(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-3,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Yogi: Adam with a mean of squares that changes additively, and so falls slowly.

        p ↦ p − η·m̂ₜ / (√v̂ₜ + ε)   with   vₜ = vₜ₋₁ − (1 − β₂)·sign(vₜ₋₁ − |gₜ|²)·|gₜ|²

    Differs from Optax, where m starts at 1e-6 instead of 0: see `ScaleByYogi`.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `mu_dtype`: as in `ScaleByYogi`.

    **Returns:** a chain of `ScaleByYogi` and `ScaleByLearningRate`.

    ??? cite "Zaheer et al., [Adaptive Methods for Nonconvex
        Optimization](https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization),
        2018"
    """
    return ScaleByYogi(b1, b2, eps, mu_dtype=mu_dtype) | ScaleByLearningRate(learning_rate)


@advise_keywords
def radam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    threshold: Hyperparameter = 5.0,
    *,
    nesterov: bool = False,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """RAdam: Adam that rectifies the variance of the first steps.

        p ↦ p − η·r·m̂ / (√v̂ + ε)

    r is the rectification of `ScaleByRadam`. In the first steps, p ↦ p − η·m̂.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`, `threshold`, `nesterov`, `mu_dtype`: as in `ScaleByRadam`.

    **Returns:** a chain of `ScaleByRadam` and `ScaleByLearningRate`.

    ??? cite "Liu et al., [On the Variance of the Adaptive Learning Rate and
        Beyond](https://arxiv.org/abs/1908.03265), 2019"
    """
    rule = ScaleByRadam(b1, b2, eps, eps_root, threshold, nesterov=nesterov, mu_dtype=mu_dtype)
    return rule | ScaleByLearningRate(learning_rate)


@advise_keywords
def adopt(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.9999,
    eps: Hyperparameter = 1e-6,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
    use_clipping: bool = True,
    clip_value_fn: Callable[[Any], Any] | None = None,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """ADOPT: momentum of gradients that are divided by the root of the previous mean of squares.

        p ↦ p − η·(mₜ + λ·p)   with   mₜ = β₁·mₜ₋₁ + (1 − β₁)·clip(gₜ / max(√vₜ₋₁, ε), ±cₜ)

    with the bound cₜ of `ScaleByAdopt`. Without weight decay, the first step changes no parameter:
    it only measures v. With weight decay, the first step decays, unlike in the authors' code.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `mu_dtype`, `nesterov`, `use_clipping`, `clip_value_fn`: as in
        `ScaleByAdopt`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdopt`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Taniguchi et al., [ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal
        Rate](https://arxiv.org/abs/2411.02853), 2024"
    """
    options: dict[str, Any] = {} if clip_value_fn is None else {"clip_value_fn": clip_value_fn}
    options |= {"nesterov": nesterov, "use_clipping": use_clipping}
    rule = ScaleByAdopt(b1, b2, eps, mu_dtype, **options)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
