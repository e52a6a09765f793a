"""What schedules refuse, and what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_schedules import CYCLES

import slalom as sl

S = sl.schedules

ONE, STABLE = S.constant(1.0), functools.partial(S.warmup_stable_decay, 0.0, 1.0, 5)
# Messages, as expressions, and what they refuse.
BAD = {
    r"linear\.transition_steps.*got 0": lambda: S.linear(1.0, 0.0, 0),
    r"linear\.transition_begin.*got -1": lambda: S.linear(1.0, 0.0, 5, transition_begin=-1),
    r"cosine_decay\.decay_steps.*got 0": lambda: S.cosine_decay(1.0, 0),
    r"cosine_decay\.decay_steps.*got -3": lambda: S.cosine_decay(1.0, -3),
    r"cosine_decay\.decay_steps must be less than 2\*\*31.*got 10000000000": (
        lambda: S.cosine_decay(1.0, 10**10)
    ),
    r"cosine_decay\.exponent.*got 0": lambda: S.cosine_decay(1.0, 10, exponent=0.0),
    r"decay_steps.*warmup_steps=10.*got 10": lambda: S.warmup_cosine_decay(0.0, 1.0, 10, 10),
    r"warmup_cosine_decay.*warmup_steps.*got -1": lambda: S.warmup_cosine_decay(0.0, 1.0, -1, 10),
    r"increasing.*\[5, 2\]": lambda: S.join([ONE] * 3, [5, 2]),
    r"increasing.*\[5, 5\]": lambda: S.join([ONE] * 3, [5, 5]),
    r"non-negative.*\[-1\]": lambda: S.join([ONE] * 2, [-1]),
    r"boundaries must be .*increasing.*\[9, 5\]": lambda: ONE.then(0.5, at=9).then(0.1, at=5),
    r"3 schedules and 1 boundaries": lambda: S.join([ONE] * 3, [5]),
    r"0 schedules": lambda: S.join([], []),
    r"polynomial\.transition_steps.*got 0": lambda: S.polynomial(1.0, 0.0, 2.0, 0),
    r"polynomial\.power.*got 0": lambda: S.polynomial(1.0, 0.0, 0.0, 9),
    r"exponential_decay\.transition_steps.*got 0": lambda: S.exponential_decay(1.0, 0, 0.5),
    r"exponential_decay\.decay_rate.*got 0": lambda: S.exponential_decay(1.0, 9, 0.0),
    r"each step of boundaries_and_scales.*got -3": lambda: S.piecewise_constant(1.0, {-3: 0.5}),
    r"boundaries_and_scales\[3\].*got -0\.5": (
        lambda: S.piecewise_interpolate("linear", 1.0, {5: 0.5, 3: -0.5})
    ),
    r"interpolate_type must be 'linear' or 'cosine', got 'cubic'": (
        lambda: S.piecewise_interpolate("cubic", 1.0)
    ),
    r"warmup_constant\.warmup_steps.*got -1": lambda: S.warmup_constant(0.0, 1.0, -1),
    r"warmup_exponential_decay\.transition_steps.*got 0": (
        lambda: S.warmup_exponential_decay(0.0, 1.0, 5, 0, 0.5)
    ),
    r"linear_onecycle\.transition_steps.*got 0": lambda: S.linear_onecycle(0, 1.0),
    r"cosine_onecycle\.transition_steps.*got -2": lambda: S.cosine_onecycle(-2, 1.0),
    r"pct_start.*got 1\.5": lambda: S.cosine_onecycle(9, 1.0, 1.5),
    r"pct_final must be at least pct_start=0\.5, got 0\.4": (
        lambda: S.linear_onecycle(9, 1.0, 0.5, 0.4)
    ),
    r"div_factor.*got 0": lambda: S.linear_onecycle(9, 1.0, div_factor=0.0),
    r"at least one cycle": lambda: S.sgdr([]),
    r"cosine_kwargs\[1\]: .*warmup_steps=5.*got 5": (
        lambda: S.sgdr([CYCLES[0], CYCLES[0] | {"decay_steps": 5}])
    ),
    r"stable_steps.*got -1": lambda: STABLE(-1, 9),
    r"warmup_stable_decay\.decay_steps.*got 0": lambda: STABLE(5, 0),
    r"decay_type must be 'linear' or 'cosine' or 'sqrt', got 'exp'": (
        lambda: STABLE(5, 5, decay_type="exp")
    ),
    r"timescale.*got 0": lambda: S.inverse_sqrt(0.0, 1.0, 5, timescale=0),
    r"symbol must be one of '\+', '-', '\*', '/', got '%'": (
        lambda: S.CombinedSchedule("%", 1.0, ONE)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


NO_NUMBERS, NO_STEPS = ("fast", None, 1j, True, jnp.ones(2)), (2.5, "ten", None, True)
NO_FACTORS = ({2.5: 0.1}, {"ten": 0.1}, {True: 0.1}, {3: "half"}, [3, 0.1])
# What makes a schedule of one value, the message, and the values that are refused.
NO_VALUES = {
    r"cosine_decay\.init_value must be": (lambda x: S.cosine_decay(x, 10), NO_NUMBERS),
    r"cosine_decay\.decay_steps must be": (lambda x: S.cosine_decay(0.1, x), NO_STEPS),
    r"CombinedSchedule\.right must be": (lambda x: S.constant(1.0) * x, (*NO_NUMBERS, np.ones(2))),
    r"CombinedSchedule\.left must be": (lambda x: x * S.constant(1.0), (*NO_NUMBERS, np.ones(2))),
    "boundaries_and_scales": (lambda x: S.piecewise_constant(1.0, x), NO_FACTORS),
    r"boundaries|'at'": (lambda x: S.constant(1.0).then(0.1, at=x), NO_STEPS),
    "cosine_kwargs": (S.sgdr, (3, [3], [{"peak_value": 1.0}], [{"speed": 1.0}])),
}


@pytest.mark.parametrize(
    ("message", "value"),
    [(message, value) for message, (_, values) in NO_VALUES.items() for value in values],
)
def test_values_of_another_type_are_refused(message, value):
    make, _ = NO_VALUES[message]
    with pytest.raises((TypeError, ValueError), match=message):
        make(value)


def test_callables_are_schedules_in_the_right_place_without_tracers():
    s = S.constant(1.0)
    with pytest.raises(ZeroDivisionError, match=r"constant\(1\.0\) is divided by zero"):
        s / 0
    with pytest.raises(TypeError, match=r"linear\.init_value must be a number.*`s \* t`"):
        S.linear(s, 0.0, 4)
    with pytest.raises(TypeError, match=r"boundaries_and_scales\[3\] must be a number"):
        S.piecewise_constant(1.0, {3: s})

    def helper(lr):
        return lambda step: lr / (step + 1)

    @jax.jit
    def sweep(lr):
        partial = functools.partial(lambda step, lr: lr / (step + 1), lr=lr)
        for schedule in (lambda step: lr / (step + 1), helper(lr), partial):
            with pytest.raises(TypeError, match="closes over a traced value"):
                sl.adam(schedule)
        return lr

    sweep(0.1)

    def decaying(step, lr):
        return lr / (step.astype(jnp.float32) + 1)

    @jax.jit
    def first_rates(lr):
        tx = sl.adam(jax.tree_util.Partial(decaying, lr=lr))
        return sl.Optimizer(tx, jnp.ones(2)).hyperparams["learning_rate"]

    assert float(first_rates(0.5)) == 0.5
    assert len(jax.tree.leaves(sl.sgd(jax.tree_util.Partial(decaying, lr=jnp.float32(0.1))))) == 1
