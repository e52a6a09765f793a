"""Ready-made chains: each is a function that returns what it prints."""

from typing import Any

from .._chain import chain
from .._fields import Hyperparameter
from .._selector import WhereLike
from .._transform import AbstractTransform
from ..transforms import (
    AddDecayedWeights,
    ScaleByAdam,
    ScaleByLearningRate,
    ScaleByLion,
    ScaleByRms,
    ScaleByStddev,
    Trace,
)


def sgd(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any | None = None,
) -> AbstractTransform:
    """Stochastic gradient descent: p ↦ p − η·g, or with momentum p ↦ p − η·(g + γ·t).

    **Arguments:**

    - `learning_rate`: η.
    - `momentum`: γ, in [0, 1]; no momentum without it.
    - `nesterov`: whether the momentum looks ahead.
    - `accumulator_dtype`: how the momentum is stored; the parameter's own dtype without it.

    **Returns:** a chain of `Trace` (with momentum) and `ScaleByLearningRate`.

    ```python
    >>> sl.sgd(0.1, momentum=0.9)
    sl.Trace(0.9) | sl.ScaleByLearningRate(0.1)

    ```
    """
    links = [] if momentum is None else [Trace(momentum, nesterov, accumulator_dtype)]
    return chain(*links, ScaleByLearningRate(learning_rate))


def adam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
    nu_dtype: Any | None = None,
) -> AbstractTransform:
    """Adam: p ↦ p − η·m̂ / (√v̂ + ε).

    **Arguments:**

    - `learning_rate`: η.
    - the others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRate`.

    ```python
    >>> sl.adam(1e-3)
    sl.ScaleByAdam() | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, nu_dtype=nu_dtype),
        ScaleByLearningRate(learning_rate),
    )


def adamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    nesterov: bool = False,
    nu_dtype: Any | None = None,
) -> AbstractTransform:
    """Adam with decoupled weight decay: p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p).

    The decay follows the learning rate: a step takes η·λ of each decayed parameter.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree; all without it.
        `sl.where.ndim(min=2)` decays matrices and leaves biases and norms alone.
    - the others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ```python
    >>> sl.adamw(1e-3, weight_decay=0.1)
    sl.ScaleByAdam() | sl.AddDecayedWeights(weight_decay=0.1) | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Loshchilov & Hutter, [Decoupled Weight Decay
        Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, nu_dtype=nu_dtype),
        _weight_decay(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )


def lion(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-3,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """Lion: p ↦ p − η·(sign(β₁·m + (1 − β₁)·g) + λ·p).

    Each number moves by η a step, so η is usually a tenth to a third of Adam's, and λ greater by
    as much.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree; all without it.
    - the others: as in `ScaleByLion`.

    **Returns:** a chain of `ScaleByLion`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """
    return chain(
        ScaleByLion(b1, b2, mu_dtype),
        _weight_decay(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )


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
    *,
    nu_dtype: Any | None = None,
) -> AbstractTransform:
    """RMSProp: p ↦ p − η·g / √(v + ε), or with momentum the decaying sum of these steps.

    **Arguments:**

    - `learning_rate`: η.
    - `centered`: whether to divide by the standard deviation: v less the square of the mean.
    - `momentum`: the decay of the sum, in [0, 1]; no momentum without it.
    - `nesterov`: whether the momentum looks ahead.
    - the others: as in `ScaleByRms`.

    **Returns:** a chain of `ScaleByRms` (centered: `ScaleByStddev`), `ScaleByLearningRate` and
    (with momentum) `Trace`.

    ??? cite "Tieleman & Hinton, Lecture 6.5 of Neural Networks for Machine Learning, 2012"
    """
    links = [] if momentum is None else [Trace(momentum, nesterov)]
    rule = ScaleByStddev if centered else ScaleByRms
    return chain(
        rule(decay, eps, initial_scale, eps_in_sqrt, bias_correction, nu_dtype=nu_dtype),
        ScaleByLearningRate(learning_rate),
        *links,
    )


def _weight_decay(weight_decay: Hyperparameter, decay_where: WhereLike | None) -> AbstractTransform:
    """Weight decay on the selected parameters, or on all."""
    link = AddDecayedWeights(weight_decay)
    return link if decay_where is None else link.mask(decay_where)
