"""The choice of matrices and AdamW for the other parameters; shared by the recipes for matrices."""

from typing import Any

from ..._core.fields.schedule import as_schedule
from ...tree.types import Hyperparameter, WhereLike, is_function
from ...where import matrix
from ...where.layout import LayoutLike
from ...where.resolve import Where
from .._base import AbstractTransform, chain
from ..adaptive.adam import ScaleByAdam
from ..shaping.descent import ScaleByLearningRate, decayed


def chosen(where: WhereLike | None, layout: LayoutLike) -> Where:
    """The matrices that the user selects."""
    return matrix(layout) if where is None else matrix(layout) & where


def descent(
    direction: AbstractTransform,
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """A direction with weight decay, if there is any, and a learning rate."""
    # Not `== 0`, which an array or a schedule would not answer with a bool.
    none = isinstance(weight_decay, int | float) and weight_decay == 0
    decay = () if none else (decayed(weight_decay, decay_where),)
    return chain(direction, *decay, ScaleByLearningRate(learning_rate))


def with_adam_elsewhere(
    rule: AbstractTransform,
    name: str,
    where: Where,
    learning_rate: Hyperparameter,
    adam_learning_rate: Hyperparameter | None,
    b1: Hyperparameter,
    b2: Hyperparameter,
    weight_decay: Hyperparameter,
) -> AbstractTransform:
    """The rule where it applies, and AdamW, or Adam without decay, for everything else.

    **Arguments:**

    - `rule`, `name`: the rule, and the label of its group.
    - `where`: the matrices that it trains, as `chosen` returns them.
    - `learning_rate`: the default of the learning rate of AdamW.
    - `adam_learning_rate`: the value from the user, or `None`.
    - `b1`, `b2`, `weight_decay`: as in `adamw`.
    """
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    rest = descent(ScaleByAdam(b1, b2), rate, weight_decay)
    return rest.partition({where: rule}, names=(name,))


def rate_beside_muon(learning_rate: Any, scale: str | None) -> Any:
    """The learning rate of AdamW beside Muon, if the user gives none."""
    if scale == "match_rms_adamw":
        return learning_rate
    rate = as_schedule(learning_rate) if is_function(learning_rate) else learning_rate
    return 0.015 * rate
