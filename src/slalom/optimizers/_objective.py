"""Descent or ascent."""

from .._core.protocol.transform import AbstractTransform


def maximized_if(maximize: bool, tx: AbstractTransform) -> AbstractTransform:
    """What a recipe returns: the transform, with `.maximize()` if the user asked for it."""
    return tx.maximize() if maximize else tx
