"""Transforms that search along their updates, and know the loss where they stopped."""

import abc
from typing import Any

from jaxtyping import Array, Bool

from ...tree.types import Scalar, Updates
from .transform import AbstractTransform


class AbstractLinesearch(AbstractTransform):
    """A transform that scales its updates by a learning rate for which it evaluates the loss."""

    @abc.abstractmethod
    def recall(self, state: Any) -> tuple[Scalar, Updates, Bool[Array, ""]] | None:
        """Loss and gradient at the parameters that the last step led to.

        **Arguments:**

        - `state`: this transform's state.

        **Returns:** the loss, the gradient, and whether they are known, which they are not before
        the first step and after a reset. `None` if the state does not keep the gradient.
        """
