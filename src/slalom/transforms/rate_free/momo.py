"""Momentum and Adam with a step size from the loss: MoMo."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import tree
from ..._core.fields.declare import Hyperparameter, dtype_field, hyperparameter
from ..._core.protocol.context import Context
from ..._core.protocol.transform import AbstractTransform, State
from ..._core.state.marks import param_like, per_leaf, until_reset
from ...tree.dtypes import as_float
from ...tree.types import Params, Scalar, Updates
from ...where.resolve import Where
from ..momentum._first_moment import first_moment
from ..shaping._own_decay import decay_mask, decaying, where_field
from ._sums import number, sum_dtype, total


class _AbstractMomo(AbstractTransform[State]):
    """A rule whose step size follows from the loss: the last link of a chain."""

    needs: ClassVar[tuple[str, ...]] = ("params", "value")
    sets_learning_rate: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = -1

    def metrics(self, state: Any) -> dict[str, Array]:
        return {"step_size": state.step_size}


class ScaleByMomoState(eqx.Module):
    """The state of `ScaleByMomo`."""

    age: Int[Array, "*leaves"] = per_leaf()
    value: Float[Array, ""] = until_reset()
    """The mean of the losses."""
    gamma: Float[Array, ""] = until_reset()
    """The mean of the inner products of gradients and parameters."""
    step_size: Float[Array, ""] = until_reset()
    lower_bound: Float[Array, ""] | None = until_reset()
    mu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByMomo(_AbstractMomo[ScaleByMomoState]):
    """MoMo: momentum with a step size from the loss and a lower bound of it.

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
    do not decay, also in the sums. A tiny m takes a step, where Optax takes none if ‖m‖² < 2e-16.

    **Arguments:**

    - `learning_rate`: η, the largest step size, > 0.
    - `b1`: β₁, the decay of the means, in [0, 1).
    - `lower_bound`: f*, a lower bound of the loss.
    - `weight_decay`: λ, ≥ 0.
    - `adapt_lower_bound`: whether to estimate f*.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """

    learning_rate: Hyperparameter = hyperparameter(1.0, within="[0, inf)")
    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    lower_bound: Hyperparameter = hyperparameter(0.0)
    weight_decay: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    adapt_lower_bound: bool = eqx.field(default=False, static=True)
    decay_where: Where | None = where_field(kw_only=True)
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByMomoState:
        return ScaleByMomoState(
            age=tree.fresh_count(),
            **_fresh_numbers(self, params),
            mu=first_moment(self, params, "b1"),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByMomoState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByMomoState]:
        params = self.demand("params", params)
        loss = self.demand("value", None if context is None else context.value)
        now = self.at(context)
        age = tree.increment(state.age)
        now.keep = jnp.where(age == 1, 0, now.b1)
        now.new = jnp.where(age == 1, 1, 1 - now.b1)

        def moment(now, g, mu):
            return now.keep * mu + now.new * g

        def sums(now, g, p, mu):
            return tree.inner(g, p), tree.inner(mu, p), jnp.sum(tree.abs_squared(mu))

        def direction(now, mu, decaying):
            return -_shrunk(now, now.step_size * mu, decaying)

        mu = tree.map_leaves(moment, (updates, state.mu), now, like=(state.mu,))
        sums_by_leaf = tree.map_leaves(sums, (updates, params, mu), now)
        oldest = jnp.max(age, initial=1) == 1
        keep, new = jnp.where(oldest, 0, now.b1), jnp.where(oldest, 1, 1 - now.b1)
        numbers = _step_size(self, now, state, params, as_float(loss), (keep, new), sums_by_leaf)
        updates = tree.map_leaves(
            direction, (mu,), now, per_param=(decaying(self.decay_where, params),)
        )
        return updates, ScaleByMomoState(age, **numbers, mu=mu)


class ScaleByMomoAdamState(eqx.Module):
    """The state of `ScaleByMomoAdam`."""

    age: Int[Array, "*leaves"] = per_leaf()
    value: Float[Array, ""] = until_reset()
    """The mean of the losses."""
    gamma: Float[Array, ""] = until_reset()
    """The mean of the inner products of gradients and parameters."""
    step_size: Float[Array, ""] = until_reset()
    lower_bound: Float[Array, ""] | None = until_reset()
    mu: PyTree[Inexact[Array, "..."]] = param_like()
    nu: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")


class ScaleByMomoAdam(_AbstractMomo[ScaleByMomoAdamState]):
    """MoMo-Adam: Adam with a step size from the loss and a lower bound of it.

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
    - `lower_bound`: f*, a lower bound of the loss.
    - `weight_decay`: λ, ≥ 0.
    - `adapt_lower_bound`: whether to estimate f*.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `nu_dtype`: the dtype in which v is stored, which is real also for complex parameters.
        Defaults to the parameter's dtype, but at least float32.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """

    learning_rate: Hyperparameter = hyperparameter(1e-2, within="[0, inf)")
    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    lower_bound: Hyperparameter = hyperparameter(0.0)
    weight_decay: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    adapt_lower_bound: bool = eqx.field(default=False, static=True)
    decay_where: Where | None = where_field(kw_only=True)
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleByMomoAdamState:
        return ScaleByMomoAdamState(
            age=tree.fresh_count(),
            **_fresh_numbers(self, params),
            mu=first_moment(self, params, "b1"),
            nu=tree.second_moment(params, self.nu_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByMomoAdamState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByMomoAdamState]:
        params = self.demand("params", params)
        loss = self.demand("value", None if context is None else context.value)
        now = self.at(context)
        age = tree.increment(state.age)
        now.c1, now.c2 = 1 - now.b1, 1 - now.b2
        now.nu_scale = tree.bias_correction(now.b2, age)

        def moments(now, g, mu, nu):
            return now.b1 * mu + now.c1 * g, now.b2 * nu + now.c2 * tree.bounded_square(g)

        def scaled(now, mu, nu):
            return mu / (tree.root(tree.positive(nu) * now.nu_scale) + now.eps)

        def sums(now, g, p, mu, nu):
            return tree.inner(g, p), tree.inner(mu, p), tree.inner(mu, scaled(now, mu, nu))

        def direction(now, mu, nu, decaying):
            return -_shrunk(now, now.step_size * scaled(now, mu, nu), decaying)

        mu, nu = tree.map_leaves(
            moments, (updates, state.mu, state.nu), now, like=(state.mu, state.nu)
        )
        sums_by_leaf = tree.map_leaves(sums, (updates, params, mu, nu), now)
        factor = tree.bias_correction(now.b1, jnp.max(age, initial=1))
        means = (now.b1, now.c1)
        numbers = _step_size(self, now, state, params, as_float(loss), means, sums_by_leaf, factor)
        updates = tree.map_leaves(
            direction, (mu, nu), now, per_param=(decaying(self.decay_where, params),)
        )
        return updates, ScaleByMomoAdamState(age, **numbers, mu=mu, nu=nu)


def _fresh_numbers(rule: Any, params: Params) -> dict[str, Any]:
    dtype = sum_dtype(params)
    first = rule.at(Context(step=0)).lower_bound if rule.adapt_lower_bound else None
    return {
        "value": jnp.zeros((), dtype),
        "gamma": jnp.zeros((), dtype),
        "step_size": jnp.zeros((), dtype),
        "lower_bound": None if first is None else jnp.array(first, dtype),
    }


def _step_size(
    rule: Any,
    now: SimpleNamespace,
    state: Any,
    params: Params,
    loss: Scalar,
    means: tuple[Scalar, Scalar],
    sums_by_leaf: tuple[PyTree, PyTree, PyTree],
    factor: Scalar | int = 1,
) -> dict[str, Any]:
    """The new numbers of the state, from ⟨g, p⟩, ⟨m, p⟩ and ⟨m, m / D⟩ of each leaf.

    It also adds to `now` what `_shrunk` needs. `factor` is 1 / (1 − β₁ᵗ), for means that started at
    zero.
    """
    like = state.value
    keep, new, rate, decay, bound, factor = (
        number(x, like)
        for x in (*means, now.learning_rate, now.weight_decay, now.lower_bound, factor)
    )
    now.shrink = 1 / (1 + rate * decay)
    now.decay = rate * decay
    value = keep * state.value + new * number(loss, like)
    gamma = keep * state.gamma + new * total(sums_by_leaf[0], like)

    def sums(of: PyTree) -> tuple[Scalar, Scalar]:
        """The sum over all leaves, and that with the factors ρ."""
        pairs = zip(jax.tree.leaves(of), decay_mask(rule.decay_where, params), strict=True)
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for x, decays in pairs:
            parts[decays].append(x)
        decayed, others = total(parts[True], like), total(parts[False], like)
        return decayed + others, now.shrink * decayed + others

    inner, shrunk_inner = sums(sums_by_leaf[1])
    square, shrunk_square = sums(sums_by_leaf[2])
    # The mean of the tangents, at the parameters after decay alone.
    height = value - gamma + shrunk_inner
    lowest = bound if state.lower_bound is None else state.lower_bound
    if state.lower_bound is not None:
        too_high = height * factor < lowest
        lowest = jnp.where(too_high, jnp.maximum(height * factor / 2, bound), lowest)
    gap = jnp.maximum(height - lowest / factor, 0)
    now.step_size = jnp.minimum(rate * factor, gap / tree.positive(shrunk_square))
    if state.lower_bound is not None:
        reached = value + inner - gamma - now.step_size * square / 2
        lowest = jnp.maximum(reached * factor, bound)
    return {
        "value": value,
        "gamma": gamma,
        "step_size": now.step_size,
        "lower_bound": None if state.lower_bound is None else lowest,
    }


def _shrunk(now: Any, step: Array, decaying: tuple[Array, ...]) -> Array:
    """p − ρ·(p − step), or the step itself where nothing decays."""
    for p in decaying:
        return now.shrink * (step + now.decay * p)
    return step
