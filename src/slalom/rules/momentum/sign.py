"""Transforms that keep only the sign: Lion and signSGD."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ... import fields, tree
from ...tree.paths import check_real
from ...tree.types import Hyperparameter, Params, Scalar, Tracer, WhereLike
from .._base import AbstractRule, AbstractTransform, Context, advise_keywords
from ..shaping.descent import ScaleByLearningRate, decayed_descent
from ..shaping.scale import Scale
from .momentum import Trace, first_moment


class ScaleByLionState(eqx.Module):
    """The state of `ScaleByLion`."""

    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ScaleByLion(AbstractRule[ScaleByLionState]):
    """Lion: the sign of an interpolation between momentum and gradient.

        uₜ = sign(cₜ)   with   cₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        mₜ = β₂·mₜ₋₁ + (1 − β₂)·gₜ

    Two modes replace the sign near zero: `mode="smooth"` by uₜ = tanh(s·cₜ), and `mode="refined"`
    by uₜ = cₜ where |cₜ| < 1. For complex leaves the sign is z / |z|, and the modes apply to the
    absolute value.

    Where β₁ ≤ 2·β₂, as is usual, cₜ is derived from mₜ, which saves a copy of mₜ₋₁. With a smaller
    β₂ this would lose a factor of β₁/β₂ in precision, so cₜ is computed from mₜ₋₁ as it stands. For
    traced or scheduled β it is always derived from mₜ.

    **Arguments:**

    - `b1`: β₁, the weight of the momentum in the update, in [0, 1).
    - `b2`: β₂, the decay of the momentum, in (0, 1); 0 is excluded because of a division.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `mode`: `"hard"`, `"smooth"` or `"refined"`.
    - `smooth_beta`: s, > 0; used only by `"smooth"`.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.99, within="(0, 1)")
    mu_dtype: np.dtype | None = fields.dtype_field()
    mode: str = fields.choice_field("hard", "smooth", "refined", kw_only=True)
    smooth_beta: fields.Number = fields.hyperparameter(1.0, within="(0, inf)", kw_only=True)

    _reads_old: bool = eqx.field(init=False, static=True, repr=False)

    def __post_init__(self):
        b1, b2 = map(_constant, (self.b1, self.b2))
        self._reads_old = b1 is not None and b2 is not None and b1 > 2 * b2

    def init(self, params: Params) -> ScaleByLionState:
        return ScaleByLionState(mu=first_moment(self, params, "b2"))

    def begin(self, state):
        self.c1, self.c2 = 1 - self.b1, 1 - self.b2
        self.from_mu, self.from_g = interpolation_of_new(self.b1, self.b2)

    def advance(self, g, leaf):
        if self._reads_old:
            self.c = self.b1 * leaf.mu + self.c1 * g
        leaf.mu = self.b2 * leaf.mu + self.c2 * g

    def direction(self, g, leaf):
        c = self.c if self._reads_old else self.from_mu * leaf.mu + self.from_g * g
        if self.mode == "hard":
            return tree.sign(c)
        if self.mode == "refined":
            return c / jnp.maximum(jnp.abs(c), 1)
        if jnp.iscomplexobj(c):
            return tree.sign(c) * jnp.tanh(self.smooth_beta * jnp.abs(c))
        return jnp.tanh(self.smooth_beta * c)


def _constant(x: Any) -> float | None:
    """A number that is neither traced nor scheduled. The checks of fields refuse anything else."""
    number = isinstance(x, float | int | np.ndarray | jax.Array) and not isinstance(x, Tracer)
    return float(x) if number and np.ndim(x) == 0 else None


class ScaleBySign(AbstractRule[None]):
    """Keeps only the sign: u ↦ sign(u), which for complex leaves is u / |u|; 0 stays 0.

    ??? cite "Bernstein et al., [signSGD](https://arxiv.org/abs/1802.04434), 2018"
    """

    keeps_zeros: ClassVar[bool] = True

    def direction(self, g, leaf):
        return tree.sign(g)


def interpolation_of_new(b1: Scalar, b2: Scalar) -> tuple[Scalar, Scalar]:
    """The factors a, b of β₁·m + (1 − β₁)·g = a·m' + b·g with m' = β₂·m + (1 − β₂)·g.

    Reading the new mean m' saves the copy of the old mean m; for Lion the step would take 2.7
    times as long with it.
    """
    from_new = b1 / b2
    return from_new, 1 - from_new


