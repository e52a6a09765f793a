"""Transforms that search for a learning rate along the updates."""

import abc
from typing import Any

from jaxtyping import Array, Bool

from .._types import Scalar, Updates
from .transform import AbstractTransform


class AbstractLinesearch(AbstractTransform):
    """A transform that evaluates the loss at new parameters, and may store loss and gradient."""

    @abc.abstractmethod
    def recall(self, state: Any) -> tuple[Scalar, Updates, Bool[Array, ""]] | None:
        """The loss and the gradient at the parameters after the last step, and whether both are
        known; `None` if the state does not store the gradient."""
