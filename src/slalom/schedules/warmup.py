"""Schedules that rise and fall: after a warm-up, in one cycle, or in several with restarts."""

import abc
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._core.fields.declare import Number, OptionalNumber, choice_field, hyperparameter, steps
from .._core.fields.schedule import AbstractSchedule
from ..tree.dtypes import as_canonical, canonical_float
from ..tree.types import Scalar, Step
from ._common import CURVES, as_step, cosine, fractions, interpolate, interpolate_points, power
from .basic import exponential


class _AbstractWarmup(AbstractSchedule):
    """Linear from the first value to the peak, followed by another schedule."""

    init_value: Number = hyperparameter()
    peak_value: Number = hyperparameter()
    warmup_steps: Step = steps()

    @abc.abstractmethod
    def _after(self, past: Int[Array, ""]) -> Scalar:
        """The value this many steps after the warm-up, at least 0."""

    def __call__(self, step: Step) -> Scalar:
        step, warmup = as_step(step), as_step(self.warmup_steps)
        points = [(0, self.init_value), (warmup, self.peak_value)]
        rising = interpolate_points(points, step, "linear")
        return jnp.where(step < warmup, rising, self._after(jnp.maximum(step - warmup, 0)))


class warmup_constant(_AbstractWarmup):
    """Linear warm-up to `peak_value`, constant afterwards.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value from step `warmup_steps` on.
    - `warmup_steps`: the length of the warm-up in steps, ≥ 0.

    Differs from Optax: with `warmup_steps=0` the value is `peak_value`, not `init_value`.
    """

    def _after(self, past: Int[Array, ""]) -> Scalar:
        return as_canonical(self.peak_value)


