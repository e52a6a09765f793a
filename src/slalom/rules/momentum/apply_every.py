"""A transform that emits updates every k steps."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.protocol.rule import AbstractRule
from ...tree.types import Params


class ApplyEveryState(eqx.Module):
    """The state of `ApplyEvery`."""

    mini_step: Int[Array, ""]
    grad_acc: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ApplyEvery(AbstractRule[ApplyEveryState]):
    """Emits the sum of the last k updates in every k-th step, and zeros in the other steps.

    The other links of a chain run in every step: a momentum that follows still decays. To run a
    whole transform once in k steps, at a fraction of the cost, use `tx.every_k(k)`.

    Differs from Optax: the sum is kept in at least float32, and a NaN affects only its own window.

    **Arguments:**

    - `k`: the number of steps in a window, an int ≥ 1.
    """

    k: int = fields.count_field(1)

    def init(self, params: Params) -> ApplyEveryState:
        return ApplyEveryState(
            mini_step=tree.fresh_count(),
            grad_acc=tree.zeros_like(params, tree.accumulation_dtype),
        )

    def begin(self, state):
        self.first, self.last = state.mini_step == 0, state.mini_step == self.k - 1
        state.mini_step = jnp.where(self.last, 0, state.mini_step + 1)

    def advance(self, g, leaf):
        leaf.grad_acc = jnp.where(self.first, g, leaf.grad_acc + g)

    def direction(self, g, leaf):
        return jnp.where(self.last, leaf.grad_acc, 0)

    def has_updated(self, state: ApplyEveryState) -> Bool[Array, "*runs"]:
        return state.mini_step == 0
