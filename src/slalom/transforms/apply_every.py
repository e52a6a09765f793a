"""Transforms that hold updates back."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from .. import tree
from .._core.fields import count_field
from .._core.marks import param_like
from .._core.transform import AbstractTransform, Context, count_from_zero
from .._types import Params, Updates


class ApplyEveryState(eqx.Module):
    """What `ApplyEvery` remembers."""

    mini_step: Int[Array, ""]
    grad_acc: PyTree[Inexact[Array, "..."]] = param_like()


class ApplyEvery(AbstractTransform):
    """Holds updates back: every k-th step gives the sum of the last k, the others zeros.

    The links around it run in every step: a momentum behind it still moves. To run a whole
    transform once in k steps, at a fraction of the cost, use `tx.every_k(k)`.

    Differs from Optax: the sum is kept in at least float32, and a NaN ends with its window.

    **Arguments:**

    - `k`: how many steps make a window, an int ≥ 1.
    """

    k: int = count_field(1)

    elementwise: ClassVar[bool] = True

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

    def has_updated(self, state: ApplyEveryState) -> Bool[Array, "*runs"]:
        return state.mini_step == 0
