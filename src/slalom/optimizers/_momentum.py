"""Momentum that is switched off by default."""

from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.protocol.transform import AbstractTransform
from ..rules import Trace


def momentum_if_any(
    momentum: Hyperparameter | None, nesterov: bool, accumulator_dtype: Any = None
) -> tuple[AbstractTransform, ...]:
    """The link of the momentum, or nothing where there is none."""
    if momentum is not None:
        return (Trace(momentum, nesterov, accumulator_dtype),)
    if nesterov:
        raise ValueError(
            "`nesterov=True` has no effect without momentum. Pass `momentum=0.9` too, or leave it "
            "out."
        )
    return ()
