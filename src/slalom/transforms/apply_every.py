"""A transform that emits updates every k steps."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from .. import tree
from .._core.context import Context
from .._core.fields import count_field
from .._core.marks import param_like
from .._core.transform import AbstractTransform
from .._types import Params, Updates


class ApplyEveryState(eqx.Module):
    """The state of `ApplyEvery`."""

    mini_step: Int[Array, ""]
    grad_acc: PyTree[Inexact[Array, "..."]] = param_like()


class ApplyEvery(AbstractTransform[ApplyEveryState]):
    """Emits the sum of the last k updates in every k-th step, and zeros in the other steps.

    The other links of a chain run in every step: a momentum that follows still decays. To run a
    whole transform once in k steps, at a fraction of the cost, use `tx.every_k(k)`.

    Differs from Optax: the sum is kept in at least float32, and a NaN affects only its own window.

    **Arguments:**

    - `k`: the number of steps in a window, an int ≥ 1.
    """

    k: int = count_field(1)

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> ApplyEveryState:
        return ApplyEveryState(
            mini_step=tree.fresh_count(),
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

        def rule(_, g, acc):
            acc = jnp.where(first, g, acc + g)
            return jnp.where(last, acc, 0), acc

        new_updates, acc = tree.map_leaves(rule, (updates, state.grad_acc))
        mini_step = jnp.where(last, 0, state.mini_step + 1)
        return new_updates, ApplyEveryState(mini_step, tree.cast_like(acc, state.grad_acc))

    def has_updated(self, state: ApplyEveryState) -> Bool[Array, "*runs"]:
        return state.mini_step == 0
