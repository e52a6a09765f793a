"""Momentum and Adam with a step size from the loss: MoMo."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import fields, tree
from ...rules._base import AbstractRule, AbstractTransform, Context, State, advise_keywords
from ...rules.adaptive.adam import AbstractMoments, AbstractMomentsState
from ...rules.momentum.momentum import first_moment
from ...rules.rate_free._sums import bounded
from ...rules.shaping.descent import decay_mask, where_field
from ...tree.types import Hyperparameter, Params, Scalar, WhereLike
from ...where.resolve import Where


class _AbstractMomoFields:
    # Abstract variables would come first in the signature of a rule.
    learning_rate: fields.Number
    lower_bound: fields.Number
    weight_decay: fields.Number
    adapt_lower_bound: bool
    decay_where: Where | None


class _AbstractMomo(AbstractRule[State], _AbstractMomoFields):
    """A rule whose step size follows from the loss: the last link of a chain."""

    over: ClassVar[str] = "sums"
    needs: ClassVar[tuple[str, ...]] = ("params", "value")
    sets_learning_rate: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = -1
    metric_fields: ClassVar[tuple[str, ...]] = ("step_size",)

    def _fresh_numbers(self, params: Params) -> dict[str, Any]:
        """The first numbers of the state."""
        dtype = tree.sum_dtype(params)
        first = self.at(Context(step=0)).lower_bound if self.adapt_lower_bound else None
        return {
            "value": jnp.zeros((), dtype),
            "gamma": jnp.zeros((), dtype),
            "step_size": jnp.zeros((), dtype),
            "lower_bound": None if first is None else jnp.array(first, dtype),
        }

    def _products(self, g: Array, mu: Array, square: Array) -> dict[str, Array]:
        """⟨g, p⟩, ⟨m, p⟩ and ⟨m, m / D⟩; the last two once for a leaf that decays, and once for one
        that does not."""
        inner, zero = tree.inner(mu, self.p), jnp.zeros((), square.dtype)
        decayed, fixed = ((inner, square), (zero, zero))[:: 1 if self.plan else -1]
        return {
            "product": tree.inner(g, self.p),
            "inner": decayed[0],
            "square": decayed[1],
            "fixed_inner": fixed[0],
            "fixed_square": fixed[1],
        }

    def _find_step_size(
        self, sums: Any, state: PyTree, keep: Scalar, new: Scalar, factor: Scalar | float = 1.0
    ) -> None:
        """The new numbers of the state, from the sums of `_products`.

        `keep` and `new` are the weights of the means, and `factor` is 1 / (1 − β₁ᵗ), for means that
        started at zero. Sets the factors of the decay too.
        """
        rate, bound = self.learning_rate, self.lower_bound
        self.decay = rate * self.weight_decay
        self.shrink = 1 / (1 + self.decay)
        value = keep * state.value + new * self.value
        gamma = keep * state.gamma + new * bounded(sums["product"])
        inner, fixed_inner = bounded(sums["inner"]), bounded(sums["fixed_inner"])
        square, fixed_square = bounded(sums["square"]), bounded(sums["fixed_square"])
        # The mean of the tangents, at the parameters after decay alone.
        height = value - gamma + (self.shrink * inner + fixed_inner)
        lowest = bound if state.lower_bound is None else state.lower_bound
        if state.lower_bound is not None:
            too_high = height * factor < lowest
            lowest = jnp.where(too_high, jnp.maximum(height * factor / 2, bound), lowest)
        gap = jnp.maximum(height - lowest / factor, 0)
        shrunk_square = self.shrink * square + fixed_square
        # Divided only where the quotient counts: at zero its derivative is infinite.
        longest = rate * factor
        is_longest = gap >= longest * shrunk_square
        divisor = jnp.where(is_longest, 1, tree.positive(shrunk_square))
        self.step_size = jnp.where(is_longest, longest, gap / divisor)
        if state.lower_bound is not None:
            reached = (
                value + (inner + fixed_inner) - gamma - self.step_size * (square + fixed_square) / 2
            )
            state.lower_bound = jnp.maximum(reached * factor, bound)
        state.value, state.gamma, state.step_size = value, gamma, self.step_size

    def _shrunk(self, step: Array) -> Array:
        """p − ρ·(p − step), or the step itself where nothing decays."""
        return self.shrink * (step + self.decay * self.p) if self.plan else step

    def plans(self, params: Params) -> tuple[bool, ...]:
        return decay_mask(self.decay_where, params)


class _AbstractMomoState(eqx.Module):
    """The fields that the states of both rules share."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    value: Float[Array, ""] = fields.until_reset()
    """The mean of the losses."""
    gamma: Float[Array, ""] = fields.until_reset()
    """The mean of the inner products of gradients and parameters."""
    step_size: Float[Array, ""] = fields.until_reset()
    lower_bound: Float[Array, ""] | None = fields.until_reset()
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ScaleByMomoState(_AbstractMomoState):
    """The state of `ScaleByMomo`."""


