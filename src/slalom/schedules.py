"""Schedules: hyperparameters as functions of the clock.

A schedule is called like the function it is, so the classes here are named like functions, as
`functools.partial` is.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ._fields import Hyperparameter, hyperparameter, steps
from ._schedule import (
    AbstractSchedule as AbstractSchedule,
    FunctionSchedule as FunctionSchedule,
    ModuleSchedule as ModuleSchedule,
    as_canonical,
    as_schedule,
    canonical_float,
)
from ._types import Scalar, Step


class constant(AbstractSchedule):
    """The same value at every step.

    **Arguments:**

    - `value`: the value.
    """

    value: Hyperparameter = hyperparameter()

    def __call__(self, step: Step) -> Scalar:
        del step
        return as_canonical(self.value)


class linear(AbstractSchedule):
    """A straight line from one value to another, and the end values outside it.

        s(n) = init_value·(1 − f) + end_value·f,   f = (n − transition_begin) / transition_steps

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `transition_steps`: how many steps the line takes, ≥ 1.
    - `transition_begin`: the step at which it begins, ≥ 0.
    """

    init_value: Hyperparameter = hyperparameter()
    end_value: Hyperparameter = hyperparameter()
    transition_steps: int = steps(within="[1, inf)")
    transition_begin: int = steps(0)

    def __call__(self, step: Step) -> Scalar:
        done = _fraction(jnp.asarray(step) - self.transition_begin, self.transition_steps)
        # Written with two products: exact at both ends, as init + (end − init)·f is not.
        return as_canonical(self.init_value) * (1 - done) + as_canonical(self.end_value) * done


class cosine_decay(AbstractSchedule):
    """Half a cosine wave, from `init_value` down to `alpha·init_value`, and constant from there.

        s(n) = init_value·((1 − α)·(½(1 + cos(πn / decay_steps)))^exponent + α)

    **Arguments:**

    - `init_value`: the value at step 0.
    - `decay_steps`: how many steps the decay takes, ≥ 1.
    - `alpha`: the last value as a fraction of the first.
    - `exponent`: the power of the cosine term, > 0.

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    init_value: Hyperparameter = hyperparameter()
    decay_steps: int = steps(within="[1, inf)")
    alpha: Hyperparameter = hyperparameter(0.0)
    exponent: Hyperparameter = hyperparameter(1.0, within="(0, inf)")

    def __call__(self, step: Step) -> Scalar:
        wave = _cosine(_fraction(step, self.decay_steps)) ** as_canonical(self.exponent)
        alpha = as_canonical(self.alpha)
        return as_canonical(self.init_value) * ((1 - alpha) * wave + alpha)


class warmup_cosine_decay(AbstractSchedule):
    """A straight line up to `peak_value`, then half a cosine wave down to `end_value`.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value at step `warmup_steps`.
    - `warmup_steps`: how many steps the line takes, ≥ 0.
    - `decay_steps`: at which step the decay ends; the warm-up counts, so it must be greater.
    - `end_value`: the value from `decay_steps` on.
    - `exponent`: the power of the cosine term, > 0.

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    init_value: Hyperparameter = hyperparameter()
    peak_value: Hyperparameter = hyperparameter()
    warmup_steps: int = steps()
    decay_steps: int = steps(within="[1, inf)")
    end_value: Hyperparameter = hyperparameter(0.0)
    exponent: Hyperparameter = hyperparameter(1.0, within="(0, inf)")

    def __check_init__(self):
        known = isinstance(self.warmup_steps, int) and isinstance(self.decay_steps, int)
        if known and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"warmup_cosine_decay.decay_steps counts from step 0, warm-up included, so it must "
                f"be greater than warmup_steps={self.warmup_steps}, got {self.decay_steps}."
            )

    def __call__(self, step: Step) -> Scalar:
        step, warmup = jnp.asarray(step), jnp.asarray(self.warmup_steps)
        init, peak, end = map(as_canonical, (self.init_value, self.peak_value, self.end_value))
        done = _fraction(step, jnp.maximum(warmup, 1))
        rising = init * (1 - done) + peak * done
        wave = _cosine(_fraction(step - warmup, self.decay_steps - warmup))
        wave = wave ** as_canonical(self.exponent)
        return jnp.where(step < warmup, rising, peak * wave + end * (1 - wave))


class join(AbstractSchedule):
    """Schedules one after another, each counting from 0 where the one before ends.

    **Arguments:**

    - `schedules`: the schedules, or functions of the step; at least one.
    - `boundaries`: the step at which each but the first begins, increasing, ≥ 0.

    ```python
    >>> warmup = sl.schedules.linear(0.0, 1.0, transition_steps=2)
    >>> sl.schedules.join([warmup, sl.schedules.constant(1.0)], [2]).values(4)
    Array([0. , 0.5, 1. , 1. ], dtype=float32)

    ```
    """

    schedules: tuple[AbstractSchedule, ...] = eqx.field(
        converter=lambda schedules: tuple(map(as_schedule, schedules))
    )
    boundaries: tuple[int, ...] = eqx.field(converter=tuple)

    def __init__(
        self,
        schedules: Sequence[AbstractSchedule | Callable[[Any], Any]],
        boundaries: Sequence[int],
    ):
        self.schedules = tuple(map(as_schedule, schedules))
        self.boundaries = tuple(boundaries)
        if len(self.schedules) != len(self.boundaries) + 1:
            raise ValueError(
                f"join takes one boundary between each two schedules, got {len(self.schedules)} "
                f"schedules and {len(self.boundaries)} boundaries."
            )
        if all(isinstance(b, int) for b in self.boundaries):
            steps = (-1, *self.boundaries)
            if any(b <= a for a, b in itertools.pairwise(steps)):
                raise ValueError(
                    f"join's boundaries must be increasing and not negative, got {boundaries!r}."
                )

    def __call__(self, step: Step) -> Scalar:
        step = jnp.asarray(step)
        value = as_canonical(self.schedules[0](step))
        for boundary, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            # Before its own beginning a schedule is not asked for negative steps.
            later = as_canonical(schedule(jnp.maximum(step - boundary, 0)))
            value = jnp.where(step < boundary, value, later)
        return value


def _fraction(step: Step, steps: Step) -> Scalar:
    """step / steps, held between 0 and 1."""
    dtype = canonical_float()
    # Whole steps are compared before they are rounded to floats.
    step = jnp.clip(jnp.asarray(step), 0, steps)
    return step.astype(dtype) / jnp.asarray(steps).astype(dtype)


def _cosine(fraction: Scalar) -> Scalar:
    """½(1 + cos πf): from 1 to 0."""
    return (1 + jnp.cos(jnp.pi * fraction)) / 2


__all__ = [
    "AbstractSchedule",
    "FunctionSchedule",
    "ModuleSchedule",
    "constant",
    "cosine_decay",
    "join",
    "linear",
    "warmup_cosine_decay",
]