@advise_keywords
def lion(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-3,
    decay_where: WhereLike | None = None,
    *,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Lion: the sign of an interpolation between momentum and gradient.

        p ↦ p − η·(sign(β₁·mₜ₋₁ + (1 − β₁)·gₜ) + λ·p)   with   mₜ = β₂·mₜ₋₁ + (1 − β₂)·gₜ

    Every parameter changes by η per step, so η is usually 3 to 10 times smaller than for Adam,
    and λ larger by the same factor.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `mu_dtype`: as in `ScaleByLion`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByLion`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """
    rule = ScaleByLion(b1, b2, mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)


@advise_keywords
def sign_sgd(learning_rate: Hyperparameter) -> AbstractTransform:
    """Sign descent: steps of one size, against the sign of the gradient.

        p ↦ p − η·sign(g)

    Every parameter changes by η per step, so it converges only if η decays.

    **Arguments:**

    - `learning_rate`: η.

    **Returns:** a chain of `ScaleBySign` and `ScaleByLearningRate`.

    ??? cite "Bernstein et al., [signSGD](https://arxiv.org/abs/1802.04434), 2018"
    """
    return ScaleBySign() | ScaleByLearningRate(learning_rate)


@advise_keywords
def signum(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    accumulator_dtype: Any | None = None,
) -> AbstractTransform:
    """Sign descent with momentum.

        p ↦ p − η·sign(tₙ)   with   tₙ = g + β·tₙ₋₁

    The sum t has the same sign as the mean m ↦ β·m + (1 − β)·g.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`: β, the decay of the momentum, in [0, 1].
    - `accumulator_dtype`: the dtype of the momentum; complex parameters use its complex
        counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters.

    **Returns:** a chain of `Trace`, `ScaleBySign` and `ScaleByLearningRate`.

    ??? cite "Bernstein et al., [signSGD](https://arxiv.org/abs/1802.04434), 2018"
    """
    momentum = Trace(b1, accumulator_dtype=accumulator_dtype)
    return momentum | ScaleBySign() | ScaleByLearningRate(learning_rate)


class ScaleByRpropState(eqx.Module):
    """The state of `ScaleByRprop`."""

    step_sizes: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    signs: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The signs of the last gradients; 0 after a change of sign."""


class ScaleByRprop(AbstractRule[ScaleByRpropState]):
    """Rprop: a step size per element, which grows while the gradient keeps its sign.

        sₜ = sign(gₜ)·sign(gₜ₋₁)
        ηₜ = η₊·ηₜ₋₁ where s = 1,   η₋·ηₜ₋₁ where s = −1,   ηₜ₋₁ where s = 0
        uₜ = ηₜ·sign(gₜ),   but 0 where s = −1, and gₜ then counts as 0 in the next step

    η stays between `min_step_size` and `max_step_size`. Use full batches: the noise of small ones
    changes signs.

    Differs from Optax, which returns the update of the previous step, and 0 in the first. Here the
    update belongs to this step, as in the paper and in PyTorch.

    **Arguments:**

    - `learning_rate`: η₀, the initial step size, > 0; later changes have no effect.
    - `eta_minus`: η₋, in (0, 1).
    - `eta_plus`: η₊, > 1.
    - `min_step_size`: the smallest step size, > 0.
    - `max_step_size`: the largest step size, > 0.

    ??? cite "Riedmiller & Braun, A direct adaptive method for faster backpropagation learning,
        1993; Igel & Hüsken, Improving the Rprop learning algorithm, 2000 (iRprop−)"
    """

    learning_rate: fields.Number = fields.hyperparameter(within="(0, inf)")
    eta_minus: fields.Number = fields.hyperparameter(0.5, within="(0, 1)")
    eta_plus: fields.Number = fields.hyperparameter(1.2, within="(1, inf)")
    min_step_size: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")
    max_step_size: fields.Number = fields.hyperparameter(50.0, within="(0, inf)")

    keeps_zeros: ClassVar[bool] = True
    written_last: ClassVar[tuple[str, ...]] = ("signs",)

    def init(self, params: Params) -> ScaleByRpropState:
        instead = "Use `.split_complex()`, which passes it real and imaginary parts."
        check_real(params, "ScaleByRprop compares signs", instead)
        start = self.at(Context(step=0)).learning_rate
        return ScaleByRpropState(
            step_sizes=tree.second_moment(params, None, start),
            signs=tree.zeros_like(params),
        )

    def advance(self, g, leaf):
        sign = jnp.sign(g)
        # The product of two small gradients could underflow to 0.
        s = sign * leaf.signs
        factor = jnp.where(s > 0, self.eta_plus, self.eta_minus)
        new_size = jnp.clip(leaf.step_sizes * factor, self.min_step_size, self.max_step_size)
        leaf.step_sizes = jnp.where(s == 0, leaf.step_sizes, new_size)
        leaf.signs = jnp.where(s < 0, 0, sign)

    def direction(self, g, leaf):
        return leaf.step_sizes * leaf.signs


@advise_keywords
def rprop(
    learning_rate: Hyperparameter,
    eta_minus: Hyperparameter = 0.5,
    eta_plus: Hyperparameter = 1.2,
    min_step_size: Hyperparameter = 1e-6,
    max_step_size: Hyperparameter = 50.0,
) -> AbstractTransform:
    """Rprop: a step size for each element, which grows while the gradient keeps its sign.

        p ↦ p − ηₜ·sign(gₜ)

    It shrinks when the sign flips.

    Differs from Optax, which applies each update one step later: see `ScaleByRprop`.

    **Arguments:**

    - `learning_rate`: the initial step size, > 0. Later changes of it have no effect.
    - `eta_minus`, `eta_plus`, `min_step_size`, `max_step_size`: as in `ScaleByRprop`.

    **Returns:** a chain of `ScaleByRprop` and `Scale`.

    ??? cite "Riedmiller & Braun, A direct adaptive method for faster backpropagation learning,
        1993; Igel & Hüsken, Improving the Rprop learning algorithm, 2000 (iRprop−)"
    """
    rule = ScaleByRprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size)
    return rule | Scale(-1.0)
