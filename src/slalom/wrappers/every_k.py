"""One step of the inner transform for several mini-steps."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import tree
from .._core.fields import dtype_field
from .._core.marks import param_like
from .._core.paced import AbstractPacedTransform
from .._core.schedule import AbstractSchedule, as_schedule
from .._core.skip import as_skip, asked
from .._core.transform import AbstractTransform, Context, count_from_zero
from .._types import Params, Scalar, Updates
from ..tree.dtypes import canonical_float


class EveryKState(eqx.Module):
    """What `EveryK` remembers."""

    mini_step: Int[Array, ""]
    """How many mini-steps of this window are done."""
    weight: Float[Array, ""]
    """Their weights, added up."""
    value: Float[Array, ""]
    """The weighted mean of their losses, where these are passed."""
    count: Int[Array, ""]
    """How many windows are done: the inner transform's clock."""
    inner: Any
    """The inner transform's state."""
    skip: dict[str, Array] | None
    """What the condition for leaving a mini-batch out said of the last one, where there is one."""
    accumulated: PyTree = param_like()
    """The window's weighted mean so far (its sum, with `mean=False`)."""


class EveryK(AbstractPacedTransform):
    """The inner transform once in `k` mini-steps, on the mean of their gradients.

    Made with `tx.every_k(k)`. With weights wᵢ (`context.weight`, else 1) the accumulator holds
    the running mean

        a₁ = g₁,   aᵢ = aᵢ₋₁ + (gᵢ − aᵢ₋₁)·wᵢ / (w₁ + … + wᵢ)

    so it needs no division before the inner step, and a window begins by overwriting: a NaN
    ends with its window. The inner transform sees one step per window, with the window's mean
    `value` and its total `weight`. On the other mini-steps `update` returns zeros, `step` the
    parameters themselves, and nothing of the inner transform is executed.

    Under a `vmap` that batches this wrapper's own counters, `lax.cond` becomes a selection:
    values stay right, and idle steps cost what emitting ones cost.

    With `mean=False` the inner transform sees Σ wᵢ·gᵢ, and weight 1.

    A mini-batch that `skip` leaves out does not advance the window and touches no bit of what is
    accumulated. `opt.metrics` holds `mini_step`, how many mini-steps of this window are done,
    `gradient_step`, how many updates were emitted, and with `skip` `should_skip`, whether the last
    mini-batch was left out, and what the condition reports. Differs from Optax: after a mini-batch
    that was left out, nothing counts as emitted.

    **Arguments:**

    - `inner`: the transform.
    - `k`: how many mini-steps make a window: an int ≥ 1, or a schedule of the number of
        windows before, rounded to the nearest integer ≥ 1 and sampled at the window's start.
    - `mean`: the weighted mean; `False` for the weighted sum.
    - `accumulator_dtype`: the accumulator's dtype. Without it float32 for half-precision
        leaves and the leaf's own for wider ones.
    - `skip`: which mini-batches are left out: `sl.SkipNotFinite()`, `sl.SkipLargeUpdates(c)`,
        several joined with `|`, or any function `(updates, gradient_step, params) -> (bool scalar, dict
        of scalars)`, where `gradient_step` counts the updates emitted before.
    """

    fluent_method: ClassVar[str | None] = "every_k"

    inner: AbstractTransform
    fixed: int | None = eqx.field(static=True)
    scheduled: AbstractSchedule | None
    mean: bool = eqx.field(static=True)
    accumulator_dtype: np.dtype | None = dtype_field()
    skip: Callable[..., Any] | None = None

    elementwise: ClassVar[bool] = True

    def __init__(
        self,
        inner: AbstractTransform,
        k: int | AbstractSchedule | Callable[[Any], Any],
        *,
        mean: bool = True,
        accumulator_dtype: Any | None = None,
        skip: Callable[..., Any] | None = None,
    ):
        self.inner = inner
        self.fixed = int(k) if isinstance(k, int | np.integer) else None
        self.scheduled = as_schedule(k) if callable(k) else None
        self.mean = mean
        self.accumulator_dtype = accumulator_dtype
        self.skip = None if skip is None else as_skip(skip)
        if isinstance(k, bool) or (self.fixed is None and self.scheduled is None):
            raise TypeError(
                f"EveryK.k must be an int or a schedule, got {k!r} of type {type(k).__name__}."
            )
        if self.fixed is not None and self.fixed < 1:
            raise ValueError(f"EveryK.k must be at least 1 mini-step, got {k}.")

    @property
    def k(self) -> int | AbstractSchedule | None:
        """How many mini-steps make a window."""
        return self.scheduled if self.fixed is None else self.fixed

    def init(self, params: Params) -> EveryKState:
        def dtype(own: np.dtype) -> np.dtype:
            if self.accumulator_dtype is None:
                return tree.accumulation_dtype(own)
            return tree.storage_dtype(own, self.accumulator_dtype)

        return EveryKState(
            accumulated=tree.zeros_like(params, dtype),
            mini_step=count_from_zero(),
            weight=jnp.zeros((), canonical_float()),
            value=jnp.zeros((), canonical_float()),
            count=count_from_zero(),
            skip=self._nothing_skipped(params),
            inner=self.inner.init(params),
        )

    def _nothing_skipped(self, params: Params) -> dict[str, Array] | None:
        if self.skip is None:
            return None
        shapes = jax.eval_shape(self._ask, params, count_from_zero(), params)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def _said(
        self, grads: Updates, state: EveryKState, params: Params | None
    ) -> dict[str, Array] | None:
        """What the condition says of this mini-batch, as the state keeps it."""
        if state.skip is None:
            return None
        said = self._ask(grads, state.count, params)
        if said.keys() != state.skip.keys():
            raise ValueError(
                f"{self.skip!r} reports {sorted(said)}, and at binding it reported "
                f"{sorted(state.skip)}. The names must always be the same."
            )
        return {name: jnp.asarray(x, state.skip[name].dtype) for name, x in said.items()}

    def _ask(
        self, grads: Updates, count: Int[Array, ""], params: Params | None
    ) -> dict[str, Array]:
        """What the condition says of a mini-batch."""
        assert self.skip is not None
        wide = jax.tree.map(lambda g: jnp.asarray(g, tree.accumulation_dtype(g.dtype)), grads)
        skip, report = asked(self.skip, wide, count, params)
        return report | {"should_skip": skip}

    def pace(
        self,
        grads: Updates,
        state: EveryKState,
        params: Params | None,
        context: Context | None,
        inner: Callable[..., tuple[Any, Any]],
        hold: Callable[[Any], Any],
    ) -> tuple[Any, EveryKState]:
        weight = jnp.ones((), canonical_float())
        if context is not None and context.weight is not None:
            weight = jnp.asarray(context.weight, canonical_float())
        # Mini-batches of weight 0 leave no trace, also as the first ones of a window.
        first = (state.mini_step == 0) | (state.weight == 0)
        total = jnp.where(state.mini_step == 0, 0, state.weight) + weight
        share = weight / jnp.where(total == 0, 1, total)

        said = self._said(grads, state, params)
        skip = None if said is None else said["should_skip"]
        accumulated = self._accumulate(state.accumulated, grads, first, weight, share, skip)
        value = None
        if context is not None and context.value is not None:
            loss = jnp.asarray(context.value, canonical_float())
            value = _mean(state.value, loss, first, weight, share)
            value = _unless(skip, value, state.value)

        outer = Context() if context is None else context
        # A sum is complete in itself: weighed again, sums of sums would be too large.
        seen = outer.at(
            state.count, value=value, weight=total if self.mean else jnp.ones_like(total)
        )
        if outer.grad is not None:
            seen = seen.at(state.count, grad=accumulated)

        def emit(accumulated: Any, inner_state: Any) -> tuple[Any, Any]:
            return inner(accumulated, inner_state, params, seen)

        shapes, _ = jax.eval_shape(emit, accumulated, state.inner)

        def idle(accumulated: Any, inner_state: Any) -> tuple[Any, Any]:
            del accumulated
            return hold(shapes), inner_state

        done = state.mini_step + 1 >= self._window(state.count)
        if skip is not None:
            done = done & ~skip
        result, inner_state = jax.lax.cond(done, emit, idle, accumulated, state.inner)
        return result, EveryKState(
            accumulated=accumulated,
            mini_step=_unless(skip, jnp.where(done, 0, state.mini_step + 1), state.mini_step),
            weight=_unless(skip, total, state.weight),
            value=state.value if value is None else value,
            count=jnp.where(done, tree.increment(state.count), state.count),
            skip=said,
            inner=inner_state,
        )

    def _accumulate(
        self,
        accumulated: PyTree,
        grads: Updates,
        first: Any,
        weight: Scalar,
        share: Scalar,
        skip: Bool[Array, ""] | None,
    ) -> PyTree:
        def add_to_mean(a: Any, g: Any, weight: Any, share: Any) -> Any:
            return _unless(skip, _mean(a, g, first, weight, share), a)

        def add_to_sum(a: Any, g: Any, weight: Any, share: Any) -> Any:
            del share
            before = jnp.where(first, 0, a)
            return _unless(skip, jnp.where(weight == 0, before, before + g * weight), a)

        rule = add_to_mean if self.mean else add_to_sum
        new = tree.map_leaves(rule, (accumulated, grads), (weight, share))
        return tree.cast_like(new, accumulated)

    def _window(self, count: Int[Array, ""]) -> Int[Array, ""] | int:
        # The count stands still within a window, so sampling at any of its mini-steps is
        # sampling at its start.
        if self.scheduled is None:
            assert self.fixed is not None
            return self.fixed
        return jnp.maximum(jnp.round(self.scheduled(count)).astype(jnp.int32), 1)

    def has_updated(self, state: EveryKState) -> Bool[Array, "*runs"]:
        wrote = (state.mini_step == 0) & (state.count > 0)
        if state.skip is not None:
            wrote = wrote & ~state.skip["should_skip"]
        return wrote & self.inner.has_updated(state.inner)

    def metrics(self, state: EveryKState) -> dict[str, Array]:
        counts = {"mini_step": state.mini_step, "gradient_step": state.count}
        return counts | (state.skip or {})


def _unless(skip: Any, new: Any, before: Any) -> Any:
    """The new value, or every bit of the one before where the mini-batch is left out."""
    return new if skip is None else jnp.where(skip, before, new)


def _mean(before: Any, new: Any, first: Any, weight: Any, share: Any) -> Any:
    """A running mean with one more value in it; the first one overwrites, weight 0 is nothing."""
    mean = jnp.where(first, new, before + (new - before) * share)
    return jnp.where(weight == 0, jnp.where(first, 0, before), mean)
