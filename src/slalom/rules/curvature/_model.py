"""The linearized loss, its predictions of the loss, and steps of a given length."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import tree
from ..._core.protocol.residuals import Residuals
from ...tree.rounding import as_stored
from ...tree.types import Params, Scalar
from ._box import Box
from ._system import System

MOST_ITERATIONS = 10
CLOSE = 0.1
"""The relative error of the length that is enough."""


class Bounded(NamedTuple):
    """A step d = −x, and the damping that it has."""

    step: Float[Array, " params"]
    damping: Scalar
    length: Scalar
    """‖D·d‖."""


class _Search(NamedTuple):
    iteration: Array | int
    low: Scalar
    high: Scalar
    found: Bounded
    correction: Scalar
    excess: Scalar
    on: Array | bool


def bounded(system: System, radius: Scalar, guess: Scalar) -> Bounded:
    """The step with ‖D·d‖ within a tenth of the radius, or the one without damping if it is
    shorter.

    By Newton's method for the length as a function of λ, as in MINPACK (Moré, 1978).

    **Arguments:**

    - `system`: the problem, in the form of the parameters.
    - `radius`: the bound, > 0.
    - `guess`: the damping to start from.
    """
    diagonal, dtype = system.diagonal, system.linear.dtype
    tiny = jnp.finfo(dtype).tiny

    def at(damping: Scalar) -> tuple[Bounded, Scalar]:
        x, again, _ = system.solve(damping)
        length = jnp.linalg.norm(diagonal * x)
        length = jnp.where(jnp.isfinite(length), length, jnp.inf)
        safe = jnp.where((length > 0) & jnp.isfinite(length), length, 1)
        # Minus the derivative of the length with respect to λ, over the length.
        unit = diagonal**2 * x / safe
        slope = jnp.vdot(unit, again(unit))
        newton = (length - radius) / radius / jnp.where(slope > 0, slope, jnp.inf)
        newton = jnp.where(jnp.isfinite(newton), newton, 0)
        return Bounded(-x, damping, length), newton

    free, newton = at(jnp.zeros((), dtype))
    steepest = jnp.linalg.norm(system.gradient / diagonal)
    high = steepest / radius
    high = jnp.where(high == 0, tiny / jnp.minimum(radius, 0.1), high)
    low = jnp.maximum(newton, 0)
    start = jnp.clip(guess, low, jnp.maximum(low, high))
    start = jnp.where(start == 0, steepest / free.length, start)

    def unmet(s: _Search) -> Array | bool:
        return s.on & (s.iteration < MOST_ITERATIONS)

    def improve(s: _Search) -> _Search:
        damping = jnp.maximum(s.low, s.found.damping + s.correction)
        damping = jnp.where(damping == 0, jnp.maximum(tiny, 1e-3 * s.high), damping)
        found, newton = at(damping)
        excess = found.length - radius
        stuck = (s.low == 0) & (excess <= s.excess) & (s.excess < 0)
        return _Search(
            s.iteration + 1,
            jnp.where(excess > 0, jnp.maximum(s.low, damping), s.low),
            jnp.where(excess < 0, jnp.minimum(s.high, damping), s.high),
            found,
            newton,
            excess,
            ~((jnp.abs(excess) <= CLOSE * radius) | stuck),
        )

    begin = _Search(
        jnp.zeros((), jnp.int32),
        low,
        high,
        Bounded(free.step, start, free.length),
        jnp.zeros((), dtype),
        free.length - radius,
        jnp.array(True),
    )
    short = free.length <= (1 + CLOSE) * radius
    return jax.lax.cond(
        short, lambda: free, lambda: jax.lax.while_loop(unmet, improve, begin).found
    )


ROUNDINGS = 10.0
"""By how many roundings of the loss both decreases may be wrong (Conn, Gould & Toint, Trust-Region
Methods, 17.4.2)."""


class Outcome(NamedTuple):
    step: Array
    actual: Scalar
    predicted: Scalar
    ratio: Scalar


class Model(NamedTuple):
    """The linearized loss, and the loss."""

    params: Params
    x: Float[Array, " params"]
    """The parameters as a vector."""
    residuals: Residuals
    system: System
    box: Box | None

    def outcome(self, step: Array, direction: Array, damping: Scalar) -> Outcome:
        """The loss after a step, against the model's along a direction."""
        linear, box, dtype = self.system.linear, self.box, self.x.dtype
        if box is not None:
            step, direction = (box.clip(box.x + d) - self.x for d in (step, direction))
        there = as_stored(tree.add(self.params, linear.updates(step)))
        value = self.residuals.value(there).astype(dtype)
        along = linear.push(direction)
        if box is None:
            size = jnp.linalg.norm(self.system.diagonal * direction)
            predicted = jnp.vdot(along, along) / 2 + damping * size**2
        else:
            predicted = -jnp.vdot(box.gradient, direction) - jnp.vdot(along, along) / 2
        # NaN from a failed factorization counts as a rejection.
        actual = linear.value.astype(dtype) - value
        actual = jnp.where(jnp.isfinite(actual), actual, -jnp.inf)
        noise = ROUNDINGS * jnp.finfo(dtype).eps * jnp.abs(linear.value.astype(dtype))
        whole = predicted + noise
        ratio = jnp.where(whole > 0, (actual + noise) / jnp.where(whole > 0, whole, 1), -1)
        ratio = jnp.where(jnp.isfinite(ratio), ratio, -1)
        return Outcome(step, actual, predicted, ratio)
