"""The weight decay shared by the optimizers."""

from .._core.fields import Hyperparameter
from .._core.transform import AbstractTransform
from ..transforms import AddDecayedWeights
from ..where.resolve import WhereLike


def decayed(weight_decay: Hyperparameter, decay_where: WhereLike | None) -> AbstractTransform:
    """Weight decay of the selected parameters. `None` selects all of them."""
    link = AddDecayedWeights(weight_decay)
    return link if decay_where is None else link.mask(decay_where)
