"""Checks that a rule gets the loss whose curvature it uses."""

from collections.abc import Callable
from typing import Any

from ..residual_losses import AbstractCurvatureLoss
from .options import Options


def curvature_loss(
    loss_fn: Callable[..., Any], needs: set[str], options: Options
) -> AbstractCurvatureLoss | None:
    """The loss, if a rule needs its residuals; else `None`.

    Raises an error for a loss or an option that does not suit such a rule.
    """
    known = loss_fn if isinstance(loss_fn, AbstractCurvatureLoss) else None
    if known is not None and known.fixed_data is not None:
        for name in ("value_fn", "grad_fn"):
            if name in needs:
                raise TypeError(
                    f"A transform of this optimizer needs '{name}', the loss at other parameters, "
                    f"which {type(known).__name__} does not know: {known.fixed_data}. Use a "
                    "rule without a line search, such as `sl.natural_gradient`."
                )
    if "residuals" not in needs:
        return None
    if known is None:
        raise TypeError(
            "This optimizer needs 'residuals', which this loss does not know. Write the loss as a "
            "function of one example, `sl.train_step(sl.LeastSquares(residual))`, or as an "
            "`sl.OutputLoss`."
        )
    for name, reason in _REFUSED.items():
        if getattr(options, name):
            raise ValueError(
                f"This optimizer uses the residuals of the loss, {reason}. Remove `{name}`."
            )
    return known


_REFUSED = {
    "compute_dtype": "whose systems need the digits of the parameters",
    "transform_grads": "not its gradients",
    "has_aux": "and such a loss returns nothing else",
    "has_weight": "and such a loss returns nothing else",
}
"""Why some options cannot be combined with residuals."""
