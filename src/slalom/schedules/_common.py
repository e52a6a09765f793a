"""The arithmetic that schedules share: parts of a way, and how they are bent."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .._types import Scalar, Step
from ..tree.dtypes import as_canonical, canonical_float


def ticks(steps: Step) -> Any:
    """A number of steps as the clock counts, in int32."""
    return jnp.asarray(steps, jnp.int32)


def fraction(step: Step, steps: Step) -> Scalar:
    """step / steps, held between 0 and 1."""
    dtype = canonical_float()
    # Whole steps are compared before they are rounded to floats.
    whole = ticks(steps)
    return jnp.clip(ticks(step), 0, whole).astype(dtype) / whole.astype(dtype)


def cosine(fraction: Scalar) -> Scalar:
    """½(1 + cos πf): from 1 to 0."""
    return (1 + jnp.cos(jnp.pi * fraction)) / 2


def blend(first: Any, second: Any, share: Scalar) -> Scalar:
    """share·first + (1 − share)·second: exact where the share is 1 or 0."""
    first, second = as_canonical(first), as_canonical(second)
    mixed = first * share + second * (1 - share)
    # Selected, not left to arithmetic, which the compiler may order otherwise.
    return jnp.where(share == 1, first, jnp.where(share == 0, second, mixed))


SHAPES: dict[str, Callable[[Scalar], Scalar]] = {
    "linear": lambda fraction: 1 - fraction,
    "cosine": cosine,
    "sqrt": lambda fraction: 1 - jnp.sqrt(fraction),
}
"""Ways from 1 to 0 by name."""


def check_shape(name: str, given: Any, *known: str) -> None:
    """Refuses an unknown shape, with those there are."""
    if given not in known:
        listed = " or ".join(map(repr, known))
        raise ValueError(f"{name} must be {listed}, got {given!r}.")


def through(points: Sequence[tuple[Any, Any]], step: Step, shape: str) -> Scalar:
    """From point to point, given as (step, value), and constant before and after them.

    Of two points at one step the later counts from there on.
    """
    step, points = ticks(step), [(ticks(at), value) for at, value in points]
    reached = as_canonical(points[0][1])
    for (begin, first), (end, second) in itertools.pairwise(points):
        length = jnp.maximum(end - begin, 1)
        share = SHAPES[shape](fraction(step - begin, length))
        way = jnp.where(step < end, blend(first, second, share), as_canonical(second))
        reached = jnp.where(step < begin, reached, way)
    return reached


def warmed_up(step: Step, warmup_steps: Step, init_value: Any, peak_value: Any) -> Scalar:
    """A straight line to the peak and the peak from there on, also where the line has no steps."""
    return through([(0, init_value), (warmup_steps, peak_value)], step, "linear")
