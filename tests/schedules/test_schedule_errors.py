"""What schedules refuse, and what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_schedules import CYCLES

import slalom as sl

S = sl.schedules

BAD = {
    "linear of no steps": (lambda: S.linear(1.0, 0.0, 0), r"linear\.transition_steps.*got 0"),
    "linear that begins before 0": (
        lambda: S.linear(1.0, 0.0, 5, transition_begin=-1),
        r"linear\.transition_begin.*got -1",
    ),
    "cosine_decay of no steps": (
        lambda: S.cosine_decay(1.0, 0),
        r"cosine_decay\.decay_steps.*got 0",
    ),
    "cosine_decay of negative steps": (
        lambda: S.cosine_decay(1.0, -3),
        r"cosine_decay\.decay_steps.*got -3",
    ),
    "cosine_decay with exponent 0": (
        lambda: S.cosine_decay(1.0, 10, exponent=0.0),
        r"cosine_decay\.exponent.*got 0",
    ),
    "warm-up as long as the decay": (
        lambda: S.warmup_cosine_decay(0.0, 1.0, 10, 10),
        r"decay_steps.*warmup_steps=10.*got 10",
    ),
    "negative warm-up": (
        lambda: S.warmup_cosine_decay(0.0, 1.0, -1, 10),
        r"warmup_steps.*got -1",
    ),
    "boundaries out of order": (
        lambda: S.join([S.constant(1.0)] * 3, [5, 2]),
        r"increasing.*\[5, 2\]",
    ),
    "a boundary twice": (lambda: S.join([S.constant(1.0)] * 3, [5, 5]), r"increasing.*\[5, 5\]"),
    "a negative boundary": (lambda: S.join([S.constant(1.0)] * 2, [-1]), r"non-negative.*\[-1\]"),
    "a boundary too few": (
        lambda: S.join([S.constant(1.0)] * 3, [5]),
        r"3 schedules and 1 boundaries",
    ),
    "polynomial of no steps": (lambda: S.polynomial(1.0, 0.0, 2.0, 0), r"transition_steps.*got 0"),
    "polynomial of power 0": (lambda: S.polynomial(1.0, 0.0, 0.0, 9), r"polynomial\.power.*got 0"),
    "exponential_decay of no steps": (
        lambda: S.exponential_decay(1.0, 0, 0.5),
        r"exponential_decay\.transition_steps.*got 0",
    ),
    "exponential_decay by 0": (
        lambda: S.exponential_decay(1.0, 9, 0.0),
        r"exponential_decay\.decay_rate.*got 0",
    ),
    "a jump before 0": (
        lambda: S.piecewise_constant(1.0, {-3: 0.5}),
        r"each step of boundaries_and_scales.*got -3",
    ),
    "a jump by a negative factor": (
        lambda: S.piecewise_interpolate("linear", 1.0, {5: 0.5, 3: -0.5}),
        r"boundaries_and_scales\[3\].*got -0\.5",
    ),
    "another interpolation": (
        lambda: S.piecewise_interpolate("cubic", 1.0),
        r"interpolate_type must be 'linear' or 'cosine', got 'cubic'",
    ),
    "negative warm-up of a constant": (
        lambda: S.warmup_constant(0.0, 1.0, -1),
        r"warmup_constant\.warmup_steps.*got -1",
    ),
    "warmup_exponential_decay of no steps": (
        lambda: S.warmup_exponential_decay(0.0, 1.0, 5, 0, 0.5),
        r"transition_steps.*got 0",
    ),
    "a cycle of no steps": (lambda: S.linear_onecycle(0, 1.0), r"transition_steps.*got 0"),
    "a cycle of negative steps": (lambda: S.cosine_onecycle(-2, 1.0), r"transition_steps.*got -2"),
    "a cycle of more than all": (lambda: S.cosine_onecycle(9, 1.0, 1.5), r"pct_start.*got 1\.5"),
    "a cycle that is down before it is up": (
        lambda: S.linear_onecycle(9, 1.0, 0.5, 0.4),
        r"pct_final must be at least pct_start=0\.5, got 0\.4",
    ),
    "a cycle from infinity": (
        lambda: S.linear_onecycle(9, 1.0, div_factor=0.0),
        r"div_factor.*got 0",
    ),
    "more steps than the clock counts": (
        lambda: S.cosine_decay(1.0, 10**10),
        r"cosine_decay\.decay_steps must be less than 2\*\*31.*got 10000000000",
    ),
    "no cycles": (lambda: S.sgdr([]), r"at least one cycle"),
    "a cycle as long as its warm-up": (
        lambda: S.sgdr([CYCLES[0], CYCLES[0] | {"decay_steps": 5}]),
        r"cosine_kwargs\[1\]: .*warmup_steps=5.*got 5",
    ),
    "a plateau of negative steps": (
        lambda: S.warmup_stable_decay(0.0, 1.0, 5, -1, 9),
        r"stable_steps.*got -1",
    ),
    "a plateau without a decay": (
        lambda: S.warmup_stable_decay(0.0, 1.0, 5, 5, 0),
        r"warmup_stable_decay\.decay_steps.*got 0",
    ),
    "another decay": (
        lambda: S.warmup_stable_decay(0.0, 1.0, 5, 5, 5, decay_type="exp"),
        r"decay_type must be 'linear' or 'cosine' or 'sqrt', got 'exp'",
    ),
    "no timescale": (lambda: S.inverse_sqrt(0.0, 1.0, 5, timescale=0), r"timescale.*got 0"),
    "another operation": (
        lambda: S.CombinedSchedule("%", 1.0, S.constant(1.0)),
        r"symbol must be one of '\+', '-', '\*', '/', got '%'",
    ),
    "schedules one after the other, out of order": (
        lambda: S.constant(1.0).then(0.5, at=9).then(0.1, at=5),
        r"boundaries must be .*increasing.*\[9, 5\]",
    ),
    "no schedules": (lambda: S.join([], []), r"0 schedules"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_refused(what):
    make, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", ["fast", None, 1j, True, jnp.ones(2)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises((TypeError, ValueError), match=r"cosine_decay\.init_value must be"):
        S.cosine_decay(value, 10)


@pytest.mark.parametrize("value", [2.5, "ten", None, True])
def test_what_is_no_number_of_steps_is_refused(value):
    with pytest.raises((TypeError, ValueError), match=r"cosine_decay\.decay_steps must be"):
        S.cosine_decay(0.1, value)


@pytest.mark.parametrize("value", ["fast", None, 1j, True, jnp.ones(2), np.ones(2)])
def test_what_is_no_number_is_no_operand(value):
    s = S.constant(1.0)
    for make in (lambda: s * value, lambda: value * s):
        with pytest.raises((TypeError, ValueError), match=r"CombinedSchedule\.\w+ must be"):
            make()


def test_a_schedule_divided_by_zero_is_refused():
    with pytest.raises(ZeroDivisionError, match=r"constant\(1\.0\) is divided by zero"):
        S.constant(1.0) / 0


def test_a_schedule_in_a_numbers_place_is_told_how_to():
    s = S.constant(1.0)
    with pytest.raises(TypeError, match=r"linear\.init_value must be a number.*`s \* t`"):
        S.linear(s, 0.0, 4)
    with pytest.raises(TypeError, match=r"boundaries_and_scales\[3\] must be a number"):
        S.piecewise_constant(1.0, {3: s})


@pytest.mark.parametrize("given", [{2.5: 0.1}, {"ten": 0.1}, {True: 0.1}, {3: "half"}, [3, 0.1]])
def test_what_is_no_dict_of_steps_and_factors_is_refused(given):
    with pytest.raises((TypeError, ValueError), match="boundaries_and_scales"):
        S.piecewise_constant(1.0, given)


@pytest.mark.parametrize("at", [2.5, "ten", None, True])
def test_what_is_no_step_is_no_boundary(at):
    with pytest.raises(TypeError, match=r"boundaries|'at'"):
        S.constant(1.0).then(0.1, at=at)


@pytest.mark.parametrize("given", [3, [3], [{"peak_value": 1.0}], [{"speed": 1.0}]])
def test_what_is_no_cycle_is_refused(given):
    with pytest.raises(TypeError, match="cosine_kwargs"):
        S.sgdr(given)


def test_a_schedule_that_closes_over_a_tracer_is_refused_when_it_is_made():
    def helper(lr):
        return lambda step: lr / (step + 1)

    @jax.jit
    def sweep(lr):
        with pytest.raises(TypeError, match="closes over a traced value"):
            sl.adam(lambda step: lr / (step + 1))
        with pytest.raises(TypeError, match="closes over a traced value"):
            sl.adam(helper(lr))
        with pytest.raises(TypeError, match="closes over a traced value"):
            sl.adam(functools.partial(lambda step, lr: lr / (step + 1), lr=lr))
        return lr

    sweep(0.1)


def test_any_callable_tree_keeps_its_arrays_as_leaves():
    def decaying(step, lr):
        return lr / (step.astype(jnp.float32) + 1)

    @jax.jit
    def first_rates(lr):
        tx = sl.adam(jax.tree_util.Partial(decaying, lr=lr))
        opt = sl.Optimizer(tx, jnp.ones(2))
        return opt.hyperparams["learning_rate"]

    assert float(first_rates(0.5)) == 0.5
    assert len(jax.tree.leaves(sl.sgd(jax.tree_util.Partial(decaying, lr=jnp.float32(0.1))))) == 1
