"""Adafactor, which stores factored second moments."""

from typing import Any

import jax.numpy as jnp

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import Ema, Scale, ScaleByFactoredRms, ScaleByLearningRate, ScaleByParamBlockRms
from ...where.resolve import WhereLike
from .._decay import decayed


@advise_keywords
def adafactor(
    learning_rate: Hyperparameter | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: Hyperparameter = 0.8,
    step_offset: Hyperparameter = 0.0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Hyperparameter | None = 1.0,
    momentum: Hyperparameter | None = None,
    accumulator_dtype: Any = jnp.float32,
    weight_decay: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-30,
    factored: bool = True,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """Adafactor: steps in proportion to the parameters, with a factored mean of squares.

        p ↦ p − η·rms(p)·û − λ·p   with   û = u·min(1, d / rms(u))

    u is the gradient divided by the root of its mean square, which is stored as one row and one
    column per matrix. The update is scaled by the size of the parameter, so η is much larger than
    for Adam. The decay is not multiplied by η: each step subtracts λ·p.

    Differs from Optax: the weight decay is called `weight_decay` and `decay_where`, not
    `weight_decay_rate` and `weight_decay_mask`. See also `ScaleByFactoredRms`.

    **Arguments:**

    - `learning_rate`: η. Defaults to 1.
    - `min_dim_size_to_factor`: a matrix is factored if both axes have at least this size, an int
        ≥ 1.
    - `decay_rate`: c, in [0, 1]. The mean of squares decays by 1 − t^−c at step t.
    - `step_offset`: a number of steps to subtract from t, such as those of an earlier run.
    - `multiply_by_parameter_scale`: whether to multiply the update by max(rms(p), 0.001).
    - `clipping_threshold`: d, ≥ 0. `None` for no clipping.
    - `momentum`: the decay of a mean of the updates, in [0, 1). Defaults to no momentum, and no
        memory for it.
    - `accumulator_dtype`: the dtype of this mean.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay.
    - `eps`: ε, > 0, added to the squares.
    - `factored`: whether to store rows and columns instead of full means of squares.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `ScaleByFactoredRms`, which also clips, `ScaleByLearningRate`,
    `ScaleByParamBlockRms`, `Ema`, `AddDecayedWeights` and `Scale`. Links that are switched off are
    left out.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """
    links: list[AbstractTransform] = [
        ScaleByFactoredRms(
            factored,
            decay_rate,
            step_offset,
            min_dim_size_to_factor,
            eps,
            clipping_threshold=clipping_threshold,
        )
    ]
    if learning_rate is not None:
        links.append(ScaleByLearningRate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        links.append(ScaleByParamBlockRms())
    if momentum is not None:
        links.append(Ema(momentum, debias=False, accumulator_dtype=accumulator_dtype))
    if weight_decay is not None:
        links.append(decayed(weight_decay, decay_where))
    return chain(*links, Scale(-1.0))
