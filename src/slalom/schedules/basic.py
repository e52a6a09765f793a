"""Schedules that follow one curve, or that scale a value at given steps."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._core.fields.declare import (
    Number,
    OptionalNumber,
    check_number,
    check_step,
    choice_field,
    hyperparameter,
    steps,
)
from .._core.fields.schedule import AbstractSchedule
from .._core.text.printing import AbstractPrinted, Entries
from ..tree.dtypes import as_canonical, canonical_float
from ..tree.moments import log_of_decay
from ..tree.types import Hyperparameter, Scalar, Step
from ._common import as_step, cosine, fractions, interpolate, interpolate_points, power


class constant(AbstractSchedule):
    """The same value at every step.

    **Arguments:**

    - `value`: the value.
    """

    value: Number = hyperparameter()

    def __call__(self, step: Step) -> Scalar:
        return as_canonical(self.value)


class linear(AbstractSchedule):
    """Interpolates linearly between two values, and is constant before and after.

        s(n) = init_value·(1 − f) + end_value·f,   f = (n − transition_begin) / transition_steps

    where f is clipped to [0, 1].

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `transition_steps`: the length of the transition in steps, ≥ 1.
    - `transition_begin`: the step at which the transition begins, ≥ 0.
    """

    init_value: Number = hyperparameter()
    end_value: Number = hyperparameter()
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        past = as_step(step) - as_step(self.transition_begin)
        weights = fractions(past, self.transition_steps)
        return interpolate(self.init_value, self.end_value, weights)


class linear_half_life(AbstractSchedule):
    """The decay of a mean whose half-life grows or shrinks linearly.

        1 / log s(n) = (1 − f) / log init_value + f / log end_value,   f = n / transition_steps

    where f is clipped to [0, 1]. The half-life of a decay β is log ½ / log β steps. Interpolated
    linearly, β itself would spend nearly all steps at short half-lives.

    **Arguments:**

    - `init_value`: the decay at step 0, in (0, 1).
    - `end_value`: the decay from step `transition_steps` on, in (0, 1).
    - `transition_steps`: the length of the transition in steps, ≥ 1.

    ```python
    >>> sl.schedules.linear_half_life(0.9, 0.9999, 10_000)(5_000)
    Array(0.99980015, dtype=float32)

    ```

    ??? cite "Pagliardini, Ablin & Grangier, [The AdEMAMix Optimizer: Better, Faster,
        Older](https://arxiv.org/abs/2409.03137), 2024"
    """

    init_value: Number = hyperparameter(within="(0, 1)")
    end_value: Number = hyperparameter(within="(0, 1)")
    transition_steps: Step = steps(within="[1, inf)")

    def __call__(self, step: Step) -> Scalar:
        weights = fractions(step, self.transition_steps)
        first, last = as_canonical(self.init_value), as_canonical(self.end_value)
        inverse = interpolate(1 / log_of_decay(first), 1 / log_of_decay(last), weights)
        value = jnp.where(weights.second == 0, first, jnp.exp(1 / inverse))
        return jnp.where(weights.first == 0, last, value)


class polynomial(AbstractSchedule):
    """Polynomial decay from one value to another.

        s(n) = end_value + (init_value − end_value)·(1 − f)^power,
        f = (n − transition_begin) / transition_steps

    where f is clipped to [0, 1].

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `end_value`: the value from `transition_begin + transition_steps` on.
    - `power`: the exponent, > 0; 1 gives a linear schedule.
    - `transition_steps`: the length of the transition in steps, ≥ 1.
    - `transition_begin`: the step at which the transition begins, ≥ 0.
    """

    init_value: Number = hyperparameter()
    end_value: Number = hyperparameter()
    power: Number = hyperparameter(within="(0, inf)")
    transition_steps: Step = steps(within="[1, inf)")
    transition_begin: Step = steps(0)

    def __call__(self, step: Step) -> Scalar:
        past = as_step(step) - as_step(self.transition_begin)
        weights = power(fractions(past, self.transition_steps), self.power)
        return interpolate(self.init_value, self.end_value, weights)


class exponential_decay(AbstractSchedule):
    """Exponential decay by a factor of `decay_rate` every `transition_steps` steps.

        s(n) = init_value·decay_rate^p,   p = max(n − transition_begin, 0) / transition_steps

    **Arguments:**

    - `init_value`: the value up to `transition_begin`.
    - `transition_steps`: the number of steps per factor, ≥ 1.
    - `decay_rate`: the factor, > 0. The value grows if it is above 1. In float32 it is rounded to
        a multiple of 6e-8 below 1: use more `transition_steps` rather than a factor closer to 1.
    - `transition_begin`: the step at which the decay begins, ≥ 0.
    - `staircase`: whether to round p down, so that the value changes once every
        `transition_steps` steps.
    - `end_value`: a lower bound on the value, or an upper bound if `decay_rate` ≥ 1. Defaults to
        no bound.

    Differs from Optax: a `decay_rate` of 0 is an error, not a constant schedule.
    """

    init_value: Number = hyperparameter()
    transition_steps: Step = steps(within="[1, inf)")
    decay_rate: Number = hyperparameter(within="(0, inf)")
    transition_begin: Step = steps(0)
    staircase: bool = eqx.field(default=False, static=True)
    end_value: OptionalNumber = hyperparameter(None)

    def __call__(self, step: Step) -> Scalar:
        return exponential(self, self.init_value, as_step(step))


class cosine_decay(AbstractSchedule):
    """Cosine decay from `init_value` to `alpha·init_value`, constant afterwards.

        s(n) = init_value·((1 − α)·(½(1 + cos πf))^exponent + α),   f = min(n / decay_steps, 1)

    **Arguments:**

    - `init_value`: the value at step 0.
    - `decay_steps`: the length of the decay in steps, ≥ 1.
    - `alpha`: α, the final value as a fraction of the initial value.
    - `exponent`: the exponent of the cosine term, > 0.

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    init_value: Number = hyperparameter()
    decay_steps: Step = steps(within="[1, inf)")
    alpha: Number = hyperparameter(0.0)
    exponent: Number = hyperparameter(1.0, within="(0, inf)")

    def __call__(self, step: Step) -> Scalar:
        weights = power(cosine(fractions(step, self.decay_steps)), self.exponent)
        return as_canonical(self.init_value) * interpolate(1.0, self.alpha, weights)


def exponential(rule: Any, value: Any, step: Any) -> Scalar:
    """`value` after `step` steps of the exponential decay that the fields of `rule` describe."""
    dtype = canonical_float()
    past = jnp.maximum(step - as_step(rule.transition_begin), 0)
    length = as_step(rule.transition_steps)
    if rule.staircase:
        # Divided as integers: a float quotient may round to the wrong side of an integer.
        power = (past // length).astype(dtype)
    else:
        power = past.astype(dtype) / length.astype(dtype)
    rate = as_canonical(rule.decay_rate)
    value = as_canonical(value) * rate**power
    if rule.end_value is None:
        return value
    end = as_canonical(rule.end_value)
    return jnp.where(rate < 1, jnp.maximum(value, end), jnp.minimum(value, end))


class BoundariesAndScales(AbstractPrinted):
    """A dict from steps to factors. Its steps are leaves; as dict keys they would be static."""

    boundaries: tuple[Any, ...]
    scales: tuple[Any, ...]

    def items(self) -> tuple[tuple[Any, Any], ...]:
        return tuple(zip(self.boundaries, self.scales, strict=True))

    def _code(self) -> Entries:
        return Entries(self.items())


def _converted(
    scales: Mapping[int, Hyperparameter] | BoundariesAndScales | None,
) -> BoundariesAndScales:
    if isinstance(scales, BoundariesAndScales):
        return scales
    name = "boundaries_and_scales"
    if scales is not None and not isinstance(scales, Mapping):
        raise TypeError(f"{name} must be a dict from steps to factors, got {scales!r}.")
    scales = {} if scales is None else scales
    whole = {check_step(f"each step of {name}", step): step for step in scales}
    boundaries = tuple(sorted(whole))
    return BoundariesAndScales(
        boundaries,
        tuple(check_number(f"{name}[{b}]", scales[whole[b]], "[0, inf)") for b in boundaries),
    )


class piecewise_constant(AbstractSchedule):
    """A piecewise constant value that is multiplied by a factor at each boundary.

        s(n) = init_value · Π {scale of b : b ≤ n}

    **Arguments:**

    - `init_value`: the value before the first boundary.
    - `boundaries_and_scales`: a dict from steps, ≥ 0, to factors, ≥ 0, in any order. Defaults to
        no boundary.

    ```python
    >>> sl.schedules.piecewise_constant(1.0, {2: 0.5, 3: 0.1}).values(5)
    Array([1.  , 1.  , 0.5 , 0.05, 0.05], dtype=float32)

    ```
    """

    init_value: Number = hyperparameter()
    boundaries_and_scales: BoundariesAndScales = eqx.field(default=None, converter=_converted)

    def __call__(self, step: Step) -> Scalar:
        step, value = as_step(step), as_canonical(self.init_value)
        for boundary, scale in self.boundaries_and_scales.items():
            value = jnp.where(step < as_step(boundary), value, value * as_canonical(scale))
        return value


class piecewise_interpolate(AbstractSchedule):
    """Interpolates between values, each of which is the previous one times a factor.

    At a boundary the value is `init_value` times the factors of all boundaries so far. In
    between, and from step 0 to the first boundary, it is interpolated.

    **Arguments:**

    - `interpolate_type`: `"linear"`, or `"cosine"` for half a cosine wave.
    - `init_value`: the value at step 0.
    - `boundaries_and_scales`: a dict from steps, ≥ 0, to factors, ≥ 0, in any order. Defaults to
        no boundary.

    ```python
    >>> sl.schedules.piecewise_interpolate("linear", 1.0, {2: 0.5, 4: 0.0}).values(6)
    Array([1.  , 0.75, 0.5 , 0.25, 0.  , 0.  ], dtype=float32)

    ```
    """

    interpolate_type: str = choice_field("linear", "cosine", required=True)
    init_value: Number = hyperparameter()
    boundaries_and_scales: BoundariesAndScales = eqx.field(default=None, converter=_converted)

    def __call__(self, step: Step) -> Scalar:
        value = as_canonical(self.init_value)
        points: list[tuple[Any, Any]] = [(0, value)]
        for boundary, scale in self.boundaries_and_scales.items():
            value = value * as_canonical(scale)
            points.append((boundary, value))
        return interpolate_points(points, step, self.interpolate_type)
