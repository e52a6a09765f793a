"""The loss and gradient that a line search has already computed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ... import tree
from ..._core.protocol.chain import Chain
from ..._core.protocol.loss import Loss
from ..._core.protocol.transform import AbstractTransform
from ...tree.types import Scalar, Updates


def recalled(
    transform: AbstractTransform, loss: Loss, compute: Callable[[], tuple[Scalar, Updates]]
) -> tuple[Scalar, Updates]:
    """Loss and gradient at the parameters that the last step led to.

    **Arguments:**

    - `transform`: a line search, or a chain that ends with one.
    - `loss`: the loss as they ask for it.
    - `compute`: computes the loss and gradient if the line search does not know them.

    **Returns:** the loss in the dtype of the line search's scalars, and the gradient.
    """
    kept = next((part.module.recall(part.state) for part in loss.by("recalled")), None)
    if kept is None:
        last = transform
        while isinstance(last, Chain):
            last = last.links[-1]
        raise TypeError(
            "`reuse_linesearch=True` takes loss and gradient from a line search that ends the "
            "chain, such as `sl.ScaleByZoomLinesearch` or "
            "`sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`. This chain ends with "
            f"{type(last).__name__}, which keeps no gradient."
        )
    value, grad, known = kept

    def from_scratch() -> tuple[Scalar, Updates]:
        new_value, new_grad = compute()
        return jnp.asarray(new_value, value.dtype), tree.cast_like(new_grad, grad)

    return jax.lax.cond(known, lambda: (value, grad), from_scratch)
