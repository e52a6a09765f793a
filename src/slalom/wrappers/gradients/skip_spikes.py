"""Skips steps in which the loss or the gradient norm spikes."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ... import fields, tree
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractPacedWrapper, run_if
from ..._core.protocol.writer import Writer
from ...tree.dtypes import as_canonical, as_float, canonical_float
from ...tree.types import Gradients, Params, Scalar, Updates

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
    inner: Any
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

    inner: AbstractTransform
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
            recent=jnp.zeros((watched, self.window), canonical_float()),
            seen=tree.fresh_count(),
            spikes_in_a_row=tree.fresh_count(),
            total_skipped=tree.fresh_count(),
            last_skipped=jnp.array(False),
            z=jnp.zeros((), canonical_float()),
            count=tree.fresh_count(),
            inner=self.inner.init(params),
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, SkipSpikesState]:
        here = here.with_context()
        state = here.state
        values = self._values(updates, here.context)
        z = self._deviations(values, state)
        is_finite = jnp.all(jnp.isfinite(values))
        is_spike = is_finite & jnp.any(z > as_canonical(self.at(here.context).sigma))
        restarts = is_spike & (state.spikes_in_a_row >= self.max_consecutive)
        runs = is_finite & (~is_spike | restarts)

        part = self.inner_part(here)

        def step(inner_state: Any) -> tuple[Any, Any]:
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
            values.append(as_float(self.demand("value", context.value)))
        if self.by != "loss":
            values.append(tree.norm_of_stored(updates))
        return jnp.stack([x.astype(canonical_float()) for x in values])

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
