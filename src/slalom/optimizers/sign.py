"""Optimizers that follow the signs of the gradients."""

from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..rules import Scale, ScaleByLearningRate, ScaleByLion, ScaleByRprop, ScaleBySign, Trace
from ..where.resolve import WhereLike
from ._decay import decayed_descent


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
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByLion`.

    **Returns:** a chain of `ScaleByLion`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """
    return chain(
        ScaleByLion(b1, b2, mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


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
    return chain(ScaleBySign(), ScaleByLearningRate(learning_rate))


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
    return chain(momentum, ScaleBySign(), ScaleByLearningRate(learning_rate))


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
    - The others: as in `ScaleByRprop`.

    **Returns:** a chain of `ScaleByRprop` and `Scale`.

    ??? cite "Riedmiller & Braun, A direct adaptive method for faster backpropagation learning,
        1993; Igel & Hüsken, Improving the Rprop learning algorithm, 2000 (iRprop−)"
    """
    rule = ScaleByRprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size)
    return chain(rule, Scale(-1.0))
