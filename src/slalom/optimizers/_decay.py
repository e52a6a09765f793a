"""The weight decay that recipes share."""

from .._fields import Hyperparameter
from .._selector import WhereLike
from .._transform import AbstractTransform
from ..transforms import AddDecayedWeights


def decayed(weight_decay: Hyperparameter, decay_where: WhereLike | None) -> AbstractTransform:
    """Weight decay on the selected parameters, or on all."""
    link = AddDecayedWeights(weight_decay)
    return link if decay_where is None else link.mask(decay_where)
