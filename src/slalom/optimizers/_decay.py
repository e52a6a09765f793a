"""The weight decay shared by the optimizers."""

from .._core.fields.declare import Hyperparameter
from .._core.protocol.transform import AbstractTransform
from ..rules import AddDecayedWeights, ScaleByLearningRate, SubtractDecayedWeights
from ..where.resolve import WhereLike


def decayed(weight_decay: Hyperparameter, decay_where: WhereLike | None) -> AbstractTransform:
    """Weight decay of the selected parameters. `None` selects all of them."""
    return _on(AddDecayedWeights(weight_decay), decay_where)


def decayed_descent(
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter,
    decay_where: WhereLike | None,
    independent_decay: bool,
) -> tuple[AbstractTransform, AbstractTransform]:
    """The last two links of an optimizer: weight decay, and a learning rate that scales it.

    An independent decay comes after the learning rate.
    """
    rate = ScaleByLearningRate(learning_rate)
    if independent_decay:
        return rate, _on(SubtractDecayedWeights(weight_decay), decay_where)
    return decayed(weight_decay, decay_where), rate


def _on(link: AbstractTransform, where: WhereLike | None) -> AbstractTransform:
    return link if where is None else link.mask(where)
