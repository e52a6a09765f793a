"""Transforms that hold updates back."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from .. import tree
from .._fields import param_like
from .._module import CHECK
from .._transform import AbstractTransform, Context, count_from_zero
from .._types import Params, Updates


class ApplyEveryState(eqx.Module):
    """What `ApplyEvery` remembers."""

    mini_step: Int[Array, ""]
    grad_acc: PyTree[Inexact[Array, "..."]] = param_like()


def _as_count(k: Any) -> Any:
    return int(k) if isinstance(k, np.integer) else k


def _check_count(name: str, k: Any) -> None:
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"{name} must be an int, got {k!r} of type {type(k).__name__}.")
    if k < 1:
        raise ValueError(f"{name} must be at least 1 step, got {k}.")


class ApplyEvery(AbstractTransform):
    """Holds updates back: every k-th step gives the sum of the last k, the others zeros.

    The links around it run in every step: a momentum behind it still moves. To run a whole
    transform once in k steps, at a fraction of the cost, use `tx.every_k(k)`.

    Differs from Optax: the sum is kept in at least float32, and a NaN ends with its window.

    **Arguments:**

    - `k`: how many steps make a window, an int ≥ 1.
    """

    k: int = eqx.field(default=1, static=True, converter=_as_count, metadata={CHECK: _check_count})

    def init(self, params: Params) -> ApplyEveryState:
        return ApplyEveryState(
            mini_step=count_from_zero(),
            grad_acc=tree.zeros_like(params, tree.accumulation_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: ApplyEveryState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ApplyEveryState]:
        del params, context
        first, last = state.mini_step == 0, state.mini_step == self.k - 1

        def rule(g: Any, acc: Any) -> tuple[Any, Any]:
            acc = jnp.where(first, g, acc + g)
            return jnp.where(last, acc, 0), acc

        made, acc = tree.map_leaves(rule, (updates, state.grad_acc))
        mini_step = jnp.where(last, 0, state.mini_step + 1)
        return made, ApplyEveryState(mini_step, tree.cast_like(acc, state.grad_acc))

    def emitted(self, state: ApplyEveryState) -> Bool[Array, ""]:
        return state.mini_step == 0
