"""Gradient descent with momentum, and RMSProp."""

from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..rules import ScaleByLearningRate, ScaleByRms, ScaleByStddev
from ._momentum import momentum_if_any


@advise_keywords
def sgd(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any | None = None,
) -> AbstractTransform:
    """Stochastic gradient descent, with or without momentum.

        p ↦ p − η·g,   or with momentum   p ↦ p − η·tₙ,   tₙ = g + γ·tₙ₋₁

    With `nesterov` the step is η·(g + γ·tₙ).

    **Arguments:**

    - `learning_rate`: η.
    - `momentum`: γ, in [0, 1]. Defaults to no momentum.
    - `nesterov`: whether to use Nesterov momentum.
    - `accumulator_dtype`: the dtype of the momentum; complex parameters use its complex
        counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters.

    **Returns:** a chain of `Trace`, if there is momentum, and `ScaleByLearningRate`.

    ```python
    >>> sl.sgd(0.1, momentum=0.9)
    sl.Trace(0.9) | sl.ScaleByLearningRate(0.1)

    ```
    """
    links = momentum_if_any(momentum, nesterov, accumulator_dtype)
    return chain(*links, ScaleByLearningRate(learning_rate))


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
    - `centered`: whether to divide by the standard deviation instead, as in `ScaleByStddev`.
    - `momentum`: the decay of the sum, in [0, 1]. Defaults to no momentum.
    - `nesterov`: whether to use Nesterov momentum.
    - The others: as in `ScaleByRms`.

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
