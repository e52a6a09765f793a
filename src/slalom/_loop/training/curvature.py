"""Checks that a rule gets the loss whose curvature it uses."""

from collections.abc import Callable
from typing import Any

from ..._core.protocol.loss import Loss
from ..residual_losses import AbstractCurvatureLoss


def curvature_loss(loss_fn: Callable[..., Any], loss: Loss) -> AbstractCurvatureLoss | None:
    """The loss function, if a rule asks for its residuals; else `None`.

    Raises an error for one that does not suit such a rule.
    """
    known = loss_fn if isinstance(loss_fn, AbstractCurvatureLoss) else None
    if known is not None and known.fixed_data is not None:
        for name in ("value_fn", "grad_fn"):
            if loss.by(name):
                raise TypeError(
                    f"A transform of this optimizer needs '{name}', the loss at other parameters, "
                    f"which {type(known).__name__} does not know: {known.fixed_data}. Use a "
                    "rule without a line search, such as `sl.natural_gradient`."
                )
    if not loss.by("residuals"):
        return None
    if known is None:
        raise TypeError(
            "This optimizer needs 'residuals', which this loss does not know. Write the loss as a "
            "function of one example, `sl.train_step(sl.LeastSquares(residual))`, or as an "
            "`sl.OutputLoss`."
        )
    return known
