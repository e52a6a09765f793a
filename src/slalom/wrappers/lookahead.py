"""Slow weights that follow the fast ones."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, count_field, hyperparameter
from .._core.marks import param_like
from .._core.slots import reset
from .._core.transform import AbstractTransform
from .._core.wrapper import AbstractWrapper, run_if
from .._core.write import ADD, Writer
from .._core.writer import AbstractParameterWriter
from .._paths import leaf_paths
from .._types import Gradients, Params
from .write import refuse_written


class LookaheadState(eqx.Module):
    """The state of `Lookahead`."""

    steps_since_sync: Int[Array, ""]
    """The number of fast steps since the last slow one."""
    inner: Any
    """The inner transform's state."""
    wrote: Bool[Array, ""] | None
    """Whether the last step updated the parameters. `None` without `reset_state`, where the inner
    state contains this."""
    slow: PyTree[Inexact[Array, "..."]] = param_like("exact")
    """The slow weights, in at least float32."""


class Lookahead(AbstractWrapper[LookaheadState], AbstractParameterWriter[LookaheadState]):
    """The inner transform, with slow weights that move towards its weights every few steps.

    Made by `tx.lookahead`, which describes the arguments.

    With fast weights θ and slow weights φ, every k-th fast step is followed by

        φ ← φ + α·(θ − φ),   θ ← φ

    The model contains θ, and `opt.eval_params(model)` returns the model with φ. If the inner
    transform skips steps, as `.every_k` does, only its updates count as fast steps.

    Differs from Optax: the slow weights are in the state, so the parameters need no special type,
    and `reset_state` keeps the clocks of schedules.

    ??? cite "Zhang et al., [Lookahead Optimizer: k steps forward, 1 step
        back](https://arxiv.org/abs/1907.08610), 2019"
    """

    passes_gradients: ClassVar[bool] = True
    needs_whole_params: ClassVar[bool | None] = False

    inner: AbstractTransform
    sync_period: int = count_field(least=1)
    slow_step_size: Hyperparameter = hyperparameter(within="[0, 1]")
    reset_state: bool = eqx.field(default=False, static=True)

    def __check_init__(self):
        refuse_written(self, ".lookahead(...)")

    def init(self, params: Params) -> LookaheadState:
        return LookaheadState(
            slow=tree.copy(params, tree.accumulation_dtype),
            steps_since_sync=tree.fresh_count(),
            inner=self.inner.init(params),
            wrote=jnp.array(False) if self.reset_state else None,
        )

    def run(
        self,
        write: Writer,
        updates: Gradients,
        state: LookaheadState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, LookaheadState]:
        params = self.demand("params", params)
        part = self.inner_part(state, context, params)
        now = self.at(context)
        if write is ADD:
            fast, inner = part.run(ADD, updates)

            def meet(fast: Any, slow: Any) -> tuple[Any, Any]:
                def rule(now, f, s):
                    return s + now.slow_step_size * (f - s)

                met = tree.map_leaves(rule, (fast, slow), now)
                return tree.cast_like(met, fast), tree.cast_like(met, slow)

            return self._every_period(meet, fast, inner, state, params)

        fast, inner = part.run(write.returning, updates)

        def meet_by_update(fast: Any, slow: Any) -> tuple[Any, Any]:
            full = write.full(params)

            # The update from p to the new slow weight, and this weight. Without a policy of
            # `.write`, the fast weight is rounded as it is in a step.
            def rule(now, u, s, p, fast_now):
                ahead = now.slow_step_size * u + (1 - now.slow_step_size) * (s - p)
                return ahead, s + now.slow_step_size * (fast_now - s)

            trees = (fast, slow, full, tree.add(full, fast))
            ahead, slow_now = tree.map_leaves(rule, trees, now)
            return tree.cast_like(ahead, fast), tree.cast_like(slow_now, slow)

        wrote = self.inner.has_updated(inner)
        ahead, state = self._every_period(meet_by_update, fast, inner, state, params)
        if write.returns or wrote is True:
            return write(params, ahead), state

        def written(ahead: Any, _: None) -> tuple[Any, None]:
            return write(params, ahead), None

        return run_if(wrote, written, write, params, ahead, None)[0], state

    def _every_period(
        self, sync: Any, fast: Any, inner: Any, state: LookaheadState, params: Params
    ) -> tuple[Any, LookaheadState]:
        """The fast result and the slow weights, after `sync` if it is due."""
        wrote = self.inner.has_updated(inner)
        steps = state.steps_since_sync + jnp.asarray(wrote, jnp.int32)
        due = wrote & (steps >= self.sync_period)

        def meet(fast: Any, slow: Any, inner: Any) -> tuple[Any, Any, Any]:
            fast, slow = sync(fast, slow)
            if not self.reset_state:
                return fast, slow, inner
            # As with `opt.reset`, the state of parameters starts from scratch, but clocks, counters
            # and noise keys continue.
            own = tree.cast_like(slow, params)
            fresh = reset(self.inner, inner, self.inner.init(own), own, leaf_paths(own))
            # Ages are a vector after only some of the parameters were reset.
            return fast, slow, jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), fresh, inner)

        def keep(fast: Any, slow: Any, inner: Any) -> tuple[Any, Any, Any]:
            return fast, slow, inner

        fast, slow, inner = jax.lax.cond(due, meet, keep, fast, state.slow, inner)
        has_updated = jnp.asarray(wrote) if self.reset_state else None
        return fast, LookaheadState(jnp.where(due, 0, steps), inner, has_updated, slow)

    def has_updated(self, state: LookaheadState) -> Bool[Array, "*runs"] | bool:
        return self.inner.has_updated(state.inner) if state.wrote is None else state.wrote

    def eval_params(self, state: LookaheadState, params: Params) -> Params:
        del params
        return tree.copy(state.slow)
