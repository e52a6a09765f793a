"""RMSProp: division by a running root mean square."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params
from .._base import AbstractRule, AbstractTransform, Context, State, advise_keywords, chain
from ..momentum.momentum import momentum_if_any
from ..shaping.descent import ScaleByLearningRate


class _AbstractRms(AbstractRule[State]):
    """A rule that divides by the root of a mean of squares."""

    decay: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    initial_scale: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    eps_in_sqrt: bool = eqx.field(default=True, static=True)
    bias_correction: bool = eqx.field(default=False, static=True)

    keeps_zeros: ClassVar[bool] = True

    def _divided(self, g: Array, square: Array) -> Array:
        """g / √(square + ε), or g / (√square + ε)."""
        square = tree.positive(square)
        if self.eps_in_sqrt:
            return g / tree.root(square + self.eps)
        return g / (tree.root(square) + self.eps)


class ScaleByRmsState(eqx.Module):
    """The state of `ScaleByRms`."""

    age: Int[Array, "*leaves"] | None = fields.per_leaf()
    """`None` unless `bias_correction` is set."""
    nu: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")


class ScaleByRms(_AbstractRms[ScaleByRmsState]):
    """RMSProp: divides updates by the root of a mean of their squares.

        vₜ = γ·vₜ₋₁ + (1 − γ)·|gₜ|²
        uₜ = gₜ / √(vₜ + ε)             or, with `eps_in_sqrt=False`,   gₜ / (√vₜ + ε)

    **Arguments:**

    - `decay`: γ, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `initial_scale`: v₀, ≥ 0.
    - `eps_in_sqrt`: whether to add ε under the root.
    - `bias_correction`: whether to divide vₜ by 1 − γᵗ.

    ??? cite "Tieleman & Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012"
    """

    def init(self, params: Params) -> ScaleByRmsState:
        return ScaleByRmsState(
            age=tree.fresh_count() if self.bias_correction else None,
            nu=tree.second_moment(params, value=self.at(Context(step=0)).initial_scale),
        )

    def begin(self, state):
        self.rest = 1 - self.decay
        self.debias = None
        if state.age is not None:
            state.age = tree.increment(state.age)
            self.debias = tree.bias_correction(self.decay, state.age)

    def advance(self, g, leaf):
        leaf.nu = self.decay * leaf.nu + self.rest * tree.bounded_square(g)

    def direction(self, g, leaf):
        debiased = leaf.nu if self.debias is None else leaf.nu * self.debias
        return self._divided(g, debiased)


class ScaleByStddevState(eqx.Module):
    """The state of `ScaleByStddev`."""

    age: Int[Array, "*leaves"] | None = fields.per_leaf()
    """`None` unless `bias_correction` is set."""
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    """The mean, after bias correction if there is one."""
    nu: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    """The variance, after bias correction if there is one."""


class ScaleByStddev(_AbstractRms[ScaleByStddevState]):
    """Centered RMSProp: divides updates by their running standard deviation.

        Vₜ = (1 − wₜ)·(Vₜ₋₁ + wₜ·|gₜ − mₜ₋₁|²),   mₜ = mₜ₋₁ + wₜ·(gₜ − mₜ₋₁),   wₜ = 1 − γ
        uₜ = gₜ / √(Vₜ + ε)             or, with `eps_in_sqrt=False`,   gₜ / (√Vₜ + ε)

    Vₜ is the variance around the mean, (mean of |g|²) − |mₜ|², without the cancellation of this
    difference. With `bias_correction`, wₜ = (1 − γ) / (1 − γᵗ), and m and V are the mean and
    variance of the gradients so far, in which v₀ has the weight γᵗ / (1 − γᵗ). The variance of
    the first gradient alone is then 0, so with v₀ = 0 the first update is g₁ / √ε. The update is 0
    where both Vₜ and ε are 0.

    Differs from Optax, which subtracts |mₜ|² from the mean of |g|². Where the gradients vary by
    less than 1e-3 of their size, no digit of that difference is right in float32.

    **Arguments:**

    - `decay`: γ, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `initial_scale`: v₀, the variance at the start, ≥ 0.
    - `eps_in_sqrt`: whether to add ε under the root.
    - `bias_correction`: whether to correct the bias of mₜ and Vₜ towards the start.

    ??? cite "Graves, [Generating Sequences With Recurrent Neural
        Networks](https://arxiv.org/abs/1308.0850), 2013; Finch, Incremental calculation of
        weighted mean and variance, 2009"
    """

    def init(self, params: Params) -> ScaleByStddevState:
        return ScaleByStddevState(
            age=tree.fresh_count() if self.bias_correction else None,
            mu=tree.zeros_like(params, tree.accumulation_dtype),
            nu=tree.second_moment(params, value=self.at(Context(step=0)).initial_scale),
        )

    def begin(self, state):
        # The weight w, the factors of the new variance, and 1 / (1 − w).
        if state.age is None:
            self.weight, self.keep, rest = 1 - self.decay, self.decay, self.decay
        else:
            # 1 − w = γ·(1 − γᵗ⁻¹) / (1 − γᵗ), which keeps its digits for a small γ. At t = 1 it is
            # 0, and v₀ enters the variance with the factor γ / (1 − γ) instead.
            age = state.age = tree.increment(state.age)
            first = age == 1
            self.weight = tree.newest_weight(self.decay, age)
            before = tree.bias_correction(self.decay, jnp.maximum(age - 1, 1))
            rest = self.decay * tree.bias_correction(self.decay, age) / before
            rest = jnp.where(first, 0, rest)
            self.keep = jnp.where(first, self.decay / (1 - self.decay), rest)
        self.spread = self.weight * rest
        # Where the weight is 1, the new mean is g, and so is the old one for all that it matters.
        self.back = jnp.where(rest > 0, 1 / jnp.where(rest > 0, rest, 1), 0)

    def advance(self, g, leaf):
        leaf.mu = tree.moved(leaf.mu, g, self.weight)
        # XLA would copy the old mean, which the variance still reads (see `_core/engine`).
        distance = self.back * (g - leaf.mu)
        leaf.nu = self.keep * leaf.nu + self.spread * tree.bounded_square(distance)

    def direction(self, g, leaf):
        # A zero variance says nothing about the size of the gradient.
        variance = jnp.where((leaf.nu == 0) & (self.eps == 0), jnp.inf, leaf.nu)
        return self._divided(g, variance)


@advise_keywords
def rmsprop(
    learning_rate: Hyperparameter,
    decay: Hyperparameter = 0.9,
    eps: Hyperparameter = 1e-8,
    initial_scale: Hyperparameter = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: Hyperparameter | None = None,
    nesterov: bool = False,
    bias_correction: bool = False,
) -> AbstractTransform:
    """RMSProp: divides gradients by the root of a mean of their squares.

        p ↦ p − η·gₜ / √(vₜ + ε)   with   vₜ = γ·vₜ₋₁ + (1 − γ)·|gₜ|²

    With momentum, the step is a decaying sum of these steps.

    **Arguments:**

    - `learning_rate`: η.
    - `decay`, `eps`, `initial_scale`, `eps_in_sqrt`: as in `ScaleByRms`.
    - `centered`: whether to divide by the standard deviation instead, as in `ScaleByStddev`.
    - `momentum`: the decay of the sum, in [0, 1]. Defaults to no momentum.
    - `nesterov`: whether to use Nesterov momentum.
    - `bias_correction`: as in `ScaleByRms`.

    **Returns:** a chain of `ScaleByRms` (or `ScaleByStddev` if centered), `ScaleByLearningRate`
    and, with momentum, `Trace`.

    ??? cite "Tieleman & Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012"
    """
    links = momentum_if_any(momentum, nesterov)
    rule = ScaleByStddev if centered else ScaleByRms
    return chain(
        rule(decay, eps, initial_scale, eps_in_sqrt, bias_correction),
        ScaleByLearningRate(learning_rate),
        *links,
    )
