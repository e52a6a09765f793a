"""What a line search knows of the parameters that it led to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ... import tree
from ..._core.chain import Chain
from ..._core.transform import AbstractTransform
from ..._types import Scalar, Updates
from .backtracking import ScaleByBacktrackingLinesearch
from .zoom import ScaleByZoomLinesearch


def recalled(
    transform: AbstractTransform, state: Any, compute: Callable[[], tuple[Any, Updates]]
) -> tuple[Scalar, Updates]:
    """Loss and gradient at the parameters that the last step led to.

    **Arguments:**

    - `transform`: a line search, or a chain that ends with one: behind another link, or under a
        wrapper, the parameters are not the ones it knows.
    - `state`: its state.
    - `compute`: what gives loss and gradient in the first step, and after a reset.

    **Returns:** the loss in the dtype of the search's scalars, and the gradient.
    """
    last = transform
    while isinstance(last, Chain):
        last, state = last.links[-1], state[-1]
    # The rule is asked, not its state: that of a masked search is the same, with holes in it.
    kinds = (ScaleByBacktrackingLinesearch, ScaleByZoomLinesearch)
    if not isinstance(last, kinds) or state.grad is None:
        raise TypeError(
            "`reuse_linesearch=True` takes loss and gradient from a line search that ends the chain, such as "
            "`sl.ScaleByZoomLinesearch` or `sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`; "
            f"here it ends with {type(last).__name__}, which keeps none."
        )
    held = (state.value, state.grad)

    def first() -> tuple[Scalar, Updates]:
        value, grad = compute()
        return jnp.asarray(value, held[0].dtype), tree.cast_like(grad, held[1])

    known = jnp.isfinite(held[0]) & jnp.all(state.age > 0)
    return jax.lax.cond(known, lambda: held, first)
