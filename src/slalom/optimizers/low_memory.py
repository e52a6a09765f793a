"""Variants of Adam with a smaller state."""

from typing import Any

from .._core.advice import advise_keywords
from .._core.chain import chain
from .._core.fields import Hyperparameter
from .._core.transform import AbstractTransform
from ..transforms import ScaleByAdamMini, ScaleByLearningRate
from ..where.layout import LayoutLike
from ..where.resolve import WhereLike
from ._decay import decayed


@advise_keywords
def adam_mini(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    layout: LayoutLike = None,
) -> AbstractTransform:
    """Adam-mini: AdamW with one mean of squares for each block of parameters.

    A block is one output, one token or one attention head. The state is half of Adam's.

    **Arguments:**

    - `learning_rate`: η, as for AdamW.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
        The authors exclude biases and norms: `sl.where.ndim(min=2)`.
    - The others: as in `ScaleByAdamMini`.

    **Returns:** a chain of `ScaleByAdamMini`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhang et al., [Adam-mini: Use Fewer Learning Rates To Gain
        More](https://arxiv.org/abs/2406.16793), 2024"
    """
    return chain(
        ScaleByAdamMini(b1, b2, eps, mu_dtype=mu_dtype, layout=layout),
        decayed(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
