"""Fast steps, and slow weights that follow them."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from .. import tree
from .._core.fields import Hyperparameter, count_field, hyperparameter
from .._core.marks import param_like
from .._core.transform import AbstractTransform, Context, count_from_zero
from .._core.wrapper import AbstractWrapper
from .._core.writer import AbstractParameterWriter
from .._types import Params, Updates


class LookaheadState(eqx.Module):
    """What `Lookahead` remembers."""

    steps_since_sync: Int[Array, ""]
    """How many fast steps were made since the last slow one."""
    inner: Any
    """The fast transform's state."""
    wrote: Bool[Array, ""] | None
    """Whether the last step was made; only with `reset_state`, which makes the inner one forget."""
    slow: PyTree[Inexact[Array, "..."]] = param_like()
    """The slow weights."""


class Lookahead(AbstractWrapper, AbstractParameterWriter):
    """The inner transform as the fast one of two: slow weights follow every few steps.

    Made with `tx.lookahead(sync_period, slow_step_size)`. Of fast weights θ and slow ones φ,
    every k-th fast step is followed by

        φ ← φ + α·(θ − φ),   θ ← φ

    The model holds θ; `opt.eval_params(model)` gives it with φ. Where the inner transform is
    paced, as by `.every_k`, the fast steps are those that it emits.

    Differs from Optax: the parameters are of no special type, since the slow ones are state;
    and with `reset_state` schedules keep their clock, since it is no state.

    **Arguments:**

    - `inner`: the fast transform.
    - `sync_period`: k, an int ≥ 1.
    - `slow_step_size`: α, in [0, 1].
    - `reset_state`: whether the inner transform's state starts anew after each slow step.

    ??? cite "Zhang et al., [Lookahead Optimizer: k steps forward, 1 step
        back](https://arxiv.org/abs/1907.08610), 2019"
    """

    fluent_method: ClassVar[str | None] = "lookahead"

    inner: AbstractTransform
    sync_period: int = count_field(least=1)
    slow_step_size: Hyperparameter = hyperparameter(within="[0, 1]")
    reset_state: bool = eqx.field(default=False, static=True)

    def init(self, params: Params) -> LookaheadState:
        return LookaheadState(
            slow=tree.copy(params),
            steps_since_sync=count_from_zero(),
            inner=self.inner.init(params),
            wrote=jnp.array(False) if self.reset_state else None,
        )

    def update(
        self,
        updates: Updates,
        state: LookaheadState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, LookaheadState]:
        params = self.demand("params", params)
        fast, inner = self.run("update", updates, state, params, context)
        step_size = self.at(context).slow_step_size

        def sync(fast: Any, slow: Any) -> tuple[Any, Any]:
            # What takes p to the new slow weight s + α·(p + u − s), and this weight itself.
            def rule(u, s, p, alpha):
                ahead = alpha * u + (1 - alpha) * (s - p)
                return ahead, p + ahead

            ahead, slow_now = tree.map_leaves(rule, (fast, slow, params), (step_size,))
            return tree.cast_like(ahead, fast), tree.cast_like(slow_now, slow)

        return self._every_period(sync, fast, inner, state)

    def step(
        self,
        grads: Updates,
        state: LookaheadState,
        params: Params,
        context: Context | None = None,
    ) -> tuple[Params, LookaheadState]:
        fast, inner = self.run("step", grads, state, params, context)
        step_size = self.at(context).slow_step_size

        def sync(fast: Any, slow: Any) -> tuple[Any, Any]:
            def rule(f, s, alpha):
                return s + alpha * (f - s)

            met = tree.cast_like(tree.map_leaves(rule, (fast, slow), (step_size,)), slow)
            return met, met

        return self._every_period(sync, fast, inner, state)

    def _every_period(
        self, sync: Any, fast: Any, inner: Any, state: LookaheadState
    ) -> tuple[Any, LookaheadState]:
        """What the fast transform made and the slow weights; both after `sync` when it is due."""
        wrote = self.inner.has_updated(inner)
        steps = state.steps_since_sync + jnp.asarray(wrote, jnp.int32)
        due = wrote & (steps >= self.sync_period)

        def meet(fast: Any, slow: Any, inner: Any) -> tuple[Any, Any, Any]:
            fast, slow = sync(fast, slow)
            if not self.reset_state:
                return fast, slow, inner
            # Ages have an entry for each leaf once some of them started anew by themselves.
            fresh = self.inner.init(slow)
            return fast, slow, jax.tree.map(_as_many, fresh, inner)

        def go_on(fast: Any, slow: Any, inner: Any) -> tuple[Any, Any, Any]:
            return fast, slow, inner

        fast, slow, inner = jax.lax.cond(due, meet, go_on, fast, state.slow, inner)
        known = jnp.asarray(wrote) if self.reset_state else None
        return fast, LookaheadState(jnp.where(due, 0, steps), inner, known, slow)

    def has_updated(self, state: LookaheadState) -> Bool[Array, "*runs"] | bool:
        return super().has_updated(state) if state.wrote is None else state.wrote

    def eval_params(self, state: LookaheadState, params: Params) -> Params:
        del params
        return tree.copy(state.slow)


def _as_many(fresh: Any, before: Any) -> Array:
    return jnp.broadcast_to(fresh, before.shape)
