"""Recipes around the plain gradient: optimistic, noisy, and with a step from the loss."""

from typing import Any

from .._chain import chain
from .._fields import Hyperparameter
from .._transform import AbstractTransform
from ..transforms import ScaleByAdam, ScaleByLearningRate, ScaleByOptimisticGradient


def optimistic_gradient_descent(
    learning_rate: Hyperparameter,
    alpha: Hyperparameter = 1.0,
    beta: Hyperparameter = 1.0,
) -> AbstractTransform:
    """Optimistic gradient descent: p ↦ p − η·((α + β)·gₜ − β·gₜ₋₁).

    **Arguments:**

    - `learning_rate`: η.
    - the others: as in `ScaleByOptimisticGradient`.

    **Returns:** a chain of `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Mokhtari et al., [A Unified Analysis of Extra-gradient and Optimistic Gradient
        Methods](https://arxiv.org/abs/1901.08511), 2019"
    """
    return chain(ScaleByOptimisticGradient(alpha, beta), ScaleByLearningRate(learning_rate))


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
    nu_dtype: Any | None = None,
) -> AbstractTransform:
    """Optimistic Adam: p ↦ p − η·((α + β)·uₜ − β·uₜ₋₁) with Adam's u.

    **Arguments:**

    - `learning_rate`: η.
    - `alpha`: α, the share of Adam's update itself.
    - `beta`: β, the share of its change.
    - the others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `ScaleByOptimisticGradient` and `ScaleByLearningRate`.

    ??? cite "Daskalakis et al., [Training GANs with Optimism](https://arxiv.org/abs/1711.00141),
        2017"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, nu_dtype=nu_dtype),
        ScaleByOptimisticGradient(alpha, beta),
        ScaleByLearningRate(learning_rate),
    )