class warmup_cosine_decay(_AbstractWarmup):
    """Linear warm-up to `peak_value`, then cosine decay to `end_value`.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value at step `warmup_steps`.
    - `warmup_steps`: the length of the warm-up in steps, ≥ 0.
    - `decay_steps`: the step at which the decay ends, counted from step 0, > `warmup_steps`.
    - `end_value`: the value from step `decay_steps` on.
    - `exponent`: the exponent of the cosine term, > 0.

    Differs from Optax: with `peak_value=0` the decay still ends at `end_value`.

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    decay_steps: Step = steps(within="[1, inf)")
    end_value: Number = hyperparameter(0.0)
    exponent: Number = hyperparameter(1.0, within="(0, inf)")

    def __check_init__(self):
        warmup, decay = self.warmup_steps, self.decay_steps
        if isinstance(warmup, int) and isinstance(decay, int) and decay <= warmup:
            raise ValueError(
                f"warmup_cosine_decay.decay_steps includes the warm-up, so it must be greater than "
                f"warmup_steps={warmup}, got {decay}."
            )

    def _after(self, past: Int[Array, ""]) -> Scalar:
        length = as_step(self.decay_steps) - as_step(self.warmup_steps)
        weights = power(cosine(fractions(past, length)), self.exponent)
        return interpolate(self.peak_value, self.end_value, weights)


class warmup_exponential_decay(_AbstractWarmup):
    """Linear warm-up to `peak_value`, then exponential decay.

        s(n) = peak_value·decay_rate^p  for n ≥ warmup_steps,
        p = max(n − warmup_steps − transition_begin, 0) / transition_steps

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value at step `warmup_steps`.
    - `warmup_steps`: the length of the warm-up in steps, ≥ 0.
    - `transition_steps`: the number of steps per factor, ≥ 1.
    - `decay_rate`: the factor, > 0. The value grows if it is above 1. In float32 it is rounded to
        a multiple of 6e-8 below 1: use more `transition_steps` rather than a factor closer to 1.
    - `transition_begin`: the number of steps between the warm-up and the decay, ≥ 0.
    - `staircase`: whether to round p down, so that the value changes once every
        `transition_steps` steps.
    - `end_value`: a lower bound on the value, or an upper bound if `decay_rate` ≥ 1. Defaults to
        no bound.

    Differs from Optax: a `decay_rate` of 0 is an error, not a constant schedule.
    """

    transition_steps: Step = steps(within="[1, inf)")
    decay_rate: Number = hyperparameter(within="(0, inf)")
    transition_begin: Step = steps(0)
    staircase: bool = eqx.field(default=False, static=True)
    end_value: OptionalNumber = hyperparameter(None)

    def _after(self, past: Int[Array, ""]) -> Scalar:
        return exponential(self, self.peak_value, past)


class warmup_stable_decay(_AbstractWarmup):
    """Linear warm-up to `peak_value`, a plateau, then decay to `end_value`.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value on the plateau.
    - `warmup_steps`: the length of the warm-up in steps, ≥ 0.
    - `stable_steps`: the length of the plateau in steps, ≥ 0.
    - `decay_steps`: the length of the decay in steps, ≥ 1, warm-up and plateau not included.
    - `end_value`: the value after the decay.
    - `decay_type`: the weight of the peak at the fraction f of the decay: `"linear"` for 1 − f,
        `"cosine"` for ½(1 + cos πf), or `"sqrt"` for 1 − √f.

    ??? cite "Hu et al., [MiniCPM](https://arxiv.org/abs/2404.06395), 2024; Hägele et al.,
        [Scaling laws and compute-optimal training beyond fixed training
        durations](https://arxiv.org/abs/2405.18392), 2024"
    """

    stable_steps: Step = steps()
    decay_steps: Step = steps(within="[1, inf)")
    end_value: Number = hyperparameter(0.0)
    decay_type: str = choice_field("linear", "cosine", "sqrt")

    def _after(self, past: Int[Array, ""]) -> Scalar:
        # Not step − (warmup + stable): the sum may overflow int32.
        past = past - as_step(self.stable_steps)
        weights = CURVES[self.decay_type](fractions(past, self.decay_steps))
        return interpolate(self.peak_value, self.end_value, weights)


class inverse_sqrt(_AbstractWarmup):
    """Linear warm-up to `peak_value`, then decay with the inverse square root of the step.

        s(n) = peak_value·√(timescale / (n − warmup_steps + timescale))  for n ≥ warmup_steps

    With the default timescale this is `peak_value·√(warmup_steps / n)`.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value at step `warmup_steps`.
    - `warmup_steps`: the length of the warm-up in steps, ≥ 0.
    - `timescale`: the value has fallen to half the peak `3·timescale` steps after the warm-up,
        ≥ 1. Defaults to `warmup_steps`, or to 1 if that is 0.

    ??? cite "Vaswani et al., [Attention is all you need](https://arxiv.org/abs/1706.03762), 2017"
    """

    timescale: Step | None = steps(None, within="[1, inf)")

    def _after(self, past: Int[Array, ""]) -> Scalar:
        warmup = as_step(self.warmup_steps)
        timescale = jnp.maximum(warmup, 1) if self.timescale is None else as_step(self.timescale)
        # Added as floats: the sum may overflow int32.
        scale = timescale.astype(canonical_float())
        share = scale / (past.astype(canonical_float()) + scale)
        return as_canonical(self.peak_value) * jnp.sqrt(share)


class linear_onecycle(AbstractSchedule):
    """One linear cycle: up to the peak, down to the initial value, and down to the final value.

    Interpolates linearly between these points, with fractional steps rounded down:

    - `peak_value / div_factor` at step 0,
    - `peak_value` at step `pct_start · transition_steps`,
    - `peak_value / div_factor` at step `pct_final · transition_steps`,
    - `peak_value / (div_factor · final_div_factor)` at step `transition_steps`.

    Differs from Optax: two points at the same step are both kept, so the final value is the same
    for `pct_final=1`. And 0.29·100 is step 29, although the product of the floats is 28.999….

    **Arguments:**

    - `transition_steps`: the length of the cycle in steps, ≥ 1.
    - `peak_value`: the maximum.
    - `pct_start`: the fraction of the cycle at which the peak is reached, in [0, 1].
    - `pct_final`: the fraction of the cycle at which the value is back at its initial value, in
        [0, 1] and at least `pct_start`.
    - `div_factor`: the peak divided by the initial value, > 0.
    - `final_div_factor`: the initial value divided by the final value, > 0.

    ??? cite "Smith & Topin, [Super-convergence](https://arxiv.org/abs/1708.07120), 2017"
    """

    transition_steps: Step = steps(within="[1, inf)")
    peak_value: Number = hyperparameter()
    pct_start: Number = hyperparameter(0.3, within="[0, 1]")
    pct_final: Number = hyperparameter(0.85, within="[0, 1]")
    div_factor: Number = hyperparameter(25.0, within="(0, inf)")
    final_div_factor: Number = hyperparameter(1e4, within="(0, inf)")

    def __check_init__(self):
        start, final = self.pct_start, self.pct_final
        if isinstance(start, float) and isinstance(final, float) and final < start:
            raise ValueError(
                f"linear_onecycle.pct_final must be at least pct_start={start}, got {final}."
            )

    def __call__(self, step: Step) -> Scalar:
        total, peak = as_step(self.transition_steps), as_canonical(self.peak_value)
        first = peak / as_canonical(self.div_factor)
        points = [
            (0, first),
            (_fraction_of(self.pct_start, total), peak),
            (_fraction_of(self.pct_final, total), first),
            (total, first / as_canonical(self.final_div_factor)),
        ]
        return interpolate_points(points, step, "linear")


class cosine_onecycle(AbstractSchedule):
    """One cosine cycle: half a cosine wave up to the peak, and another down to the final value.

    Interpolates between these points, with fractional steps rounded down:

    - `peak_value / div_factor` at step 0,
    - `peak_value` at step `pct_start · transition_steps`,
    - `peak_value / (div_factor · final_div_factor)` at step `transition_steps`.

    Differs from Optax: two points at the same step are both kept. And 0.29·100 is step 29,
    although the product of the floats is 28.999….

    **Arguments:**

    - `transition_steps`: the length of the cycle in steps, ≥ 1.
    - `peak_value`: the maximum.
    - `pct_start`: the fraction of the cycle at which the peak is reached, in [0, 1].
    - `div_factor`: the peak divided by the initial value, > 0.
    - `final_div_factor`: the initial value divided by the final value, > 0.

    ??? cite "Smith & Topin, [Super-convergence](https://arxiv.org/abs/1708.07120), 2017"
    """

    transition_steps: Step = steps(within="[1, inf)")
    peak_value: Number = hyperparameter()
    pct_start: Number = hyperparameter(0.3, within="[0, 1]")
    div_factor: Number = hyperparameter(25.0, within="(0, inf)")
    final_div_factor: Number = hyperparameter(1e4, within="(0, inf)")

    def __call__(self, step: Step) -> Scalar:
        total, peak = as_step(self.transition_steps), as_canonical(self.peak_value)
        first = peak / as_canonical(self.div_factor)
        points = [
            (0, first),
            (_fraction_of(self.pct_start, total), peak),
            (total, first / as_canonical(self.final_div_factor)),
        ]
        return interpolate_points(points, step, "cosine")


Cycle = warmup_cosine_decay | Mapping[str, Any]


def _as_cycles(cosine_kwargs: Iterable[Cycle]) -> tuple[warmup_cosine_decay, ...]:
    if not isinstance(cosine_kwargs, Iterable):
        raise TypeError(f"sgdr.cosine_kwargs must be a list of cycles, got {cosine_kwargs!r}.")
    cycles = []
    for i, cycle in enumerate(cosine_kwargs):
        if isinstance(cycle, Mapping):
            try:
                cycle = warmup_cosine_decay(**cycle)
            except (TypeError, ValueError) as error:
                raise type(error)(f"sgdr.cosine_kwargs[{i}]: {error}") from None
        if not isinstance(cycle, warmup_cosine_decay):
            raise TypeError(
                f"sgdr.cosine_kwargs[{i}] must be a dict of arguments for warmup_cosine_decay or a "
                f"warmup_cosine_decay schedule, got {cycle!r}."
            )
        cycles.append(cycle)
    return tuple(cycles)


class sgdr(AbstractSchedule):
    """SGDR: cosine decay with warm restarts, a sequence of `warmup_cosine_decay` cycles.

    **Arguments:**

    - `cosine_kwargs`: at least one cycle. Each is a dict of arguments for
        `warmup_cosine_decay`, or such a schedule; its `decay_steps` are the length of the cycle.

    ```python
    >>> cycle = dict(init_value=0.0, peak_value=1.0, warmup_steps=1, decay_steps=2)
    >>> sl.schedules.sgdr([cycle, cycle]).values(6)
    Array([0., 1., 0., 1., 0., 0.], dtype=float32)

    ```

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    cosine_kwargs: tuple[warmup_cosine_decay, ...] = eqx.field(converter=_as_cycles)

    def __check_init__(self):
        if not self.cosine_kwargs:
            raise ValueError("sgdr.cosine_kwargs must have at least one cycle, got none.")

    def __call__(self, step: Step) -> Scalar:
        first, *later = self.cosine_kwargs
        value, past, begun = first(step), as_step(step), jnp.array(True)
        for previous, cycle in zip(self.cosine_kwargs, later, strict=False):
            # Not the sum of all lengths so far, which may overflow int32.
            past = past - as_step(previous.decay_steps)
            begun = begun & (past >= 0)
            past = jnp.maximum(past, 0)
            value = jnp.where(begun, cycle(past), value)
        return value


def _fraction_of(fraction: Any, steps: Any) -> Any:
    """fraction·steps, rounded down, but not below an integer that it misses by rounding only."""
    dtype = canonical_float()
    product = as_canonical(fraction) * steps.astype(dtype)
    whole = jnp.floor(product * (1 + 2 * jnp.finfo(dtype).eps)).astype(jnp.int32)
    return jnp.minimum(whole, steps)
