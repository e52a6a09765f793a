"""Schedules that rise and fall: one cycle, or several with restarts."""

from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._core.fields.declare import Number, hyperparameter, steps
from .._core.fields.schedule import AbstractSchedule
from ..tree.dtypes import as_canonical, canonical_float
from ..tree.types import Scalar, Step
from ._common import as_step, interpolate_points
from .warmup import warmup_cosine_decay


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


def _as_cycles(given: Iterable[Cycle]) -> tuple[warmup_cosine_decay, ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"sgdr.cosine_kwargs must be a list of cycles, got {given!r}.")
    cycles = []
    for i, cycle in enumerate(given):
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
