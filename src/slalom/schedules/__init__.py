"""Schedules: hyperparameters that are functions of the step.

A schedule is called like a function, so these classes have lower-case names, as
`functools.partial` has.

Steps are int32. Unlike in Optax, whose steps may be floats of any size, lengths of 2³¹ steps or
more are refused, and the step count stays at 2³¹ − 1 instead of overflowing. Values near the end of
a schedule are computed from the steps that are left; those of Optax lose digits there.
"""

from .._core.fields.schedule import (
    AbstractSchedule as AbstractSchedule,
    AbstractStatefulSchedule as AbstractStatefulSchedule,
    FunctionSchedule as FunctionSchedule,
)
from .averages import power_average as power_average
from .basic import (
    constant as constant,
    cosine_decay as cosine_decay,
    exponential_decay as exponential_decay,
    linear as linear,
    linear_half_life as linear_half_life,
    piecewise_constant as piecewise_constant,
    piecewise_interpolate as piecewise_interpolate,
    polynomial as polynomial,
)
from .combine import (
    CombinedSchedule as CombinedSchedule,
    NegatedSchedule as NegatedSchedule,
    join as join,
)
from .plateau import ReduceOnPlateau as ReduceOnPlateau
from .warmup import (
    cosine_onecycle as cosine_onecycle,
    inverse_sqrt as inverse_sqrt,
    linear_onecycle as linear_onecycle,
    sgdr as sgdr,
    warmup_constant as warmup_constant,
    warmup_cosine_decay as warmup_cosine_decay,
    warmup_exponential_decay as warmup_exponential_decay,
    warmup_stable_decay as warmup_stable_decay,
)
