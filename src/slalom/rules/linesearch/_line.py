"""The loss along a line, and the result of a line search; shared by the line searches."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from ... import fields, tree
from ..._core.protocol.context import checked_value
from ..._core.protocol.loss import Loss
from ..._core.protocol.parts import Part
from ...tree.rounding import as_stored
from ...tree.types import Params, PyTree, Scalar, Updates
from .._base import AbstractTransform, Context


class LinesearchState(eqx.Module):
    """The state of a line search."""

    learning_rate: Float[Array, ""]
    """The accepted learning rate; 0 if none was accepted."""
    guess: Float[Array, ""]
    """The same, or the last learning rate that was tried if none was accepted."""
    value: Float[Array, ""]
    """The loss at the new parameters; infinite before the first step."""
    num_linesearch_steps: Int[Array, ""]
    """The number of learning rates that were tried."""
    decrease_error: Float[Array, ""]
    """The amount by which the learning rate misses the condition on the loss."""
    curvature_error: Float[Array, ""] | None
    """The amount by which it misses the condition on the slope, if there is one."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    """The number of searches for each parameter; 0 means that `grad` is not known there."""
    grad: PyTree[Inexact[Array, "..."]] | None = fields.param_like("exact")
    """The gradient at the new parameters, or `None` if it is not kept."""


class AbstractLinesearch(AbstractTransform[LinesearchState]):
    """A transform that scales its updates by a learning rate for which it evaluates the loss."""

    needs: ClassVar[tuple[str, ...]] = ("params", "value", "grad", "value_fn")
    heeds_bounds: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    metric_fields: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "num_linesearch_steps",
        "decrease_error",
    )

    def _fresh(self, params: Params, *, keeps_grad: bool, has_slopes: bool) -> LinesearchState:
        """The state before the first step."""
        tree.check_inexact(params)

        def number(x: float) -> Scalar:
            return jnp.full((), x, tree.canonical_float())

        return LinesearchState(
            learning_rate=number(1.0),
            guess=number(1.0),
            value=number(jnp.inf),
            num_linesearch_steps=tree.fresh_count(),
            decrease_error=number(jnp.inf),
            curvature_error=number(jnp.inf) if has_slopes else None,
            age=tree.fresh_count(),
            grad=tree.zeros_like(params) if keeps_grad else None,
        )

    def at(self, context: Context | None) -> SimpleNamespace:
        # In the dtype of the scalars of the search.
        now = vars(super().at(context)).items()
        return SimpleNamespace(**{k: x if x is None else tree.as_canonical(x) for k, x in now})

    def _line(self, updates: Updates, params: Params | None, context: Context | None) -> "Line":
        """The line along these updates."""
        context = Context() if context is None else context
        params = self.demand("params", params)
        value = self.demand("value", context.value)
        grad = self.demand("grad", context.grad)
        value_fn = self.demand("value_fn", context.value_fn)
        who = type(self).__name__

        def checked(params: Params) -> Scalar:
            return checked_value(f"passed to {who}", value_fn(params))

        limit, outside, into_set = tree.as_canonical(jnp.inf), jnp.array(False), context.constrained
        if (bounds := context.bounds) is not None:
            updates, limit, outside = _boxed(params, updates, bounds)
            into_set = functools.partial(_clipped, bounds=bounds)
        slope = tree.as_canonical(tree.inner(grad, updates))
        value = tree.as_canonical(tree.as_float(value))
        grad = tree.cast_like(grad, params)  # as at every other point
        return Line(params, updates, value, grad, slope, checked, into_set, bounds, limit, outside)

    def ask(self, here: Part, loss: Loss) -> Loss:
        # A line search elsewhere, or under a wrapper, does not know where the whole step led to.
        loss = super().ask(here, loss)
        return loss.request("recalled gradient", here) if loss.last else loss

    def recall(self, state: LinesearchState) -> tuple[Scalar, Updates, Bool[Array, ""]] | None:
        """Loss and gradient at the parameters that the last step led to.

        **Arguments:**

        - `state`: this transform's state.

        **Returns:** the loss, the gradient, and whether they are known, which they are not before
        the first step and after a reset. `None` if the state does not keep the gradient.
        """
        if state.grad is None:
            return None
        is_valid = jnp.isfinite(state.value) & jnp.all(state.age > 0)
        return state.value, state.grad, is_valid

    def num_evaluations(self, state: LinesearchState) -> Int[Array, "*runs"]:
        return state.num_linesearch_steps


class Line(NamedTuple):
    """The loss as a function of η at w + η·u, and its values at η = 0, in the canonical float."""

    params: Params
    updates: Updates
    value: Scalar
    grad: Updates
    slope: Scalar
    value_fn: Callable[[Params], Scalar]
    into_set: Callable[[Params], Params]
    """The projection of `.project`."""
    bounds: tuple[Params, Params] | None
    limit: Scalar
    """The η at which the first parameter reaches its bound; infinite without bounds."""
    outside: Bool[Array, ""]
    """Whether w is outside. The updates are then those to the nearest point of the box."""

    def point(self, rate: Scalar) -> Params:
        """w + η·u, projected and rounded as the step does it."""
        there = tree.add(self.params, scale_or_zero(self.updates, rate))
        return as_stored(self.into_set(there))

    @property
    def descends(self) -> Bool[Array, ""]:
        """Whether there is anything to search."""
        return (self.slope <= 0) & ~self.outside  # false for NaN

    def at_most(self, rate: Scalar) -> Scalar:
        """The rate, or the one at which a parameter reaches its bound."""
        return jnp.minimum(rate, self.limit)

    def taken(self, rate: Scalar, value: Scalar) -> tuple[Scalar, Scalar]:
        """The rate to take instead of this one, and the loss there; infinite where unknown."""
        return jnp.where(self.outside, 1, rate), jnp.where(self.outside, jnp.inf, value)


def _clipped(params: Params, bounds: tuple[Params, Params]) -> Params:
    def clip(x: Array, lower: Array, upper: Array) -> Array:
        if jnp.iscomplexobj(x):
            return x  # which has no bounds
        return jnp.clip(x, tree.cast(lower, x.dtype), tree.cast(upper, x.dtype))

    return jax.tree.map(clip, params, *bounds)


def _boxed(
    params: Params, updates: Updates, bounds: tuple[Params, Params]
) -> tuple[Updates, Scalar, Bool[Array, ""]]:
    """The updates without entries that leave the box at once, and `limit` and `outside` of a
    `Line`."""
    params = tree.widened(params)
    nearest = _clipped(params, bounds)
    outside, limits, inward = jnp.array(False), [tree.as_canonical(jnp.inf)], []
    leaves = [jax.tree.leaves(x) for x in (params, nearest, updates, *bounds)]
    for x, near, u, lower, upper in zip(*leaves, strict=True):
        if jnp.iscomplexobj(u):
            inward.append(u)
            continue
        outside |= jnp.any(x != near) & ~jnp.any(jnp.isnan(x))
        room = jnp.where(u < 0, lower, upper) - x
        u = jnp.where((room == 0) & (u != 0), 0, u)
        inward.append(u)
        rates = jnp.where(u == 0, jnp.inf, room / jnp.where(u == 0, 1, u))
        # A little further, and clipped: a rounding short of the bound would leave the next search
        # no room.
        rates = rates * (1 + 4 * jnp.finfo(u.dtype).eps)
        limits.append(tree.as_canonical(jnp.min(rates, initial=jnp.inf)))
    inward = jax.tree.structure(updates).unflatten(inward)
    back = tree.map_leaves(lambda _, near, x: near - x, (nearest, params))
    updates = jax.tree.map(lambda b, u: jnp.where(outside, b, u), back, inward)
    return updates, jnp.min(jnp.stack(limits)), outside


def scale_or_zero(updates: Updates, rate: Scalar) -> Updates:
    """η·u; zero for η = 0 even if u is not finite."""

    def rule(now, u):
        return jnp.where(now.rate == 0, 0, now.rate * u)

    return tree.map_leaves(rule, (updates,), SimpleNamespace(rate=rate))


def steepest(grad: Updates) -> Updates:
    """The direction of steepest ascent: the conjugate of the gradient that JAX returns."""
    return jax.tree.map(jnp.conj, grad)


def next_guess(rate: Scalar) -> Scalar:
    """The learning rate from which the next search starts; never 0, which no search could leave."""
    return jnp.maximum(rate, jnp.finfo(rate.dtype).tiny)
