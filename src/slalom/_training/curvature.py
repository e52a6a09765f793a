"""Checks that a rule gets the loss whose curvature it uses."""

from collections.abc import Callable
from typing import Any

from ..losses import AbstractCurvatureLoss
from .options import Options


def check_curvature(loss_fn: Callable[..., Any], needs: set[str], options: Options) -> None:
    """Raises an error for a loss or an option that does not suit a rule that needs residuals."""
    knows = isinstance(loss_fn, AbstractCurvatureLoss)
    if knows and loss_fn.fixed_data is not None:
        for name in ("value_fn", "grad_fn"):
            if name in needs:
                raise TypeError(
                    f"A transform of this optimizer needs '{name}', the loss at other parameters, "
                    f"which {type(loss_fn).__name__} does not know: {loss_fn.fixed_data}. Use a "
                    "rule without a line search, such as `sl.natural_gradient`."
                )
    if "residuals" not in needs:
        return
    if not knows:
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


_REFUSED = {
    "compute_dtype": "whose systems need the digits of the parameters",
    "transform_grads": "not its gradients",
    "has_aux": "and such a loss returns nothing else",
    "has_weight": "and such a loss returns nothing else",
}
"""Why some options cannot be combined with residuals."""
