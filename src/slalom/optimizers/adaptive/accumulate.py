"""Adagrad, Adadelta, MADGRAD and SM3."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import (
    ScaleByAdadelta,
    ScaleByLearningRate,
    ScaleByMadgrad,
    ScaleByRss,
    ScaleBySm3,
)
from ...where.resolve import WhereLike
from .._decay import decayed


@advise_keywords
def adagrad(
    learning_rate: Hyperparameter,
    initial_accumulator_value: Hyperparameter = 0.1,
    eps: Hyperparameter = 1e-7,
) -> AbstractTransform:
    """Adagrad: divides gradients by the root of the sum of all their squares.

        p ↦ p − η·gₜ / √(sₜ + ε)   with   sₜ = sₜ₋₁ + |gₜ|²

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByRss`.

    **Returns:** a chain of `ScaleByRss` and `ScaleByLearningRate`.

    ??? cite "Duchi, Hazan & Singer, [Adaptive Subgradient Methods for Online Learning and
        Stochastic Optimization](https://jmlr.org/papers/v12/duchi11a.html), 2011"
    """
    return chain(
        ScaleByRss(initial_accumulator_value, eps),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def adadelta(
    learning_rate: Hyperparameter = 1.0,
    rho: Hyperparameter = 0.9,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """Adadelta: gives each step the running size of the previous steps.

        p ↦ p − η·√(x + ε) / √(v + ε)·g

    v and x are decaying means of the squares of the gradients and of the steps.

    Differs from Optax: the learning rate defaults to 1, as in the paper. Optax without a learning
    rate does not flip the sign, so its updates ascend.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0. λ·p is added to the gradients, as in L2 regularization.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByAdadelta`.

    **Returns:** a chain of `AddDecayedWeights`, `ScaleByAdadelta` and `ScaleByLearningRate`.

    ??? cite "Zeiler, [ADADELTA](https://arxiv.org/abs/1212.5701), 2012"
    """
    return chain(
        decayed(weight_decay, decay_where),
        ScaleByAdadelta(rho, eps),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def madgrad(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter = 0.9,
    weight_decay: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-6,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """MADGRAD: dual averaging from the start, divided by the cube root of a sum of squares.

        p ↦ γ·p + (1 − γ)·(p₀ − s / (∛v + ε))

    s and v are weighted sums of the gradients and of their squares.

    Differs from Optax, which adds ε to the learning rate: see `ScaleByMadgrad`.

    **Arguments:**

    - `learning_rate`: η, ≥ 0.
    - `weight_decay`: λ, ≥ 0. λ·p is added to the gradients, as in L2 regularization. Defaults to
        no decay.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByMadgrad`.

    **Returns:** a chain of `AddDecayedWeights`, if there is a decay, and `ScaleByMadgrad`.

    ??? cite "Defazio & Jelassi, [Adaptivity without Compromise: A Momentumized, Adaptive, Dual
        Averaged Gradient Method for Stochastic Optimization](https://arxiv.org/abs/2101.11075),
        2021"
    """
    rule = ScaleByMadgrad(learning_rate, momentum, eps)
    if weight_decay is None:
        return rule
    return chain(decayed(weight_decay, decay_where), rule)


@advise_keywords
def sm3(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter = 0.9,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """SM3: Adagrad with momentum that keeps one number per row and column.

        p ↦ p − η·mₜ   with   mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ / √(vₜ + ε)

    v is the bound of the sums of squares in `ScaleBySm3`.

    **Arguments:**

    - `learning_rate`: η.
    - `momentum`: the decay of the momentum, in [0, 1).
    - `mu_dtype`: the dtype of the momentum; complex parameters use its complex
        counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters.

    **Returns:** a chain of `ScaleBySm3` and `ScaleByLearningRate`.

    ??? cite "Anil et al., [Memory-Efficient Adaptive
        Optimization](https://arxiv.org/abs/1901.11150), 2019"
    """
    return chain(ScaleBySm3(momentum, mu_dtype=mu_dtype), ScaleByLearningRate(learning_rate))
