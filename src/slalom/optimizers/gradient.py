"""Optimistic and noisy gradient descent, and Polyak's step size."""

from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..rules import (
    AddNoise,
    ScaleByAdam,
    ScaleByLearningRate,
    ScaleByOptimisticGradient,
    ScaleByPolyak,
)


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
    - The others: as in `ScaleByOptimisticGradient`.

    **Returns:** a chain of `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """
    return chain(ScaleByOptimisticGradient(alpha, beta), ScaleByLearningRate(learning_rate))


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

    m̂ and v̂ are those of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - `alpha`: α, the coefficient of Adam's update.
    - `beta`: β, the coefficient of the change since the previous update.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Daskalakis et al., [Training GANs with Optimism](https://arxiv.org/abs/1711.00141),
        2017"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        ScaleByOptimisticGradient(alpha, beta),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def noisy_sgd(
    learning_rate: Hyperparameter,
    eta: Hyperparameter = 0.01,
    gamma: Hyperparameter = 0.55,
    key: Any = 0,
) -> AbstractTransform:
    """Gradient descent with decaying noise.

        p ↦ p − η_lr·(g + σₙ·ξ)   with   σₙ² = η / (n + 1)^γ

    ξ is standard normal noise.

    **Arguments:**

    - `learning_rate`: η_lr.
    - The others: as in `AddNoise`.

    **Returns:** a chain of `AddNoise` and `ScaleByLearningRate`.

    ??? cite "Neelakantan et al., [Adding Gradient Noise Improves Learning for Very Deep
        Networks](https://arxiv.org/abs/1511.06807), 2015"
    """
    return chain(AddNoise(eta, gamma, key), ScaleByLearningRate(learning_rate))


@advise_keywords
def polyak_sgd(
    max_learning_rate: Hyperparameter = 1.0,
    scaling: Hyperparameter = 1.0,
    f_min: Hyperparameter = 0.0,
    eps: Hyperparameter = 0.0,
    variant: str = "sps",
) -> AbstractTransform:
    """SGD with Polyak's step size.

        p ↦ p − s·min((f − f*) / (‖g‖² + ε), η_max)·g

    Each step needs the loss f: use `sl.train_step`, or pass `value=` to `opt.step`.

    Differs from Optax if s ≠ 1: Optax uses the norm of s·g, so a larger s makes the step smaller.

    **Arguments:**

    - `max_learning_rate`: η_max, > 0.
    - `scaling`: s.
    - The others: as in `ScaleByPolyak`.

    **Returns:** a chain of `ScaleByPolyak` and `ScaleByLearningRate`.

    ??? cite "Loizou et al., [Stochastic Polyak Step-size for
        SGD](https://arxiv.org/abs/2002.10542), 2020"
    """
    return chain(
        ScaleByPolyak(f_min, max_learning_rate, eps, variant), ScaleByLearningRate(scaling)
    )
