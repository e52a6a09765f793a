"""Gradient accumulation."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ... import fields, tree
from ..._core.engine.encoded import decoded
from ..._core.engine.manual_axes import refuse_parts
from ..._core.engine.run import run_rule
from ..._core.fields.declare import count_or_schedule
from ..._core.fields.schedule import AbstractSchedule, count_at
from ..._core.protocol.context import Context, Merge
from ..._core.protocol.parts import Part, segments, transforms
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.wrapper import AbstractPacedWrapper, run_if, skipped
from ..._core.protocol.writer import RETURN, Writer
from ...tree.types import Gradients, Params, Updates
from .skip import AbstractSkip, as_skip, evaluate_skip


def _as_skip(skip: object) -> Callable[..., Any] | None:
    return None if skip is None else as_skip(skip)


WINDOW = {
    "step": "count",
    "value": "mean",
    "grad": "mean",
    "terms": "mean",
    "weight": "sum",
    "max_logits": "max",
    "value_fn": "refused",
    "residuals": "refused",
    # For estimates of the curvature, one mini-batch is enough.
    **dict.fromkeys(("grad_fn", "sampled_grad_fn"), "last"),
    # The caller decides what they are in each mini-step.
    **dict.fromkeys(("key", "per_param", "extra"), "last"),
    # They do not depend on the mini-batch.
    **dict.fromkeys(("bounds", "constrain", "gathered", "shardings", "stored_clock"), "last"),
}
"""The value of each entry of the context for the inner transform: the number of windows, the mean,
sum or maximum over the window, or the entry of the last mini-batch."""

_REFUSED = {
    "residuals": (
        "would see the linearization of one mini-batch only. Take a larger batch in each step "
        "instead, with `chunk=` to save memory."
    ),
    "value_fn": (
        "would compare the mean loss of the window with the loss of its last mini-batch. Take a "
        "larger batch in each step instead, with `microbatches=` of `sl.train_step` to save memory."
    ),
    "terms": (
        "would see the inner products of the gradients of one mini-batch only. Change the order, "
        "`tx.every_k(k).combine(...)`, or use a combination that needs only the losses, such as "
        "`sl.combine.ReLoBRaLo()`."
    ),
}
"""Why a transform that needs such an entry is refused, unless it says how to merge it."""


class EveryKState(eqx.Module):
    """The state of `EveryK`."""

    value: Float[Array, ""]
    """The weighted mean of the losses in the window, if losses are passed."""
    count: Int[Array, ""]
    """The number of completed windows: the inner transform's clock."""
    updated: Bool[Array, ""]
    """Whether the last mini-step completed a window."""
    inner: PyTree
    """The inner transform's state."""
    skip: dict[str, Array] | None
    """The report of the skip condition on the last mini-batch."""
    merged: dict[str, Array]
    """Other values of the window for the inner transform, such as its largest attention logits."""
    mini_step: Int[Array, ""] = fields.until_reset()
    """The number of mini-steps done in the present window."""
    weight: Float[Array, "*leaves"] = fields.per_leaf()
    """The sum of their weights, an entry per parameter once some were reset."""
    accumulated: PyTree = fields.param_like()
    """The window's weighted mean so far (with `mean=False`, its sum)."""


class _Window(eqx.Module):
    """The state of `_Accumulate`."""

    accumulated: PyTree = fields.param_like()


class _Accumulate(AbstractRule[_Window]):
    """Takes the gradient of a mini-batch into the mean or the sum of a window.

    **Arguments:**

    - `first`: whether the window begins.
    - `weight`: the weight of the mini-batch.
    - `share`: its share of the window so far, a number or one for each leaf.
    - `skip`: whether the mini-batch is skipped; `None` without a condition.
    - `mean`: whether the window has a mean, and not a sum.
    """

    first: Bool[Array, "*leaves"]
    weight: Float[Array, ""]
    share: Float[Array, "*leaves"]
    skip: Bool[Array, ""] | None
    mean: bool = eqx.field(static=True)

    def begin(self, state):
        # As numbers of this step, of which a leaf reads its own.
        self.first, self.weight, self.share = self.first, self.weight, self.share
        self.skip = self.skip

    def advance(self, g, leaf):
        old, how = leaf.accumulated, "mean" if self.mean else "sum"
        new = _merged(how, old, g, self.first, self.weight, self.share)
        leaf.accumulated = _unless(self.skip, new, old)

    def direction(self, g, leaf):
        return g


