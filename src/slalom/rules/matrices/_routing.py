"""The choice of matrices and AdamW for the other parameters; shared by the recipes for matrices."""

from ..._core.protocol.transform import AbstractTransform
from ...tree.types import Hyperparameter, WhereLike
from ...where import matrix
from ...where.layout import LayoutLike
from ...where.resolve import Where
from ..adaptive.adam import adam, adamw
from ..shaping.decay import decayed


def chosen(where: WhereLike | None, layout: LayoutLike) -> Where:
    """The matrices that the user selects."""
    return matrix(layout) if where is None else matrix(layout) & where


def decay_if_any(
    weight_decay: Hyperparameter, decay_where: WhereLike | None
) -> tuple[AbstractTransform, ...]:
    """Weight decay, or nothing where there is none."""
    # Not `== 0`, which an array or a schedule would not answer with a bool.
    none = isinstance(weight_decay, int | float) and weight_decay == 0
    return () if none else (decayed(weight_decay, decay_where),)


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
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        rest = adam(rate, b1, b2)
    else:
        rest = adamw(rate, b1, b2, weight_decay=weight_decay)
    return rest.partition({where: rule}, names=(name,))
