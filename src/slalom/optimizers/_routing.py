"""What the recipes for matrices share: which parameters are meant, and AdamW for the others."""

from .._core.fields import Hyperparameter
from .._core.transform import AbstractTransform
from ..where import matrix
from ..where.layout import LayoutLike
from ..where.resolve import Where, WhereLike
from ._decay import decayed
from .adam_family import adam, adamw


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


def adam_for_the_rest(
    learning_rate: Hyperparameter,
    adam_learning_rate: Hyperparameter | None,
    b1: Hyperparameter,
    b2: Hyperparameter,
    weight_decay: Hyperparameter,
) -> AbstractTransform:
    """AdamW, or Adam without decay, for what is no matrix of a hidden layer."""
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return adam(rate, b1, b2)
    return adamw(rate, b1, b2, weight_decay=weight_decay)