class EveryK(AbstractPacedWrapper[EveryKState]):
    """Runs the inner transform once every `k` mini-steps, on the mean of their gradients.

    Made by `tx.every_k`, which describes the arguments.

    With weights wᵢ (`context.weight`, which defaults to 1) the accumulator holds the running mean

        a₁ = g₁,   aᵢ = aᵢ₋₁ + (gᵢ − aᵢ₋₁)·wᵢ / (w₁ + … + wᵢ)

    A window begins by overwriting the accumulator, so a NaN affects only its own window. The inner
    transform sees one step per window, with the mean `value` and the total `weight` of the window.
    On the other mini-steps the inner transform is not executed: `update` returns zeros and `step`
    returns the parameters themselves. With `mean=False` the inner transform sees Σ wᵢ·gᵢ and a
    weight of one. Mini-batches of weight 0 leave no trace, and a window of them makes no step.

    Of the other inputs of a step, the inner transform sees the mean of the `terms` of the loss and
    the maximum of `max_logits`. Transforms that compare the loss at other parameters with its
    value, such as line searches, would compare two mini-batches, so they are refused, as are
    residuals and combinations of gradients. The other inputs, such as the functions for estimates
    of the curvature, are those of the last mini-batch.

    `opt.metrics` has `mini_step`, the number of mini-steps done in the current window,
    `gradient_step`, the number of updates made, and `mean_value`, the mean loss of the window if
    losses are passed. With `skip` it also has `should_skip`, whether the last mini-batch was
    skipped, and what the condition reports. A skipped mini-batch changes neither the window nor the
    accumulator. Differs from Optax: `opt.has_updated` is false after a skipped mini-batch.

    A full `opt.reset(model)` restarts the window. After a reset of some parameters, their mean
    covers the rest of the window.

    Under a `vmap` that batches this transform's own counters, `lax.cond` becomes a select: the
    results are the same, but every mini-step costs as much as a full step.
    """

    k: int | Int[Array, "*runs"] | AbstractSchedule = count_or_schedule("mini-step")
    mean: bool = eqx.field(default=True, static=True, kw_only=True)
    accumulator_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    skip: Callable[..., Any] | None = eqx.field(default=None, converter=_as_skip, kw_only=True)

    over: ClassVar[str] = "number"
    reads_encoded: ClassVar[tuple[str, ...]] = ("state",)

    @property
    def passes_gradients(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        """Whether no condition measures the gradients."""
        return self.skip is None

    def __check_init__(self):
        for part in transforms(self.inner):
            needs, (method, *_) = part.module.needs, (*segments(part.module), "")
            for name, message in _REFUSED.items():
                if name in needs and name not in part.module.merges:
                    raise ValueError(f"'{part.name}' inside `.every_k` {message}")
            if part.module.computes_gradient:
                raise ValueError(
                    f"'{part.name}' inside `.every_k` would compute the gradient of one "
                    f"mini-batch only. Change the order: `tx.every_k(k).{method}(...)`."
                )

    def init(self, params: Params) -> EveryKState:
        report = jax.eval_shape(self._skip_report, params, tree.fresh_count(), params)
        return EveryKState(
            accumulated=tree.zeros_like(
                params, lambda leaf: tree.storage_dtype(leaf, self.accumulator_dtype)
            ),
            mini_step=tree.fresh_count(),
            weight=jnp.zeros((), tree.canonical_float()),
            updated=jnp.array(False),
            value=jnp.zeros((), tree.canonical_float()),
            count=tree.fresh_count(),
            skip=tree.zeros_of(report, params),
            merged={
                name: merge.start(part.module, part.params)
                for part in transforms(self.inner, params=params)
                for name, merge in part.module.merges.items()
            },
            inner=self.inner.init(params),
        )

    def _merges(self) -> dict[str, Merge]:
        """The entries of the context that are merged over the window."""
        inside = (part.module.merges for part in transforms(self.inner))
        return {name: x for merges in inside for name, x in merges.items()}

    def _skip_report(
        self, grads: Updates, count: Int[Array, ""], params: Params | None
    ) -> dict[str, Array] | None:
        """The metrics of the skip condition for a mini-batch."""
        if self.skip is None:
            return None
        skip, report = evaluate_skip(self.skip, tree.widened(grads), count, params)
        return report | {"should_skip": skip}

    def children(self, here: Part) -> tuple[Part, ...]:
        inner = self.inner_part(here)
        if not isinstance(self.skip, AbstractSkip):
            return (inner,)
        # A condition is evaluated on the clock of the transform that it holds back.
        skip = here.child(("skip",), self.skip, lambda outer: outer.skip)
        return inner, skip._replace(context=inner.context)

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, EveryKState]:
        state, params = here.state, here.params
        weight, totals = _weights(state, here.context)
        # Mini-batches of weight 0 leave no trace, also as the first ones of a window.
        first = (state.mini_step == 0) | (state.weight == 0)
        shares = weight / jnp.where(totals == 0, 1, totals)

        skip = None
        report = self._skip_report(updates, state.count, params)
        if report is not None:
            refuse_parts("The `skip` of `.every_k`", updates, params)
            if report.keys() != state.skip.keys():
                raise ValueError(
                    f"{self.skip!r} reports {sorted(report)}, and at binding it reported "
                    f"{sorted(state.skip)}. The names must always be the same."
                )
            report = tree.cast_like(report, state.skip)
            skip = report["should_skip"]
        add = _Accumulate(first, weight, shares, skip, self.mean)
        window = Part.root(add, _Window(state.accumulated), here.context)
        accumulated = run_rule(window, RETURN, updates)[1].accumulated
        context = here.context.mapped(grad=lambda _: decoded(accumulated))
        part = self.inner_part(here._replace(context=context))
        value, merged = part.context.value, dict(state.merged)
        for name, merge in self._merges().items():
            entry = getattr(part.context, name)
            if entry is not None:
                new = merge.read(entry, merged[name])
                merged[name] = _unless(skip, new, merged[name])

        def step(accumulated: PyTree, inner_state: PyTree) -> tuple[Any, Any]:
            return part._replace(state=inner_state).run(write, accumulated)

        # The count does not change within a window, so every mini-step samples the same k.
        ends = state.mini_step + 1 >= count_at(self.k, state.count)
        if skip is not None:
            ends = ends & ~skip
        # Mini-batches of weight 0 leave no trace, and neither does a window of them.
        done = ends if here.context.weight is None else ends & jnp.any(totals > 0)
        result, inner_state = run_if(done, step, write, params, accumulated, state.inner)
        if skip is not None:
            inner_state = self._redrawn(skip & (state.mini_step == 0), inner_state)
        return result, EveryKState(
            accumulated=accumulated,
            mini_step=_unless(skip, jnp.where(ends, 0, state.mini_step + 1), state.mini_step),
            weight=_unless(skip, totals, state.weight),
            updated=done,
            value=state.value if value is None else _unless(skip, value, state.value),
            count=jnp.where(done, tree.increment(state.count), state.count),
            skip=report,
            merged=merged,
            inner=inner_state,
        )

    def inner_context(self, here: Part) -> Context:
        state, context = here.state, here.context
        # Also for readers of the inner hyperparameters: a schedule may follow the loss of the
        # window, and not that of a mini-batch.
        weight, totals = _weights(state, context)
        # Parameters that were reset have seen less of the window than the others.
        total = totals if totals.ndim == 0 else jnp.max(totals, initial=0)
        begins = (state.mini_step == 0) | (total == weight)
        share = weight / jnp.where(total == 0, 1, total)
        value = None
        if context.value is not None:
            loss = jnp.asarray(context.value, tree.canonical_float())
            value = _merged(WINDOW["value"], state.value, loss, begins, weight, share)
        merged = {}
        for name, merge in self._merges().items():
            entry = getattr(context, name)
            if entry is None:
                continue
            before = state.merged[name]
            new = merge.read(entry, before)
            merged[name] = merge.entry(_merged(WINDOW[name], before, new, begins, weight, share))
        # The weights are already in a sum: an outer mean must not apply them again.
        weight = total if self.mean else jnp.ones_like(total)
        window = context.replace(value=value, weight=weight, **merged)
        return super().inner_context(here._replace(context=window))

    def reading(self, name: str, state: EveryKState, context: Context | None) -> Any:
        return jnp.asarray(count_at(self.k, state.count), jnp.int32)  # of `k`, the only one

    def skipped(self, state: EveryKState) -> EveryKState:
        inner = self._redrawn(state.mini_step == 0, state.inner)
        return state if inner is state.inner else dataclasses.replace(state, inner=inner)

    def _redrawn(self, begins: Bool[Array, ""], inner: PyTree) -> PyTree:
        """The inner transform's state after a mini-batch that was skipped. A window that has begun
        keeps its sample."""
        new = skipped(Part.root(self.inner, inner))
        if new is inner:
            return inner
        return jax.tree.map(lambda x, y: x if x is y else jnp.where(begins, y, x), inner, new)

    def has_updated(self, state: EveryKState) -> Bool[Array, "*runs"]:
        return state.updated & self.inner.has_updated(state.inner)

    def metrics(self, state: EveryKState) -> dict[str, Array]:
        window = {
            "mini_step": state.mini_step,
            "gradient_step": state.count,
            "mean_value": state.value,
        }
        return window | (state.skip or {})


def _weights(state: EveryKState, context: Context) -> tuple[Array, Array]:
    """The weights of this mini-batch, and of the window with it."""
    weight = jnp.ones((), tree.canonical_float())
    if context.weight is not None:
        weight = jnp.asarray(context.weight, tree.canonical_float())
    return weight, jnp.where(state.mini_step == 0, 0, state.weight) + weight


def _unless(skip: Bool[Array, ""] | None, new: Array, before: Array) -> Array:
    """The new value, or the old one bit by bit where the mini-batch is skipped."""
    return new if skip is None else jnp.where(skip, before, new)


def _merged(
    how: str, before: Array, new: Array, first: Array, weight: Array, share: Array
) -> Array:
    """A running mean, sum or maximum with one more value. The first value overwrites; weight 0
    changes nothing."""
    kept = jnp.where(first, 0, before)
    if how == "mean":
        change = (new - before) * share
        # The difference of two infinities is NaN, and that of two large numbers may overflow.
        wide = before * (1 - share) + new * share
        new = jnp.where(first, new, jnp.where(jnp.isfinite(change), before + change, wide))
    else:
        new = kept + new * weight if how == "sum" else jnp.maximum(kept, new)
    return jnp.where(weight == 0, kept, new)
