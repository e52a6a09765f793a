"""Skips steps with non-finite gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ... import fields, tree
from ..._core.protocol.parts import Part
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractPacedWrapper, run_if
from ..._core.protocol.writer import Writer
from ...tree.types import Gradients, Params


class IfFiniteState(eqx.Module):
    """The state of `IfFinite`."""

    notfinite_count: Int[Array, "*runs"]
    """The number of consecutive non-finite steps, up to the last one."""
    last_finite: Bool[Array, "*runs"]
    """Whether the last step was finite."""
    total_notfinite: Int[Array, "*runs"]
    """The total number of non-finite steps."""
    count: Int[Array, "*runs"]
    """The number of steps of the inner transform: its clock."""
    inner: Any
    """The inner transform's state."""


class IfFinite(AbstractPacedWrapper[IfFiniteState]):
    """Skips steps in which the incoming gradients are not finite.

    Made by `tx.if_finite`, which describes the arguments.

    In a skipped step the inner transform is not executed and its state does not change, so
    schedules inside it do not advance. A single NaN in any gradient skips the whole step.

    `opt.metrics` contains `notfinite_count`, the number of consecutive non-finite steps,
    `last_finite`, and `total_notfinite`. After more than `max_consecutive_errors` of them,
    `on_limit` applies: `"accept"` applies the update anyway, `"skip"` keeps skipping, and
    `"raise"` also skips, but the *next* call of `opt.step` or of a training step raises a
    `FloatingPointError`. The counter is checked on the host, which waits for the previous step.
    Inside an outer `jit` or `scan` the counter is traced, so the error is raised afterwards.

    With `check="both"` the result must be finite too: the updates, or the new parameters if this
    is the last link. The inner transform is then computed twice, because undoing a step would
    require a copy of the parameters and the state.

    Wrap all links that may spread a NaN: `(clip | adamw).if_finite()`. The result of a link before
    this transform would have to be written to memory, because the condition depends on it.

    Under a `vmap` over the gradients, `lax.cond` becomes a select: the results are the same, but
    skipped steps cost as much as others.
    """

    inner: AbstractTransform
    max_consecutive_errors: int = fields.count_field(5, least=0)
    on_limit: str = fields.choice_field("accept", "skip", "raise")
    check: str = fields.choice_field("grads", "both")

    def init(self, params: Params) -> IfFiniteState:
        return IfFiniteState(
            notfinite_count=tree.fresh_count(),
            last_finite=jnp.array(True),
            total_notfinite=tree.fresh_count(),
            count=tree.fresh_count(),
            inner=self.inner.init(params),
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, IfFiniteState]:
        state, part = here.state, self.inner_part(here.with_context())

        def step(inner_state: Any) -> tuple[Any, Any]:
            return part._replace(state=inner_state).run(write, updates)

        def result_is_finite(inner_state: Any) -> Array:
            return tree.all_finite(write.plain(step(inner_state)[0]))

        finite = tree.all_finite(updates)
        if self.check == "both":
            finite = jax.lax.cond(finite, result_is_finite, lambda _: jnp.array(False), state.inner)
        in_a_row = jnp.where(finite, 0, tree.increment(state.notfinite_count))
        runs = finite
        if self.on_limit == "accept":
            runs = finite | (in_a_row > self.max_consecutive_errors)

        result, inner_state = run_if(runs, step, write, here.params, state.inner, skips=part)
        total = state.total_notfinite
        return result, IfFiniteState(
            notfinite_count=in_a_row,
            last_finite=finite,
            total_notfinite=jnp.where(finite, total, tree.increment(total)),
            count=jnp.where(runs, tree.increment(state.count), state.count),
            inner=inner_state,
        )

    def has_updated(self, state: IfFiniteState) -> Bool[Array, "*runs"]:
        ran = state.last_finite
        if self.on_limit == "accept":
            ran = ran | (state.notfinite_count > self.max_consecutive_errors)
        return ran & self.inner.has_updated(state.inner)

    def metrics(self, state: IfFiniteState) -> dict[str, Array]:
        return {
            "notfinite_count": state.notfinite_count,
            "last_finite": state.last_finite,
            "total_notfinite": state.total_notfinite,
        }

    @property
    def guard(self) -> Callable[[str, IfFiniteState], None] | None:
        return self._check_limit if self.on_limit == "raise" else None

    def _check_limit(self, name: str, state: IfFiniteState) -> None:
        in_a_row = int(np.max(jax.device_get(state.notfinite_count), initial=0))
        if in_a_row > self.max_consecutive_errors:
            what = "gradients" if self.check == "grads" else "gradients or updates"
            raise FloatingPointError(
                f"The {what} were not finite in {in_a_row} steps in a row, and '{name}' allows "
                f"{self.max_consecutive_errors}. These steps were skipped, so the model is that of "
                "the last finite step. Check the loss, the data and the learning rate. To skip any "
                'number of steps, use `on_limit="skip"`.'
            )
