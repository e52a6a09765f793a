"""Up and down: one cycle, or many with restarts."""

from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._core.fields import Hyperparameter, hyperparameter, steps
from .._core.schedule import AbstractSchedule
from .._types import Scalar, Step
from ..tree.dtypes import as_canonical, canonical_float
from ._common import through, ticks
from .warmup import warmup_cosine_decay


class linear_onecycle(AbstractSchedule):
    """Straight up to the peak, straight down to the first value again, and further down.

    The corners are at the steps `pct_start·transition_steps` and `pct_final·transition_steps`,
    rounded down, and `transition_steps`; the values there `peak_value/div_factor` (at step 0),
    `peak_value`, `peak_value/div_factor` and `peak_value/(div_factor·final_div_factor)`.

    **Arguments:**

    - `transition_steps`: how many steps the cycle takes, ≥ 1.
    - `peak_value`: the greatest value.
    - `pct_start`: the fraction of the steps that goes up, in [0, 1].
    - `pct_final`: the fraction of the steps after which the first value is reached again, in
        [0, 1], at least `pct_start`.
    - `div_factor`: the peak divided by the first value, > 0.
    - `final_div_factor`: the first value divided by the last, > 0.

    Differs from Optax: corners at one step stay two corners, so that with `pct_final=1` the last
    value is the same; and 0.29·100 is 29, though its product of floats is 28.999….

    ??? cite "Smith & Topin, [Super-convergence](https://arxiv.org/abs/1708.07120), 2017"
    """

    transition_steps: Step = steps(within="[1, inf)")
    peak_value: Hyperparameter = hyperparameter()
    pct_start: Hyperparameter = hyperparameter(0.3, within="[0, 1]")
    pct_final: Hyperparameter = hyperparameter(0.85, within="[0, 1]")
    div_factor: Hyperparameter = hyperparameter(25.0, within="(0, inf)")
    final_div_factor: Hyperparameter = hyperparameter(1e4, within="(0, inf)")

    def __check_init__(self):
        start, final = self.pct_start, self.pct_final
        if isinstance(start, float) and isinstance(final, float) and final < start:
            raise ValueError(
                f"linear_onecycle.pct_final must be at least pct_start={start}, got {final}."
            )

    def __call__(self, step: Step) -> Scalar:
        total, peak = ticks(self.transition_steps), as_canonical(self.peak_value)
        first = peak / as_canonical(self.div_factor)
        points = [
            (0, first),
            (_portion(self.pct_start, total), peak),
            (_portion(self.pct_final, total), first),
            (total, first / as_canonical(self.final_div_factor)),
        ]
        return through(points, step, "linear")


class cosine_onecycle(AbstractSchedule):
    """Half a cosine wave up to the peak, and another down to the last value.

    The peak is at the step `pct_start·transition_steps`, rounded down.

    **Arguments:**

    - `transition_steps`: how many steps the cycle takes, ≥ 1.
    - `peak_value`: the greatest value.
    - `pct_start`: the fraction of the steps that goes up, in [0, 1].
    - `div_factor`: the peak divided by the first value, > 0.
    - `final_div_factor`: the first value divided by the last, > 0.

    Differs from Optax: corners at one step stay two corners; and 0.29·100 is 29, though its
    product of floats is 28.999….

    ??? cite "Smith & Topin, [Super-convergence](https://arxiv.org/abs/1708.07120), 2017"
    """

    transition_steps: Step = steps(within="[1, inf)")
    peak_value: Hyperparameter = hyperparameter()
    pct_start: Hyperparameter = hyperparameter(0.3, within="[0, 1]")
    div_factor: Hyperparameter = hyperparameter(25.0, within="(0, inf)")
    final_div_factor: Hyperparameter = hyperparameter(1e4, within="(0, inf)")

    def __call__(self, step: Step) -> Scalar:
        total, peak = ticks(self.transition_steps), as_canonical(self.peak_value)
        first = peak / as_canonical(self.div_factor)
        points = [
            (0, first),
            (_portion(self.pct_start, total), peak),
            (total, first / as_canonical(self.final_div_factor)),
        ]
        return through(points, step, "cosine")


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
                f"sgdr.cosine_kwargs[{i}] must be a dict of arguments for warmup_cosine_decay, or "
                f"such a schedule, got {cycle!r}."
            )
        cycles.append(cycle)
    return tuple(cycles)


class sgdr(AbstractSchedule):
    """Warm restarts: cycles of `warmup_cosine_decay`, each begun where the one before ends.

    **Arguments:**

    - `cosine_kwargs`: the cycles, at least one: for each the arguments of `warmup_cosine_decay`
        as a dict, or such a schedule. Its `decay_steps` are the cycle's length.

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
        step, begin = ticks(step), jnp.zeros((), jnp.int32)
        first, *later = self.cosine_kwargs
        value = first(step)
        for previous, cycle in zip(self.cosine_kwargs, later, strict=False):
            begin = begin + ticks(previous.decay_steps)
            value = jnp.where(step < begin, value, cycle(jnp.maximum(step - begin, 0)))
        return value


def _portion(fraction: Any, steps: Any) -> Any:
    """A fraction of some steps, rounded down; what is whole up to rounding counts as whole."""
    dtype = canonical_float()
    product = as_canonical(fraction) * steps.astype(dtype)
    whole = jnp.floor(product * (1 + 2 * jnp.finfo(dtype).eps)).astype(jnp.int32)
    return jnp.minimum(whole, steps)
