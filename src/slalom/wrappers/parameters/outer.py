"""An optimizer around an optimizer: slow weights that move by the difference to the fast ones."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.engine.encoded import is_encoded
from ..._core.protocol.bases import AbstractParameterWriter
from ..._core.protocol.loss import OTHER_LOSSES, loss_of
from ..._core.protocol.parts import Part, instances, segments
from ..._core.protocol.transform import AbstractTransform, require_transform
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import RETURN, Writer
from ..._core.state.slots import reset
from ...rules.shaping.descent import ScaleByLearningRate
from ...tree.types import Gradients, Hyperparameter, Params
from .project import refuse_projected
from .schedule_free import ScheduleFree
from .write import refuse_written


class OuterState(eqx.Module):
    """The state of `Outer`."""

    steps_since_sync: Int[Array, "*runs"]
    """The number of fast steps since the last slow one."""
    syncs: Int[Array, "*runs"]
    """The number of slow steps: the outer optimizer's clock."""
    inner: PyTree
    """The inner transform's state."""
    optimizer: PyTree
    """The outer optimizer's state."""
    wrote: Bool[Array, "*runs"] | None
    """Whether the last step updated the parameters. `None` without `reset_state`, where the inner
    state contains this."""
    slow: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")
    """The slow weights, in at least float32."""


