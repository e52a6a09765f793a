"""Linear warm-up, followed by another schedule."""

import equinox as eqx
import jax.numpy as jnp

from .._core.fields.declare import Number, OptionalNumber, hyperparameter, steps
from .._core.fields.schedule import AbstractSchedule
from ..tree.dtypes import as_canonical, canonical_float
from ..tree.types import Scalar, Step
from ._common import (
    CURVES,
    as_step,
    check_curve,
    cosine,
    fractions,
    interpolate,
    linear_warmup,
    power,
)
from .decay import exponential


class warmup_constant(AbstractSchedule):
    """Linear warm-up to `peak_value`, constant afterwards.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value from step `warmup_steps` on.
    - `warmup_steps`: the length of the warm-up in steps, ≥ 0.

    Differs from Optax: with `warmup_steps=0` the value is `peak_value`, not `init_value`.
    """

    init_value: Number = hyperparameter()
    peak_value: Number = hyperparameter()
    warmup_steps: Step = steps()

    def __call__(self, step: Step) -> Scalar:
        return linear_warmup(step, self.warmup_steps, self.init_value, self.peak_value)


class warmup_cosine_decay(AbstractSchedule):
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

    init_value: Number = hyperparameter()
    peak_value: Number = hyperparameter()
    warmup_steps: Step = steps()
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

    def __call__(self, step: Step) -> Scalar:
        step, warmup = as_step(step), as_step(self.warmup_steps)
        rising = linear_warmup(step, warmup, self.init_value, self.peak_value)
        weights = cosine(fractions(step - warmup, as_step(self.decay_steps) - warmup))
        weights = power(weights, self.exponent)
        falling = interpolate(self.peak_value, self.end_value, weights)
        return jnp.where(step < warmup, rising, falling)


class warmup_exponential_decay(AbstractSchedule):
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

    init_value: Number = hyperparameter()
    peak_value: Number = hyperparameter()
    warmup_steps: Step = steps()
    transition_steps: Step = steps(within="[1, inf)")
    decay_rate: Number = hyperparameter(within="(0, inf)")
    transition_begin: Step = steps(0)
    staircase: bool = eqx.field(default=False, static=True)
    end_value: OptionalNumber = hyperparameter(None)

    def __call__(self, step: Step) -> Scalar:
        step, warmup = as_step(step), as_step(self.warmup_steps)
        rising = linear_warmup(step, warmup, self.init_value, self.peak_value)
        falling = exponential(self, self.peak_value, step - warmup)
        return jnp.where(step < warmup, rising, falling)


class warmup_stable_decay(AbstractSchedule):
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

    init_value: Number = hyperparameter()
    peak_value: Number = hyperparameter()
    warmup_steps: Step = steps()
    stable_steps: Step = steps()
    decay_steps: Step = steps(within="[1, inf)")
    end_value: Number = hyperparameter(0.0)
    decay_type: str = eqx.field(default="linear", static=True)

    def __check_init__(self):
        check_curve("warmup_stable_decay.decay_type", self.decay_type, "linear", "cosine", "sqrt")

    def __call__(self, step: Step) -> Scalar:
        step, warmup = as_step(step), as_step(self.warmup_steps)
        # Not step − (warmup + stable): the sum may overflow int32.
        past = jnp.maximum(step - warmup, 0) - as_step(self.stable_steps)
        weights = CURVES[self.decay_type](fractions(past, self.decay_steps))
        rising = linear_warmup(step, warmup, self.init_value, self.peak_value)
        falling = interpolate(self.peak_value, self.end_value, weights)
        return jnp.where((step < warmup) | (past < 0), rising, falling)


class inverse_sqrt(AbstractSchedule):
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

    init_value: Number = hyperparameter()
    peak_value: Number = hyperparameter()
    warmup_steps: Step = steps()
    timescale: Step | None = steps(None, within="[1, inf)")

    def __call__(self, step: Step) -> Scalar:
        step, warmup = as_step(step), as_step(self.warmup_steps)
        timescale = jnp.maximum(warmup, 1) if self.timescale is None else as_step(self.timescale)
        # Added as floats: the sum may overflow int32.
        scale = timescale.astype(canonical_float())
        past = jnp.maximum(step - warmup, 0).astype(canonical_float())
        falling = as_canonical(self.peak_value) * jnp.sqrt(scale / (past + scale))
        rising = linear_warmup(step, warmup, self.init_value, self.peak_value)
        return jnp.where(step < warmup, rising, falling)
