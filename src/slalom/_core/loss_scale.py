"""Transforms whose gradients are those of a loss that was multiplied by a scale."""

import abc
from collections.abc import Iterator
from typing import Any

from jaxtyping import Array, Float

from .traits import AbstractTraits
from .transform import AbstractTransform, State
from .walk import inner_transforms, transforms
from .wrapper import AbstractPacedTransform


class AbstractLossScale(AbstractPacedTransform[State]):
    """A transform that owns the scale of the loss, and divides the gradients by it."""

    @abc.abstractmethod
    def loss_scale(self, state: State) -> Float[Array, "*runs"]:
        """What to multiply the loss of the next step by."""


def loss_scale(transform: AbstractTransform, state: Any) -> Float[Array, "*runs"] | None:
    """What to multiply the loss of the next step by, or `None` if it is not scaled."""
    for part in transforms(transform, state):
        if isinstance(part.module, AbstractLossScale):
            return part.module.loss_scale(part.state)
    return None


def check_loss_scale(transform: AbstractTransform) -> None:
    """Raises an error if another transform would use gradients that are still scaled."""
    places = list(_places(transform, ()))
    if len(places) > 1:
        raise ValueError(
            "Two parts of this optimizer call `.scale_loss()`, but there is only one loss. Call it "
            "once, on the whole optimizer: `tx.scale_loss()`."
        )
    for part in transforms(transform) if places else ():
        if "residuals" in part.module.needs:
            raise ValueError(
                f"'{part.name}' computes its updates from the residuals of the loss, which "
                "`.scale_loss()` does not scale. Remove `.scale_loss()`, and keep the parameters "
                "in float32."
            )
    for outer in places[0] if places else ():
        if not outer.passes_gradients:
            raise ValueError(
                f"{type(outer).__name__} is outside of `.scale_loss()`, so it would use gradients "
                "that are still multiplied by the scale. Call `.scale_loss()` last, on the whole "
                "optimizer: `tx.scale_loss()`."
            )


def _places(
    transform: Any, outside: tuple[AbstractTraits, ...]
) -> Iterator[tuple[AbstractTraits, ...]]:
    """The transforms around each part that scales the loss."""
    if isinstance(transform, AbstractLossScale):
        yield outside
    for inner in inner_transforms(transform):
        yield from _places(inner, (*outside, transform))