class Outer(AbstractWrapper[OuterState], AbstractParameterWriter[OuterState]):
    """The inner transform, and an outer optimizer that steps slow weights every few steps.

    Made by `tx.outer`, which describes the arguments.

    With fast weights θ and slow weights φ, every k-th fast step is followed by a step of the outer
    optimizer, whose gradient is the difference from the fast weights back to the slow ones:

        φ ← φ + u(φ − θ),   θ ← φ

    The model contains θ, and `opt.eval_params(model)` returns the model with φ. If the inner
    transform skips steps, as `.every_k` does, only its updates count as fast steps. Schedules in
    the outer optimizer count the slow steps.

    With `sl.sgd(0.7, momentum=0.9, nesterov=True)` this is SNOO, or DiLoCo on a single worker. With
    `sl.sgd(α)` it is Lookahead, which `tx.lookahead(k, α)` returns.

    The hyperparameters of the outer optimizer have paths such as
    `outer.optimizer.scale_by_learning_rate.learning_rate`. A name without a path, such as
    `learning_rate`, means the one of the inner transform.

    Differs from Optax's Lookahead: the slow weights are in the state, so the parameters need no
    special type, and `reset_state` keeps the clocks of schedules. Differs from SNOO's code: the
    first slow step comes after k fast ones, instead of after the first one.

    ??? cite "Zhang et al., [Lookahead Optimizer: k steps forward, 1 step
        back](https://arxiv.org/abs/1907.08610), 2019; Douillard et al., [DiLoCo: Distributed
        Low-Communication Training of Language Models](https://arxiv.org/abs/2311.08105), 2023"
    """

    passes_gradients: ClassVar[bool] = True
    over: ClassVar[str] = "tree"

    optimizer: AbstractTransform
    every: int = fields.count_field(least=1)
    reset_state: bool = eqx.field(default=False, static=True)

    def __check_init__(self):
        require_transform("Outer.optimizer", self.optimizer)
        for part in instances(self.optimizer, AbstractParameterWriter):
            raise ValueError(
                f"Outer.optimizer contains '{part.name}', which writes parameters itself. "
                f"Write `tx.outer(...).{segments(part.module)[0]}(...)`."
            )
        asked = loss_of(self.optimizer).askers
        using = [part for what in OTHER_LOSSES for part in asked.get(what, ())]
        # Wrappers only watch the value, as a plateau schedule does.
        using += [part for part in asked.get("value", ()) if not part.children()]
        for part in using:
            raise ValueError(
                f"The optimizer of `.outer` steps from the slow weights towards the fast ones, but "
                f"'{part.name}' in it uses the loss. Use it in the transform before `.outer`, and "
                "here an optimizer such as `sl.sgd(0.7)`."
            )
        refuse_written(self.inner, ".outer(...)")
        averages = _is_lookahead(self.optimizer)
        call = ".lookahead(...)" if averages else ".outer(...)"
        refuse_projected(self.inner, call, averages=averages)
        for part in instances(self.inner, ScheduleFree | Outer):
            raise ValueError(
                f"`.outer` and `.lookahead` move the parameters, but '{part.name}' inside them "
                "keeps others that would not move with them. Leave out one of them."
            )

    def init(self, params: Params) -> OuterState:
        slow = tree.copy(params, tree.accumulation_dtype)
        if any(sign in (0, 1) for sign in self.optimizer.signs(params)):
            raise ValueError(
                f"The optimizer of `.outer` must step against the gradient of every parameter, but "
                f"{self.optimizer!r} does not. Use an optimizer such as `sl.sgd(0.7)`."
            )
        return OuterState(
            slow=slow,
            steps_since_sync=tree.fresh_count(),
            syncs=tree.fresh_count(),
            inner=self.inner.init(params),
            optimizer=self.optimizer.init(slow),
            wrote=jnp.array(False) if self.reset_state else None,
        )

    def children(self, here: Part) -> tuple[Part, ...]:
        # The inner transform comes last, so that `opt.describe` shows its learning rate.
        return self._outer_part(here), self.inner_part(here)

    def _outer_part(self, here: Part) -> Part:
        path = ("optimizer", *segments(self.optimizer))
        state = None if here.state is None else here.state.optimizer
        part = here.child(path, self.optimizer, lambda outer: outer.optimizer, state)
        if here.context is None or here.state is None:
            return part
        return part._replace(context=here.context.replace(step=here.state.syncs))

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, OuterState]:
        params = self.demand("params", here.params)
        state = here.state
        fast, inner = self.inner_part(here).run(write, updates)
        wrote = self.inner.has_updated(inner)
        steps = state.steps_since_sync + jnp.asarray(wrote, jnp.int32)
        due = wrote & (steps >= self.every)
        # Without `reset_state` the inner state needs no branch.
        resets = inner if self.reset_state else None
        outer = self._outer_part(here)

        def sync(
            result: PyTree, slow: PyTree, outer_state: PyTree, inner: PyTree
        ) -> tuple[Any, Any, Any, Any]:
            full = write.full(params)
            new = here.context.constrained(write.new_params(params, result))
            back = tree.map_leaves(lambda _, s, f: s - f, (slow, new))
            # The slow weights know only this gradient.
            seen = outer.context.replace(grad=back, weight=None)
            part = outer._replace(state=outer_state, params=slow, context=seen)
            change, outer_state = part.run(RETURN, back)
            slow = tree.cast_like(here.context.constrained(tree.add(slow, change)), slow)
            total = tree.map_leaves(lambda _, s, p: s - p, (slow, full))
            result = tree.cast_like(write.assigning(slow)(params, total), result)
            return result, slow, outer_state, self._reset(inner, slow, params)

        result, slow, outer_state, resets = jax.lax.cond(
            due, sync, lambda *same: same, fast, state.slow, state.optimizer, resets
        )
        return result, OuterState(
            steps_since_sync=jnp.where(due, 0, steps),
            syncs=jnp.where(due, tree.increment(state.syncs), state.syncs),
            inner=resets if self.reset_state else inner,
            optimizer=outer_state,
            wrote=jnp.asarray(wrote) if self.reset_state else None,
            slow=slow,
        )

    def _reset(self, inner: PyTree, slow: Params, params: Params) -> PyTree:
        """The inner transform's state after a slow step."""
        if inner is None:
            return None
        # As with `opt.reset`, the state of parameters starts from scratch, but clocks, counters
        # and noise keys continue.
        start = tree.cast_like(slow, params)
        again = jax.tree.map(
            lambda old, x: old.encode(x) if is_encoded(old) and not is_encoded(x) else x,
            inner,
            self.inner.init(start),
            is_leaf=is_encoded,
        )
        fresh = reset(self.inner, inner, again, start, tree.leaf_paths(start))
        # Ages are a vector after only some of the parameters were reset.
        return jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), fresh, inner)

    def has_updated(self, state: OuterState) -> Bool[Array, "*runs"] | bool:
        wrote = self.inner.has_updated(state.inner) if state.wrote is None else state.wrote
        stepped = self.optimizer.has_updated(state.optimizer)
        # Where every step ends at the slow weights, it moves only if they do.
        return wrote & (stepped | (self.every > 1))

    def eval_params(self, here: Part) -> Params:
        return tree.copy(here.state.slow)


def _is_lookahead(optimizer: AbstractTransform) -> bool:
    """Whether the new slow weights are an average of the old ones and the fast ones."""
    rate = getattr(optimizer, "learning_rate", None)
    if not isinstance(optimizer, ScaleByLearningRate):
        return False
    return not isinstance(rate, float) or 0 <= rate <= 1


def lookahead(
    inner: AbstractTransform, sync_period: int, slow_step_size: Hyperparameter, reset_state: bool
) -> Outer:
    """Lookahead, with a slow step size in [0, 1]."""
    slow = ScaleByLearningRate(slow_step_size)
    if not _is_lookahead(slow):
        raise ValueError(
            f"`slow_step_size` of `.lookahead` must be in [0, 1], got {slow.learning_rate}. For "
            "other steps, use `.outer`."
        )
    return Outer(inner, slow, sync_period, reset_state)
