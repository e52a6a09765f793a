"""Steps that are skipped: where a condition fails, gradients are not finite, or the loss spikes."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ... import fields, tree
from ..._core.fields.declare import checked_field
from ..._core.protocol.context import Context
from ..._core.protocol.parts import MIXED, Part
from ..._core.protocol.wrapper import AbstractPacedWrapper, AbstractWrapper, run_if
from ..._core.protocol.writer import Writer
from ..._core.text.calls import call
from ..._core.text.printing import code
from ...tree.types import Gradients, Params, PyTree, Scalar, Updates, is_function
from .skip import describe


class WhenState(eqx.Module):
    """The state of `When`."""

    last_ran: Bool[Array, "*runs"]
    """Whether the condition held in the last step."""
    count: Int[Array, "*runs"]
    """The number of steps in which it held: the inner transform's clock."""
    inner: PyTree
    """The inner transform's state."""


def _check_condition(name: str, condition: object) -> None:
    if not is_function(condition):
        raise TypeError(
            f"{name} must be a function `condition(context, updates)` that returns a bool scalar, "
            f"got {condition!r} of type {type(condition).__name__}."
        )


class When(AbstractWrapper[WhenState]):
    """Applies the inner transform only while a condition holds.

    Made by `tx.when`, which describes the arguments.

    While the condition does not hold, the inner transform is not executed and its state does not
    change. Schedules inside it count the steps in which the condition held.

    ```python
    >>> def early(context, updates):
    ...     return context.step < 1_000
    >>> tx = sl.AddNoise(0.1, 0.55, key=0).when(early) | sl.adam(1e-3)

    ```

    A whole optimizer must not pass raw gradients through, because they would be added to the
    parameters. Use `sl.adam(1e-3).when(condition, otherwise="zero")`.

    Under a `vmap` over the condition, `lax.cond` becomes a select: the results are the same, but
    steps in which it does not hold cost as much as others.
    """

    over: ClassVar[str] = "tree"
    has_clock: ClassVar[bool] = True

    condition: Callable[[Context, Updates], Any] = checked_field(_check_condition)
    otherwise: str = fields.choice_field("pass", "zero")

    def init(self, params: Params) -> WhenState:
        return WhenState(
            last_ran=jnp.array(False), count=tree.fresh_count(), inner=self.inner.init(params)
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, WhenState]:
        state, part = here.state, self.inner_part(here)
        holds = self._holds(here.context, updates)

        def step(inner_state: PyTree) -> tuple[Any, Any]:
            return part._replace(state=inner_state).run(write, updates)

        passes = self.otherwise == "pass"
        instead = updates if passes and write.returns else None
        result, inner = run_if(
            holds, step, write, here.params, state.inner, skips=part, instead=instead
        )
        if passes and not write.returns:
            # Written outside the conditional, because XLA updates the parameters in place only in a
            # branch that does not change them.
            held = write.plain(result) if write.adds else here.params
            passed = write(held, updates)
            result = jax.tree.map(lambda ran, raw: jnp.where(holds, ran, raw), result, passed)
        count = jnp.where(holds, tree.increment(state.count), state.count)
        return result, WhenState(holds, count, inner)

    def _holds(self, context: Context, updates: Updates) -> Bool[Array, ""]:
        name = code(self.condition)
        try:
            holds = call("When.condition", self.condition, context=context, updates=updates)
        except jax.errors.TracerBoolConversionError:
            raise TypeError(
                f"The condition {name} of `.when` branches in Python on a traced value. Return the "
                "comparison itself, `context.step < n`, and combine several with `&` and `|` "
                "instead of `and` and `or`."
            ) from None
        if (got := describe(holds)) != "a bool scalar":
            raise TypeError(
                f"The condition {name} of `.when` must return a bool scalar, got {got}. Return a "
                "comparison such as `context.step < n`, and reduce arrays with `jnp.all` or "
                "`jnp.any`."
            )
        return jnp.asarray(holds)

    def has_updated(self, state: WhenState) -> Bool[Array, "*runs"] | bool:
        inner = self.inner.has_updated(state.inner)
        if self.otherwise == "zero":
            return state.last_ran & inner
        return True if inner is True else ~state.last_ran | inner

    def signs(self, params: Params) -> tuple[int | None, ...]:
        signs = self.inner.signs(params)
        if self.otherwise == "zero":
            return signs
        return tuple({-1: MIXED, 0: 1}.get(s, s) if s is not None else None for s in signs)


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
    inner: PyTree
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

    max_consecutive_errors: int = fields.count_field(5, least=0)
    on_limit: str = fields.choice_field("accept", "skip", "raise")
    check: str = fields.choice_field("grads", "both")

    metric_fields: ClassVar[tuple[str, ...]] = ("notfinite_count", "last_finite", "total_notfinite")

    def init(self, params: Params) -> IfFiniteState:
        return IfFiniteState(
            notfinite_count=tree.fresh_count(),
            last_finite=jnp.array(True),
            total_notfinite=tree.fresh_count(),
            count=tree.fresh_count(),
            inner=self.inner.init(params),
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, IfFiniteState]:
        state, part = here.state, self.inner_part(here)

        def step(inner_state: PyTree) -> tuple[Any, Any]:
            return part._replace(state=inner_state).run(write, updates)

        def result_is_finite(inner_state: PyTree) -> Array:
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

    @property
    def guard(self) -> Callable[[str, IfFiniteState], None] | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
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