class ScaleByMomo(_AbstractMomo[ScaleByMomoState]):
    """MoMo: momentum with a step size from the loss and a lower bound on it.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ,   m₁ = g₁, and so the mean f̄ₜ of the losses and γₜ of ⟨g, p⟩
        τₜ = min(η, (f̄ₜ − γₜ − f* + ⟨mₜ, p⟩·ρ)₊ / (ρ·‖mₜ‖²))   with   ρ = 1 / (1 + η·λ)
        uₜ = ρ·(p − τₜ·mₜ) − p

    It minimizes a model of the loss: the larger of f* and the mean of the tangents at the last
    parameters. The norms are those of all leaves together that this transform sees. Each step needs
    the loss: use `sl.train_step`, or pass `value=` to `opt.step`. `opt.metrics` has τₜ as
    `step_size`. Use this as the last link: it includes the learning rate and the sign.

    With `adapt_lower_bound`, f* starts at `lower_bound` and is estimated as in section 4 of the
    paper.

    Differs from Optax where λ > 0: the step τ·m is multiplied by ρ too, as in the authors' code.
    Otherwise it would not minimize the model. With `decay_where`, ρ is 1 for parameters that
    do not decay, including in the sums. A tiny m causes a step, where Optax takes none if
    ‖m‖² < 2e-16.

    **Arguments:**

    - `learning_rate`: η, the largest step size, > 0.
    - `b1`: β₁, the decay of the means, in [0, 1).
    - `lower_bound`: f*, a lower bound on the loss.
    - `weight_decay`: λ, ≥ 0.
    - `adapt_lower_bound`: whether to estimate f*.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """

    learning_rate: fields.Number = fields.hyperparameter(1.0, within="[0, inf)")
    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    lower_bound: fields.Number = fields.hyperparameter(0.0)
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    adapt_lower_bound: bool = eqx.field(default=False, static=True)
    decay_where: Where | None = where_field()
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByMomoState:
        return ScaleByMomoState(
            age=tree.fresh_count(),
            **self._fresh_numbers(params),
            mu=first_moment(self, params, "b1"),
        )

    def begin(self, state):
        state.age = tree.increment(state.age)
        self.keep = jnp.where(state.age == 1, 0, self.b1)
        self.new = jnp.where(state.age == 1, 1, 1 - self.b1)

    def advance(self, g, leaf):
        leaf.mu = self.keep * leaf.mu + self.new * g

    def reduce(self, g, leaf):
        return self._products(g, leaf.mu, jnp.sum(tree.abs_squared(leaf.mu)))

    def finish(self, sums, state):
        oldest = jnp.max(state.age, initial=1) == 1
        keep, new = jnp.where(oldest, 0, self.b1), jnp.where(oldest, 1, 1 - self.b1)
        self._find_step_size(sums, state, keep, new)

    def direction(self, g, leaf):
        return -self._shrunk(self.step_size * leaf.mu)


class ScaleByMomoAdamState(_AbstractMomoState, AbstractMomentsState):
    """The state of `ScaleByMomoAdam`."""


