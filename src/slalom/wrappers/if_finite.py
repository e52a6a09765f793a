"""No step where gradients are not finite."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .. import tree
from .._core.context import Context
from .._core.fields import choice_field, count_field
from .._core.transform import AbstractTransform
from .._core.wrapper import AbstractPacedTransform, run_if
from .._core.write import Write
from .._types import Gradients, Params


class IfFiniteState(eqx.Module):
    """What `IfFinite` remembers."""

    notfinite_count: Int[Array, "*runs"]
    """How many steps in a row were not finite, up to the last one."""
    last_finite: Bool[Array, "*runs"]
    """Whether the last step was finite."""
    total_notfinite: Int[Array, "*runs"]
    """How many steps were not finite in all."""
    count: Int[Array, "*runs"]
    """How often the inner transform ran: its clock."""
    inner: Any
    """The inner transform's state."""


class IfFinite(AbstractPacedTransform[IfFiniteState]):
    """The inner transform where the incoming gradients are finite; no update where they are not.

    Made with `tx.if_finite()`. In a step that is left out nothing of the inner transform is
    executed and no bit of its state changes, so schedules inside it do not advance. All
    gradients count together: one NaN leaves out the whole step.

    `opt.metrics` has `notfinite_count`, the number of such steps in a row, `last_finite`, and
    `total_notfinite`. At more than `max_consecutive_errors` of them in a row `on_limit` says
    what happens: `"accept"` applies the update as it is, `"skip"` goes on leaving out, and
    `"raise"` leaves out too and makes the *next* call of `opt.step` or of a training step a
    `FloatingPointError`. That is read on the host, which waits for the step before; inside an
    outer `jit` or `scan` the counter is traced and nothing is raised until it has left.

    With `check="both"` the result must be finite as well: the updates, or the new parameters
    where it is the last link. The inner transform is then computed twice, at first for its
    finiteness alone, because undoing a step would take a copy of parameters and state.

    Put the links that may spread a NaN inside: `(clip | adamw).if_finite()`. As links in front
    they would be computed to memory, where the condition needs them.

    Under a `vmap` that batches the gradients, `lax.cond` becomes a selection: values stay right,
    and steps that are left out cost what others cost.

    **Arguments:**

    - `inner`: the transform.
    - `max_consecutive_errors`: how many steps in a row may be left out, an int ≥ 0.
    - `on_limit`: `"accept"`, `"skip"` or `"raise"`.
    - `check`: `"grads"` or `"both"`.
    """

    fluent_method: ClassVar[str | None] = "if_finite"

    inner: AbstractTransform
    max_consecutive_errors: int = count_field(5, least=0)
    on_limit: str = choice_field("accept", "skip", "raise")
    check: str = choice_field("grads", "both")

    def init(self, params: Params) -> IfFiniteState:
        return IfFiniteState(
            notfinite_count=tree.fresh_count(),
            last_finite=jnp.array(True),
            total_notfinite=tree.fresh_count(),
            count=tree.fresh_count(),
            inner=self.inner.init(params),
        )

    def run(
        self,
        write: Write,
        updates: Gradients,
        state: IfFiniteState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, IfFiniteState]:
        part = self.inner_part(state, Context() if context is None else context, params)

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

        result, inner_state = run_if(runs, step, write, params, state.inner)
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
            what = "Gradients" if self.check == "grads" else "Gradients, or what became of them,"
            raise FloatingPointError(
                f"{what} were not finite in {in_a_row} steps in a row, and '{name}' allows "
                f"{self.max_consecutive_errors}. None of these steps changed a parameter: the "
                "model is as the last finite one left it. Look at the loss, the data and the "
                'learning rate; to go on without an end, write `on_limit="skip"`.'
            )