LEAST_DEVIATION = 0.01
"""The least standard deviation, relative to the mean. After constant values any rise would
otherwise be a spike."""


class SkipSpikesState(eqx.Module):
    """The state of `SkipSpikes`."""

    total_skipped: Int[Array, "*runs"]
    """The total number of skipped steps."""
    last_skipped: Bool[Array, "*runs"]
    """Whether the last step was skipped."""
    z: Scalar
    """The distance of the last value from the mean, in standard deviations."""
    count: Int[Array, "*runs"]
    """The number of steps of the inner transform: its clock."""
    inner: PyTree
    """The inner transform's state."""
    recent: Float[Array, "*runs watched window"] = fields.until_reset()
    """The last values of the loss and of the gradient norm in steps that were not skipped."""
    seen: Int[Array, "*runs"] = fields.until_reset()
    """The number of values in the window since its last restart."""
    spikes_in_a_row: Int[Array, "*runs"] = fields.until_reset()
    """The number of consecutive spikes that were skipped, up to the last step."""


class SkipSpikes(AbstractPacedWrapper[SkipSpikesState]):
    """Skips steps whose loss or gradient norm lies far above its recent values.

    Made by `tx.skip_spikes`, which describes the arguments.

    With the mean m and the standard deviation s of the last values, a value v is a spike if

        z = (v − m) / max(s, |m|/100) > σ

    In a skipped step the inner transform is not executed and its state does not change, so
    schedules inside it do not advance. Skipped values stay out of the window. After
    `max_consecutive` skipped spikes in a row the next one is accepted, and the window restarts with
    it: the level has changed for good. Nothing is a spike before half a window is filled. Steps in
    which a value is not finite are always skipped, and change neither the window nor the count of
    spikes in a row.

    `opt.metrics` contains `skipped`, whether the last step was, `total_skipped`, and `z`, the
    larger of the two, which is 0 before half a window is filled.

    The condition depends on all gradients, so all of them are in memory at once, even with
    `by="loss"`. Inside `.every_k` the values are means over windows. Wrap a clip too, `(clip |
    adamw).skip_spikes()`, or it sees the norms of clipped gradients.

    Under a `vmap` over the gradients, `lax.cond` becomes a select: the results are the same, but
    skipped steps cost as much as others.
    """

    sigma: fields.Number = fields.hyperparameter(6.0, within="(0, inf]")
    window: int = fields.count_field(128, least=2)
    by: str = fields.choice_field("both", "loss", "grad_norm")
    max_consecutive: int = fields.count_field(20, least=1)

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        return () if self.by == "grad_norm" else ("value",)

    @property
    def follows_loss(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        return self.by != "grad_norm"

    def init(self, params: Params) -> SkipSpikesState:
        watched = 2 if self.by == "both" else 1
        return SkipSpikesState(
            recent=jnp.zeros((watched, self.window), tree.canonical_float()),
            seen=tree.fresh_count(),
            spikes_in_a_row=tree.fresh_count(),
            total_skipped=tree.fresh_count(),
            last_skipped=jnp.array(False),
            z=jnp.zeros((), tree.canonical_float()),
            count=tree.fresh_count(),
            inner=self.inner.init(params),
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, SkipSpikesState]:
        state = here.state
        values = self._values(updates, here.context)
        z = self._deviations(values, state)
        is_finite = jnp.all(jnp.isfinite(values))
        is_spike = is_finite & jnp.any(z > tree.as_canonical(self.at(here.context).sigma))
        restarts = is_spike & (state.spikes_in_a_row >= self.max_consecutive)
        runs = is_finite & (~is_spike | restarts)

        part = self.inner_part(here)

        def step(inner_state: PyTree) -> tuple[Any, Any]:
            return part._replace(state=inner_state).run(write, updates)

        result, inner = run_if(runs, step, write, here.params, state.inner, skips=part)
        before = jnp.where(restarts, 0, state.seen)
        # Where the window is full, the oldest value is replaced.
        taken = state.recent.at[:, before % self.window].set(values)
        in_a_row = state.spikes_in_a_row
        in_a_row = jnp.where(is_spike, tree.increment(in_a_row), in_a_row)
        total = state.total_skipped
        return result, SkipSpikesState(
            recent=jnp.where(runs, taken, state.recent),
            seen=jnp.where(runs, tree.increment(before), state.seen),
            spikes_in_a_row=jnp.where(runs, 0, in_a_row),
            total_skipped=jnp.where(runs, total, tree.increment(total)),
            last_skipped=~runs,
            z=jnp.max(z),
            count=jnp.where(runs, tree.increment(state.count), state.count),
            inner=inner,
        )

    def _values(self, updates: Updates, context: Context) -> Float[Array, " watched"]:
        values = []
        if self.by != "grad_norm":
            values.append(tree.as_float(self.demand("value", context.value)))
        if self.by != "loss":
            values.append(tree.norm_of_stored(updates))
        return jnp.stack([x.astype(tree.canonical_float()) for x in values])

    def _deviations(
        self, values: Float[Array, " watched"], state: SkipSpikesState
    ) -> Float[Array, " watched"]:
        """The distance of each value from the mean, in standard deviations."""
        is_held = jnp.arange(self.window, dtype=state.seen.dtype) < state.seen
        n = jnp.maximum(jnp.minimum(state.seen, self.window), 1).astype(values.dtype)
        # In units of the largest, whose squares do not overflow.
        largest = jnp.max(jnp.where(is_held, jnp.abs(state.recent), 0), axis=1)
        unit = jnp.where(largest == 0, 1, largest)
        scaled = jnp.where(is_held, state.recent / unit[:, None], 0)
        mean = jnp.sum(scaled, axis=1) / n
        apart = jnp.where(is_held, scaled - mean[:, None], 0)
        std = jnp.sqrt(jnp.sum(apart**2, axis=1) / n)
        least = jnp.maximum(std, LEAST_DEVIATION * jnp.abs(mean))
        # Values that were all zero have no scale to measure a rise by.
        is_known = (2 * state.seen >= self.window) & (least > 0)
        return jnp.where(is_known, (values / unit - mean) / jnp.where(least > 0, least, 1), 0)

    def has_updated(self, state: SkipSpikesState) -> Bool[Array, "*runs"]:
        return ~state.last_skipped & self.inner.has_updated(state.inner)

    def metrics(self, state: SkipSpikesState) -> dict[str, Array]:
        return {
            "skipped": state.last_skipped,
            "total_skipped": state.total_skipped,
            "z": state.z,
        }