class ScaleByMomoAdam(_AbstractMomo[ScaleByMomoAdamState], AbstractMoments[ScaleByMomoAdamState]):
    """MoMo-Adam: Adam with a step size from the loss and a lower bound on it.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ, and so the means f̄ₜ of the losses and γₜ of ⟨g, p⟩
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·|gₜ|²,   Dₜ = √(vₜ / (1 − β₂ᵗ)) + ε,   cₜ = 1 − β₁ᵗ
        τₜ = min(η / cₜ, (f̄ₜ − γₜ − cₜ·f* + ⟨mₜ, p⟩·ρ)₊ / (ρ·⟨mₜ, mₜ / Dₜ⟩))
        uₜ = ρ·(p − τₜ·mₜ / Dₜ) − p   with   ρ = 1 / (1 + η·λ)

    Everything else is as for `ScaleByMomo`: it needs the loss, includes the learning rate and the
    sign, and differs from Optax where λ > 0.

    **Arguments:**

    - `learning_rate`: η, the largest step size, > 0.
    - `b1`: β₁, the decay of the means, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `lower_bound`: f*, a lower bound on the loss.
    - `weight_decay`: λ, ≥ 0.
    - `adapt_lower_bound`: whether to estimate f*.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """

    learning_rate: fields.Number = fields.hyperparameter(1e-2, within="[0, inf)")
    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    lower_bound: fields.Number = fields.hyperparameter(0.0)
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    adapt_lower_bound: bool = eqx.field(default=False, static=True)
    decay_where: Where | None = where_field()
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByMomoAdamState:
        return ScaleByMomoAdamState(**self._fresh_moments(params), **self._fresh_numbers(params))

    def reduce(self, g, leaf):
        scaled = leaf.mu / self._divisor(leaf.nu)
        return self._products(g, leaf.mu, tree.inner(leaf.mu, scaled))

    def finish(self, sums, state):
        factor = tree.bias_correction(self.b1, jnp.max(state.age, initial=1))
        self._find_step_size(sums, state, self.b1, self.c1, factor)

    def direction(self, g, leaf):
        return -self._shrunk(self.step_size * (leaf.mu / self._divisor(leaf.nu)))


@advise_keywords
def momo(
    learning_rate: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    lower_bound: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    adapt_lower_bound: bool = False,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """MoMo: momentum with a step size from the loss.

        p ↦ (p − τ·m) / (1 + η·λ)   with   τ ≤ η

    m is a mean of gradients, and τ the step size of `ScaleByMomo`. Each step needs the loss: use
    `sl.train_step`, or pass `value=` to `opt.step`.

    **Arguments:**

    - `learning_rate`: η, the largest step size. The authors recommend a large one.
    - `b1`, `lower_bound`, `weight_decay`, `adapt_lower_bound`, `decay_where`, `mu_dtype`: as in
        `ScaleByMomo`.

    **Returns:** a `ScaleByMomo`.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """
    return ScaleByMomo(
        learning_rate,
        b1,
        lower_bound,
        weight_decay,
        adapt_lower_bound,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )


@advise_keywords
def momo_adam(
    learning_rate: Hyperparameter = 1e-2,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    lower_bound: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    adapt_lower_bound: bool = False,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """MoMo-Adam: Adam with a step size from the loss.

        p ↦ (p − τ·m / (√v̂ + ε)) / (1 + η·λ)

    m is a mean of gradients, and τ the step size of `ScaleByMomoAdam`. Each step needs the loss:
    use `sl.train_step`, or pass `value=` to `opt.step`.

    **Arguments:**

    - `learning_rate`: η, the largest step size: τ ≤ η / (1 − β₁ᵗ).
    - `b1`, `b2`, `eps`, `lower_bound`, `weight_decay`, `adapt_lower_bound`, `decay_where`,
        `mu_dtype`: as in `ScaleByMomoAdam`.

    **Returns:** a `ScaleByMomoAdam`.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """
    return ScaleByMomoAdam(
        learning_rate,
        b1,
        b2,
        eps,
        lower_bound,
        weight_decay,
        adapt_lower_bound,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )
