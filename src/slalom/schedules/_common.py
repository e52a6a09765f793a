"""Interpolation between values, shared by the schedules."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .._types import Scalar, Step
from ..tree.dtypes import as_canonical, canonical_float


def as_step(steps: Step) -> Any:
    """A number of steps as an int32 array, the dtype of the step count."""
    return jnp.asarray(steps, jnp.int32)


def progress(step: Step, length: Step) -> Scalar:
    """step / length, clipped to [0, 1]."""
    dtype = canonical_float()
    # Clipped as integers: floats round large steps.
    total = as_step(length)
    return jnp.clip(as_step(step), 0, total).astype(dtype) / total.astype(dtype)


def cosine(fraction: Scalar) -> Scalar:
    """½(1 + cos πf): from 1 to 0."""
    return (1 + jnp.cos(jnp.pi * fraction)) / 2


def interpolate(first: Any, second: Any, weight: Scalar) -> Scalar:
    """weight·first + (1 − weight)·second, exact where the weight is 0 or 1."""
    first, second = as_canonical(first), as_canonical(second)
    between = first * weight + second * (1 - weight)
    # Selected explicitly: the compiler may reorder the arithmetic, which is then not exact.
    return jnp.where(weight == 1, first, jnp.where(weight == 0, second, between))


CURVES: dict[str, Callable[[Scalar], Scalar]] = {
    "linear": lambda fraction: 1 - fraction,
    "cosine": cosine,
    "sqrt": lambda fraction: 1 - jnp.sqrt(fraction),
}
"""Curves that fall from 1 to 0 while the fraction grows from 0 to 1."""


def check_curve(name: str, given: Any, *known: str) -> None:
    """Raises an error that lists the known curves if `given` is not one of them."""
    if given not in known:
        listed = " or ".join(map(repr, known))
        raise ValueError(f"{name} must be {listed}, got {given!r}.")


def interpolate_points(points: Sequence[tuple[Any, Any]], step: Step, curve: str) -> Scalar:
    """Interpolates between (step, value) points; constant before the first and after the last.

    If two points have the same step, the later one holds from there on.
    """
    step, points = as_step(step), [(as_step(at), value) for at, value in points]
    value = as_canonical(points[0][1])
    for (begin, first), (end, second) in itertools.pairwise(points):
        length = jnp.maximum(end - begin, 1)
        weight = CURVES[curve](progress(step - begin, length))
        segment = jnp.where(step < end, interpolate(first, second, weight), as_canonical(second))
        value = jnp.where(step < begin, value, segment)
    return value


def linear_warmup(step: Step, warmup_steps: Step, init_value: Any, peak_value: Any) -> Scalar:
    """Linear up to the peak and constant afterwards; `warmup_steps` may be 0."""
    return interpolate_points([(0, init_value), (warmup_steps, peak_value)], step, "linear")
