"""AdamC: AdamW whose decay falls with the square of the learning rate."""

from typing import Any, ClassVar

from ... import fields
from ..._core.protocol.chain import chain
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules.adaptive.adam import ScaleByAdam
from ...rules.shaping.decay import decay_mask, where_field
from ...tree.types import Hyperparameter
from ...where.resolve import Where, WhereLike


class ScaleByLearningRateWithCorrectedDecay(AbstractRule[None]):
    """The last link of AdamC: a learning rate, and a decay that falls with its square.

        u ↦ −η·(u + λ·(η / η_max)·p)

    Weights in front of a normalization layer settle at a norm at which decay and gradient are in
    balance. If a schedule lowers η and the decay is η·λ, that norm falls, and the gradients grow
    near the end of training. With λ·η / η_max it stays the same. A constant η = η_max gives AdamW.

    **Arguments:**

    - `learning_rate`: η.
    - `max_learning_rate`: η_max, the largest value of the schedule, > 0.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    ??? cite "Defazio, [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025"
    """

    learning_rate: fields.Number = fields.hyperparameter()
    max_learning_rate: fields.Number = fields.hyperparameter(within="(0, inf)")
    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    decay_where: Where | None = where_field()

    needs: ClassVar[tuple[str, ...]] = ("params",)
    sets_learning_rate: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = -1

    def plans(self, params):
        return decay_mask(self.decay_where, params)

    def begin(self, state):
        self.decay = self.weight_decay * (self.learning_rate / self.max_learning_rate)

    def direction(self, g, leaf):
        return -self.learning_rate * (g + self.decay * self.p if self.plan else g)


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
) -> AbstractTransform:
    """AdamC: AdamW whose decay falls with the square of the learning rate.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·(η / η_max)·p)

    m̂ and v̂ are the means of `ScaleByAdam`.

    While AdamW's decay is η·λ·p, this one falls with the square of the learning rate, so that the
    norms of the weights do not shrink at the end of a schedule. The paper corrects the decay of
    layers that a normalization follows, but not the last layer: give the last one `sl.adamw` in a
    partition.

    **Arguments:**

    - `learning_rate`: η.
    - `max_learning_rate`: η_max, the largest value of the schedule, > 0.
    - `b1`, `b2`, `eps`, `eps_root`, `mu_dtype`: as in `ScaleByAdam`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `nesterov`: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRateWithCorrectedDecay`.

    ```python
    >>> schedule = sl.schedules.cosine_decay(3e-3, decay_steps=1_000)
    >>> tx = sl.contrib.adamc(schedule, max_learning_rate=3e-3, weight_decay=0.1)

    ```

    ??? cite "Defazio, [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        ScaleByLearningRateWithCorrectedDecay(
            learning_rate, max_learning_rate, weight_decay, decay_where=decay_where
        ),
    )
