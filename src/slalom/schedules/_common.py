"""Interpolation between values, shared by the schedules."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..tree.dtypes import as_canonical, canonical_float
from ..tree.types import Scalar, Step


def as_step(steps: Step) -> Any:
    """A number of steps as an int32 array, the dtype of the step count."""
    return jnp.asarray(steps, jnp.int32)


class Weights(NamedTuple):
    """Two numbers ≥ 0 that sum to 1, each of them to full relative precision."""

    first: Scalar
    second: Scalar


def fractions(step: Step, length: Step) -> Weights:
    """The fractions of `length` steps that remain and that are done, both clipped to [0, 1]."""
    dtype = canonical_float()
    # Clipped and subtracted as integers: floats round large steps, and 1 − f cancels near the end.
    total = as_step(length)
    done = jnp.clip(as_step(step), 0, total)
    scale = total.astype(dtype)
    return Weights((total - done).astype(dtype) / scale, done.astype(dtype) / scale)


def cosine(linear: Weights) -> Weights:
    """½(1 + cos πf) and ½(1 − cos πf), as squares of sines, which do not cancel."""
    return Weights(*(jnp.square(jnp.sin(jnp.pi / 2 * w)) for w in linear))


def square_root(linear: Weights) -> Weights:
    """1 − √f and √f."""
    left, done = linear
    root = jnp.sqrt(done)
    return Weights(left / (1 + root), root)


def power(weights: Weights, exponent: Any) -> Weights:
    """wᵖ and 1 − wᵖ."""
    first, second = weights
    exponent = as_canonical(exponent)
    large = first > 0.5
    small = jnp.where(large, second, 0)
    raised = first**exponent
    return Weights(raised, jnp.where(large, -jnp.expm1(exponent * jnp.log1p(-small)), 1 - raised))


def interpolate(first: Any, second: Any, weights: Weights) -> Scalar:
    """The weighted mean of two values, never outside the interval between them.

    It is exact where a weight is 0.
    """
    first, second = as_canonical(first), as_canonical(second)
    between = first * weights.first + second * weights.second
    low, high = jnp.minimum(first, second), jnp.maximum(first, second)
    # Without a derivative: the clipping only undoes a rounding.
    between = between + jax.lax.stop_gradient(jnp.clip(between, low, high) - between)
    # Selected explicitly: the compiler may reorder the arithmetic, which is then not exact.
    between = jnp.where(weights.second == 0, first, between)
    return jnp.where(weights.first == 0, second, between)


CURVES: dict[str, Callable[[Weights], Weights]] = {
    "linear": lambda weights: weights,
    "cosine": cosine,
    "sqrt": square_root,
}
"""Curves of the weights of the first and the second value."""


def interpolate_points(points: Sequence[tuple[Any, Any]], step: Step, curve: str) -> Scalar:
    """Interpolates between (step, value) points; constant before the first and after the last.

    If two points have the same step, the later one holds from there on.
    """
    step, points = as_step(step), [(as_step(at), value) for at, value in points]
    value = as_canonical(points[0][1])
    for (begin, first), (end, second) in itertools.pairwise(points):
        length = jnp.maximum(end - begin, 1)
        weights = CURVES[curve](fractions(step - begin, length))
        segment = jnp.where(step < end, interpolate(first, second, weights), as_canonical(second))
        value = jnp.where(step < begin, value, segment)
    return value
