"""Adam with numbers of whole leaves: NovoGrad, and StableAdamW."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.resolve import as_where
from .._base import AbstractRule, AbstractTransform, advise_keywords
from ..momentum.momentum import first_moment
from ..shaping.descent import ScaleByLearningRate
from .adam import AbstractAdam


class ScaleByNovogradState(eqx.Module):
    """The state of `ScaleByNovograd`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    nu: Float[Array, " leaves"] = fields.per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ScaleByNovograd(AbstractRule[ScaleByNovogradState]):
    """NovoGrad: momentum of gradients that are divided by a running norm of their leaf.

        vₜ = β₂·vₜ₋₁ + (1 − β₂)·‖gₜ‖²,   v₁ = ‖g₁‖²
        mₜ = β₁·mₜ₋₁ + gₜ / (√(vₜ + ε_root) + ε) + λ·p
        uₜ = mₜ

    The paper calls a leaf a layer.

    **Arguments:**

    - `b1`: β₁, the decay of the momentum, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `eps_root`: ε_root, added under the root, ≥ 0.
    - `weight_decay`: λ, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Ginsburg et al., [Stochastic Gradient Methods with Layer-wise Adaptive Moments for
        Training of Deep Networks](https://arxiv.org/abs/1905.11286), 2019"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.25, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    eps_root: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field()

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def init(self, params: Params) -> ScaleByNovogradState:
        return ScaleByNovogradState(
            age=tree.fresh_count(),
            nu=jnp.zeros(len(jax.tree.leaves(params)), tree.sum_dtype(params)),
            mu=first_moment(self, params, "b1"),
        )

    def begin(self, state):
        state.age = tree.increment(state.age)

    def measure(self, g, leaf):
        return {"square": tree.bounded(jnp.sum(tree.abs_squared(g)))}

    def finish(self, sums, state):
        square = sums.each("square")
        mean = self.b2 * state.nu + (1 - self.b2) * square
        state.nu = jnp.where(state.age == 1, square, mean)
        self.inverse_norm = 1 / (tree.root(tree.positive(state.nu) + self.eps_root) + self.eps)

    def advance(self, g, leaf):
        leaf.mu = self.b1 * leaf.mu + (g * self.inverse_norm + self.weight_decay * self.p)

    def direction(self, g, leaf):
        return leaf.mu


@advise_keywords
def novograd(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.25,
    eps: Hyperparameter = 1e-6,
    eps_root: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """NovoGrad: momentum of gradients that are divided by a running norm of their leaf.

        p ↦ p − η·mₜ   with   mₜ = β₁·mₜ₋₁ + gₜ / (√vₜ + ε) + λ·p

    v is a mean of ‖g‖².

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`, `eps_root`: as in `ScaleByNovograd`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `mu_dtype`: as in `ScaleByNovograd`.

    **Returns:** a chain of `ScaleByNovograd` and `ScaleByLearningRate`. With `decay_where`, the
    first is a partition of two `ScaleByNovograd`.

    ??? cite "Ginsburg et al., [Stochastic Gradient Methods with Layer-wise Adaptive Moments for
        Training of Deep Networks](https://arxiv.org/abs/1905.11286), 2019"
    """
    rule = ScaleByNovograd(b1, b2, eps, eps_root, weight_decay, mu_dtype)
    # The decay enters the momentum, so it cannot be a separate link.
    return _with_decay_where(decay_where, rule) | ScaleByLearningRate(learning_rate)


def _with_decay_where(decay_where: WhereLike | None, rule: Any) -> AbstractTransform:
    """The rule, but without weight decay where the selector does not select."""
    if decay_where is None:
        return rule
    others = dataclasses.replace(rule, weight_decay=0.0)
    return others.partition({as_where(decay_where): rule}, names=("decayed",))


class ScaleByStableAdam(AbstractAdam):
    """StableAdamW: AdamW that shortens the step of a leaf whose squares lag behind its gradient.

        mₜ = β̂₁·mₜ₋₁ + (1 − β̂₁)·gₜ,   vₜ = β̂₂·vₜ₋₁ + (1 − β̂₂)·|gₜ|²
        rₜ = √mean(|gₜ|² / max(vₜ, ε²))
        uₜ = (mₜ / (√vₜ + ε) + λ·p) / max(1, rₜ / d)

    with 1 − β̂ = (1 − β) / (1 − βᵗ), so no bias is left to correct. The mean is taken over one
    leaf. Where the gradient suddenly grows, v is too small, and r is large.

    As in the paper, the decay is shortened too. So it is part of this rule: a separate
    `AddDecayedWeights` would not be shortened.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `weight_decay`: λ, ≥ 0.
    - `clipping_threshold`: d, the largest r without clipping, > 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Wortsman et al., [Stable and low-precision training for large-scale vision-language
        models](https://arxiv.org/abs/2304.13013), 2023"
    """

    b2: fields.Number = fields.hyperparameter(0.99, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    clipping_threshold: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    over: ClassVar[str] = "leaf"
    needs: ClassVar[tuple[str, ...]] = ("params",)

    def begin(self, state):
        age = state.age = tree.increment(state.age)
        self.w1 = tree.newest_weight(self.b1, age)
        self.w2 = tree.newest_weight(self.b2, age)
        self.least = tree.positive(jnp.square(self.eps))

    def advance(self, g, leaf):
        leaf.mu = tree.moved(leaf.mu, g, self.w1)
        leaf.nu = tree.moved(leaf.nu, tree.bounded_square(g), self.w2)

    def direction(self, g, leaf):
        # Not the mean of a quotient of squares, and not `tree.rms`, which reads the quotient twice:
        # XLA would write it to memory. Where the squares in v are bounded, r is as large as the
        # update by which it divides.
        quotient = g * tree.inverse_root(jnp.maximum(leaf.nu, self.least))
        r = tree.root(jnp.sum(tree.abs_squared(quotient)) / float(max(g.size, 1)))
        factor = 1 / jnp.maximum(1, r / self.clipping_threshold)
        direction = leaf.mu / (tree.root(tree.positive(leaf.nu)) + self.eps)
        return factor * (direction + self.weight_decay * self.p)


@advise_keywords
def stable_adamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.2,
    decay_where: WhereLike | None = None,
    clipping_threshold: Hyperparameter = 1.0,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """StableAdamW: AdamW whose step is shortened where squares lag behind gradients.

        p ↦ p − η·(mₜ / (√vₜ + ε) + λ·p) / max(1, rₜ / d)   with   rₜ = √mean(|gₜ|² / max(vₜ, ε²))

    It replaces the clipping of gradients. The defaults come from the paper's experiments.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`: as in `ScaleByStableAdam`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `clipping_threshold`, `mu_dtype`: as in `ScaleByStableAdam`.

    **Returns:** a chain of `ScaleByStableAdam` and `ScaleByLearningRate`. With `decay_where`, the
    first is a partition of two `ScaleByStableAdam`.

    ??? cite "Wortsman et al., [Stable and low-precision training for large-scale vision-language
        models](https://arxiv.org/abs/2304.13013), 2023"
    """
    options = {"mu_dtype": mu_dtype, "clipping_threshold": clipping_threshold}
    rule = ScaleByStableAdam(b1, b2, eps, weight_decay, **options)
    # The step shortens the decay too, so it cannot be a separate link.
    return _with_decay_where(decay_where, rule) | ScaleByLearningRate(learning_rate)
