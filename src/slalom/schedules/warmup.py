"""A straight line up to a peak, and what follows it."""

import equinox as eqx
import jax.numpy as jnp

from .._core.fields import Hyperparameter, hyperparameter, steps
from .._core.schedule import AbstractSchedule
from .._types import Scalar, Step
from ..tree.dtypes import as_canonical, canonical_float
from ._common import SHAPES, blend, check_shape, cosine, fraction, ticks, warmed_up
from .decay import exponential


class warmup_constant(AbstractSchedule):
    """A straight line up to `peak_value`, and constant from there.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value from step `warmup_steps` on.
    - `warmup_steps`: how many steps the line takes, ≥ 0.

    Differs from Optax: without warm-up steps the value is `peak_value`, not `init_value`.
    """

    init_value: Hyperparameter = hyperparameter()
    peak_value: Hyperparameter = hyperparameter()
    warmup_steps: Step = steps()

    def __call__(self, step: Step) -> Scalar:
        return warmed_up(step, self.warmup_steps, self.init_value, self.peak_value)


class warmup_cosine_decay(AbstractSchedule):
    """A straight line up to `peak_value`, then half a cosine wave down to `end_value`.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value at step `warmup_steps`.
    - `warmup_steps`: how many steps the line takes, ≥ 0.
    - `decay_steps`: at which step the decay ends; the warm-up counts, so it must be greater.
    - `end_value`: the value from `decay_steps` on.
    - `exponent`: the power of the cosine term, > 0.

    Differs from Optax: after a `peak_value` of 0 it still goes to `end_value`.

    ??? cite "Loshchilov & Hutter, [SGDR](https://arxiv.org/abs/1608.03983), 2016"
    """

    init_value: Hyperparameter = hyperparameter()
    peak_value: Hyperparameter = hyperparameter()
    warmup_steps: Step = steps()
    decay_steps: Step = steps(within="[1, inf)")
    end_value: Hyperparameter = hyperparameter(0.0)
    exponent: Hyperparameter = hyperparameter(1.0, within="(0, inf)")

    def __check_init__(self):
        warmup, decay = self.warmup_steps, self.decay_steps
        if isinstance(warmup, int) and isinstance(decay, int) and decay <= warmup:
            raise ValueError(
                f"warmup_cosine_decay.decay_steps counts from step 0, warm-up included, so it must "
                f"be greater than warmup_steps={warmup}, got {decay}."
            )

    def __call__(self, step: Step) -> Scalar:
        step, warmup = ticks(step), ticks(self.warmup_steps)
        rising = warmed_up(step, warmup, self.init_value, self.peak_value)
        wave = cosine(fraction(step - warmup, ticks(self.decay_steps) - warmup))
        wave = wave ** as_canonical(self.exponent)
        return jnp.where(step < warmup, rising, blend(self.peak_value, self.end_value, wave))


class warmup_exponential_decay(AbstractSchedule):
    """A straight line up to `peak_value`, then a factor for every `transition_steps` steps.

        s(n) = peak_value·decay_rate^p  from n = warmup_steps on,
        p = max(n − warmup_steps − transition_begin, 0) / transition_steps

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value at step `warmup_steps`.
    - `warmup_steps`: how many steps the line takes, ≥ 0.
    - `transition_steps`: how many steps one factor takes, ≥ 1.
    - `decay_rate`: the factor, > 0; above 1 the value grows.
    - `transition_begin`: how many steps after the warm-up the decay begins, ≥ 0.
    - `staircase`: whether to round p down, so that the value falls every `transition_steps`.
    - `end_value`: where the decay stops: a lower bound, or an upper one if `decay_rate` ≥ 1;
        none without it.

    Differs from Optax: a `decay_rate` of 0 is an error, not a constant.
    """

    init_value: Hyperparameter = hyperparameter()
    peak_value: Hyperparameter = hyperparameter()
    warmup_steps: Step = steps()
    transition_steps: Step = steps(within="[1, inf)")
    decay_rate: Hyperparameter = hyperparameter(within="(0, inf)")
    transition_begin: Step = steps(0)
    staircase: bool = eqx.field(default=False, static=True)
    end_value: Hyperparameter | None = hyperparameter(None)

    def __call__(self, step: Step) -> Scalar:
        step, warmup = ticks(step), ticks(self.warmup_steps)
        rising = warmed_up(step, warmup, self.init_value, self.peak_value)
        falling = exponential(self, self.peak_value, step - warmup)
        return jnp.where(step < warmup, rising, falling)


