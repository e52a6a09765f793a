"""Adam with other kinds of weight decay."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...transforms import ScaleByAdam, ScaleByLearningRateWithCorrectedDecay
from ...where.resolve import WhereLike
from .._objective import maximized_if


@advise_keywords
def adamc(
    learning_rate: Hyperparameter,
    max_learning_rate: Hyperparameter,
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
    maximize: bool = False,
) -> AbstractTransform:
    """AdamC: AdamW whose decay falls with the square of the learning rate.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·(η / η_max)·p)

    m̂ and v̂ are those of `ScaleByAdam`.

    While AdamW's decay is η·λ·p, this one falls with the square of the learning rate, so that the
    norms of the weights do not shrink at the end of a schedule. The paper corrects the decay of
    layers that a normalization follows, and not that of the last layer: give that one `sl.adamw` in
    a partition.

    **Arguments:**

    - `learning_rate`: η.
    - `max_learning_rate`: η_max, the largest value of the schedule, > 0.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `maximize`: whether to maximize the loss instead, as `.maximize()` does.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRateWithCorrectedDecay`.

    ```python
    >>> schedule = sl.schedules.cosine_decay(3e-3, decay_steps=1_000)
    >>> tx = sl.adamc(schedule, max_learning_rate=3e-3, weight_decay=0.1)

    ```

    ??? cite "Defazio, [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025"
    """
    return maximized_if(
        maximize,
        chain(
            ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov, nu_dtype=nu_dtype),
            ScaleByLearningRateWithCorrectedDecay(
                learning_rate, max_learning_rate, weight_decay, decay_where=decay_where
            ),
        ),
    )
