"""The recipe whose second moments need hardly any memory."""

from typing import Any

import jax.numpy as jnp

from .._core.chain import chain
from .._core.fields import Hyperparameter
from .._core.transform import AbstractTransform
from ..transforms import Ema, Scale, ScaleByFactoredRms, ScaleByLearningRate, ScaleByParamBlockRMS
from ..where.resolve import WhereLike
from ._decay import decayed


def adafactor(
    learning_rate: Hyperparameter | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: Hyperparameter = 0.8,
    decay_offset: Hyperparameter = 0.0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Hyperparameter | None = 1.0,
    momentum: Hyperparameter | None = None,
    dtype_momentum: Any = jnp.float32,
    weight_decay: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-30,
    factored: bool = True,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """Adafactor: p ↦ p − η·rms(p)·û − λ·p with û = u·min(1, d / rms(u)), leaf by leaf.

    u is the gradient divided by the root of a mean of squares that is kept as a row and a column.
    The step follows the size of the parameter, so η is much greater than Adam's. The decay does
    not follow η: p loses the share λ of itself in each step.

    Differs from Optax in the names of the weight decay (`weight_decay_rate` and
    `weight_decay_mask` there), and as `ScaleByFactoredRms` does.

    **Arguments:**

    - `learning_rate`: η; 1 without it.
    - `min_dim_size_to_factor`: how long both axes of a matrix must be, an int ≥ 1.
    - `decay_rate`: c, in [0, 1]; the mean of squares decays by 1 − t^−c.
    - `decay_offset`: a number of steps that t does not count, such as those of an earlier run.
    - `multiply_by_parameter_scale`: whether rms(p), but at least 0.001, is a factor of the step.
    - `clipping_threshold`: d, ≥ 0; no bound without it.
    - `momentum`: the decay of a mean of the steps, in [0, 1); none, and no memory for it, without.
    - `dtype_momentum`: how this mean is stored.
    - `weight_decay`: λ, ≥ 0; none without it.
    - `eps`: ε, > 0, added to the squares.
    - `factored`: whether to keep rows and columns instead of whole means of squares.
    - `decay_where`: which parameters decay: a selector, a function or a tree; all without it.

    **Returns:** a chain of `ScaleByFactoredRms`, which bounds its result itself,
    `ScaleByLearningRate`, `ScaleByParamBlockRMS`, `Ema`, `AddDecayedWeights` and `Scale`, without
    those not asked for.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """
    links: list[AbstractTransform] = [
        ScaleByFactoredRms(
            factored,
            decay_rate,
            decay_offset,
            min_dim_size_to_factor,
            eps,
            clipping_threshold=clipping_threshold,
        )
    ]
    if learning_rate is not None:
        links.append(ScaleByLearningRate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        links.append(ScaleByParamBlockRMS())
    if momentum is not None:
        links.append(Ema(momentum, debias=False, accumulator_dtype=dtype_momentum))
    if weight_decay is not None:
        links.append(decayed(weight_decay, decay_where))
    return chain(*links, Scale(-1.0))