class warmup_stable_decay(AbstractSchedule):
    """A straight line up to `peak_value`, a plateau, and a decay to `end_value`.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value on the plateau.
    - `warmup_steps`: how many steps the line takes, ≥ 0.
    - `stable_steps`: how many steps the plateau takes, ≥ 0.
    - `decay_steps`: how many steps the decay takes, ≥ 1; warm-up and plateau do not count.
    - `end_value`: the value after all of them.
    - `decay_type`: the share of the peak that is left at the fraction f of the decay:
        `"linear"` 1 − f, `"cosine"` ½(1 + cos πf), or `"sqrt"` 1 − √f.

    ??? cite "Hu et al., [MiniCPM](https://arxiv.org/abs/2404.06395), 2024; Hägele et al.,
        [Scaling laws and compute-optimal training beyond fixed training
        durations](https://arxiv.org/abs/2405.18392), 2024"
    """

    init_value: Hyperparameter = hyperparameter()
    peak_value: Hyperparameter = hyperparameter()
    warmup_steps: Step = steps()
    stable_steps: Step = steps()
    decay_steps: Step = steps(within="[1, inf)")
    end_value: Hyperparameter = hyperparameter(0.0)
    decay_type: str = eqx.field(default="linear", static=True)

    def __check_init__(self):
        check_shape("warmup_stable_decay.decay_type", self.decay_type, "linear", "cosine", "sqrt")

    def __call__(self, step: Step) -> Scalar:
        step, warmup = ticks(step), ticks(self.warmup_steps)
        begin = warmup + ticks(self.stable_steps)
        share = SHAPES[self.decay_type](fraction(step - begin, self.decay_steps))
        rising = warmed_up(step, warmup, self.init_value, self.peak_value)
        return jnp.where(step < begin, rising, blend(self.peak_value, self.end_value, share))


class inverse_sqrt(AbstractSchedule):
    """A straight line up to `peak_value`, then down with one over the root of the step.

        s(n) = peak_value·√(timescale / (n − warmup_steps + timescale))  from n = warmup_steps on

    With the default timescale that is `peak_value·√(warmup_steps / n)`.

    **Arguments:**

    - `init_value`: the value at step 0.
    - `peak_value`: the value at step `warmup_steps`.
    - `warmup_steps`: how many steps the line takes, ≥ 0.
    - `timescale`: after three times as many steps behind the peak the value is half of it, ≥ 1;
        `warmup_steps`, or 1 if there are none, without it.

    ??? cite "Vaswani et al., [Attention is all you need](https://arxiv.org/abs/1706.03762), 2017"
    """

    init_value: Hyperparameter = hyperparameter()
    peak_value: Hyperparameter = hyperparameter()
    warmup_steps: Step = steps()
    timescale: Step | None = steps(None, within="[1, inf)")

    def __call__(self, step: Step) -> Scalar:
        step, warmup = ticks(step), ticks(self.warmup_steps)
        timescale = jnp.maximum(warmup, 1) if self.timescale is None else ticks(self.timescale)
        # Added as floats: as int32 the sum might overflow.
        scale = timescale.astype(canonical_float())
        past = jnp.maximum(step - warmup, 0).astype(canonical_float())
        falling = as_canonical(self.peak_value) * jnp.sqrt(scale / (past + scale))
        rising = warmed_up(step, warmup, self.init_value, self.peak_value)
        return jnp.where(step < warmup, rising, falling)
