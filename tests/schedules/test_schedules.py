"""Schedules: their values, their arithmetic, and what they are as modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import lenient, slow_except
from slalom._core.fields.declare import bind_numbers

S = sl.schedules

# --- values ---------------------------------------------------------------------------------

CYCLES = [
    {"init_value": 0.0, "peak_value": 0.9, "warmup_steps": 5, "decay_steps": 20},
    {"init_value": 0.1, "peak_value": 0.5, "warmup_steps": 0, "decay_steps": 30, "end_value": 0.1},
    {"init_value": 0.1, "peak_value": 0.2, "warmup_steps": 3, "decay_steps": 9, "exponent": 2.0},
]
WAVE = S.cosine_decay(0.3, 50)


def LINE(n):
    return np.interp(n, [0, 40], [0.1, 1.5])


def CLOCK(n):
    return np.pi * np.minimum(n, 50) / 50


PAIRS = {
    "constant": (S.constant(0.3), optax.constant_schedule(0.3)),
    "linear": (S.linear(0.1, 1.5, 40), optax.linear_schedule(0.1, 1.5, 40)),
    "linear-later": (
        S.linear(0.7, 0.1, 30, transition_begin=13),
        optax.linear_schedule(0.7, 0.1, 30, transition_begin=13),
    ),
    "cosine_decay": (S.cosine_decay(0.3, 50), optax.cosine_decay_schedule(0.3, 50)),
    "cosine_decay-to-a-fraction": (
        S.cosine_decay(0.3, 50, alpha=0.1, exponent=1.7),
        optax.cosine_decay_schedule(0.3, 50, alpha=0.1, exponent=1.7),
    ),
    "warmup_cosine_decay": (
        S.warmup_cosine_decay(0.01, 0.3, 11, 70, 0.02),
        optax.warmup_cosine_decay_schedule(0.01, 0.3, 11, 70, 0.02),
    ),
    "warmup_cosine_decay-exponent": (
        S.warmup_cosine_decay(0.0, 0.3, 7, 50, 0.02, exponent=0.5),
        optax.warmup_cosine_decay_schedule(0.0, 0.3, 7, 50, 0.02, exponent=0.5),
    ),
    "join": (
        S.join([S.linear(0.0, 1.0, 10), S.constant(1.0), S.cosine_decay(1.0, 30)], [10, 25]),
        optax.join_schedules(
            [
                optax.linear_schedule(0.0, 1.0, 10),
                optax.constant_schedule(1.0),
                optax.cosine_decay_schedule(1.0, 30),
            ],
            [10, 25],
        ),
    ),
    "polynomial": (
        S.polynomial(0.9, 0.1, 2.5, 40, transition_begin=7),
        optax.polynomial_schedule(0.9, 0.1, 2.5, 40, transition_begin=7),
    ),
    "exponential_decay": (
        S.exponential_decay(0.9, 20, 0.3, transition_begin=7),
        optax.exponential_decay(0.9, 20, 0.3, transition_begin=7),
    ),
    "exponential_decay-stairs-above": (
        S.exponential_decay(0.9, 8, 0.7, 3, staircase=True, end_value=0.2),
        optax.exponential_decay(0.9, 8, 0.7, 3, staircase=True, end_value=0.2),
    ),
    "exponential_decay-growing-below": (
        S.exponential_decay(0.1, 9, 1.4, end_value=0.8),
        optax.exponential_decay(0.1, 9, 1.4, end_value=0.8),
    ),
    "piecewise_constant": (
        S.piecewise_constant(0.3, {40: 0.5, 12: 0.1, 60: 4.0}),
        optax.piecewise_constant_schedule(0.3, {40: 0.5, 12: 0.1, 60: 4.0}),
    ),
    "piecewise_constant-of-one-value": (
        S.piecewise_constant(0.3),
        optax.piecewise_constant_schedule(0.3),
    ),
    "piecewise_interpolate-linear": (
        S.piecewise_interpolate("linear", 0.3, {40: 0.5, 12: 0.1, 60: 4.0}),
        optax.piecewise_interpolate_schedule("linear", 0.3, {40: 0.5, 12: 0.1, 60: 4.0}),
    ),
    "piecewise_interpolate-cosine": (
        S.piecewise_interpolate("cosine", 0.3, {0: 2.0, 12: 0.1, 60: 4.0}),
        optax.piecewise_interpolate_schedule("cosine", 0.3, {0: 2.0, 12: 0.1, 60: 4.0}),
    ),
    "warmup_constant": (
        S.warmup_constant(0.01, 0.3, 13),
        optax.warmup_constant_schedule(0.01, 0.3, 13),
    ),
    "warmup_exponential_decay": (
        S.warmup_exponential_decay(0.01, 0.3, 13, 20, 0.4, transition_begin=5, end_value=0.05),
        optax.warmup_exponential_decay_schedule(
            0.01, 0.3, 13, 20, 0.4, transition_begin=5, end_value=0.05
        ),
    ),
    "warmup_exponential_decay-stairs": (
        S.warmup_exponential_decay(0.01, 0.3, 0, 20, 0.4, staircase=True),
        optax.warmup_exponential_decay_schedule(0.01, 0.3, 0, 20, 0.4, staircase=True),
    ),
    "linear_onecycle": (
        S.linear_onecycle(80, 0.7),
        optax.linear_onecycle_schedule(80, 0.7),
    ),
    "linear_onecycle-other-corners": (
        S.linear_onecycle(75, 0.7, 0.1, 0.9, 10.0, 100.0),
        optax.linear_onecycle_schedule(75, 0.7, 0.1, 0.9, 10.0, 100.0),
    ),
    "cosine_onecycle": (
        S.cosine_onecycle(75, 0.7, 0.4, 10.0, 100.0),
        optax.cosine_onecycle_schedule(75, 0.7, 0.4, 10.0, 100.0),
    ),
    "sgdr": (S.sgdr(CYCLES), optax.sgdr_schedule(CYCLES)),
}
"""Ours and the one of optax."""

FORMULAE = {
    "warmup_stable_decay": (
        S.warmup_stable_decay(0.1, 0.9, 10, 20, 40, 0.2),
        lambda n: np.interp(n, [0, 10, 30, 70], [0.1, 0.9, 0.9, 0.2]),
    ),
    "warmup_stable_decay-cosine": (
        S.warmup_stable_decay(0.1, 0.9, 10, 20, 40, decay_type="cosine"),
        lambda n: np.where(
            n < 30,
            np.interp(n, [0, 10], [0.1, 0.9]),
            0.45 + 0.45 * np.cos(np.pi * np.clip(n - 30, 0, 40) / 40),
        ),
    ),
    "warmup_stable_decay-sqrt-only": (
        S.warmup_stable_decay(0.1, 0.9, 0, 0, 60, 0.2, decay_type="sqrt"),
        lambda n: 0.9 - 0.7 * np.sqrt(np.minimum(n, 60) / 60),
    ),
    "inverse_sqrt": (
        S.inverse_sqrt(0.0, 0.9, 16),
        lambda n: 0.9 * np.minimum(n / 16, np.sqrt(16 / np.maximum(n, 1))),
    ),
    "inverse_sqrt-timescale": (
        S.inverse_sqrt(0.3, 0.9, 0, timescale=25),
        lambda n: 0.9 * np.sqrt(25 / (n + 25)),
    ),
    "2 * s": (2 * S.linear(0.1, 1.5, 40), lambda n: 2 * LINE(n)),
    "s + t": (S.linear(0.1, 1.5, 40) + WAVE, lambda n: LINE(n) + 0.15 * (1 + np.cos(CLOCK(n)))),
    "s * t": (S.linear(0.1, 1.5, 40) * WAVE, lambda n: LINE(n) * 0.15 * (1 + np.cos(CLOCK(n)))),
    "(s - 1) / (2 - -t)": (
        (S.linear(0.1, 1.5, 40) - 1) / (2 - -WAVE),
        lambda n: (LINE(n) - 1) / (2 + 0.15 * (1 + np.cos(CLOCK(n)))),
    ),
    "1 / s": (1 / S.linear(0.1, 1.5, 40), lambda n: 1 / LINE(n)),
    "then": (
        (-S.linear(0.1, 1.5, 40)).then(0.25, at=30).then(2 * S.linear(0.1, 1.5, 40), at=50),
        lambda n: np.select([n < 30, n < 50], [-LINE(n), 0.25 + 0 * n], 2 * LINE(n - 50)),
    ),
}
"""Schedules that optax has not, and what they should be in double precision."""

ALL = {name: schedule for name, (schedule, _) in (PAIRS | FORMULAE).items()}

every = pytest.mark.parametrize("name", ALL)


def variants_slow(names):
    """The names as parameters; of one schedule with several options only the first is quick."""
    first = {name.split("-")[0]: name for name in reversed(list(names))}
    return pytest.mark.parametrize("name", slow_except(names, *first.values()))


each_pair = variants_slow(PAIRS)
each = variants_slow(ALL)


def values_of_optax(schedule, n):
    # Given an int32 step it computes in float32 always, so it is given the widest float.
    with lenient():
        values = jax.vmap(schedule)(jnp.arange(n, dtype=jnp.result_type(float)))
    return np.broadcast_to(values, (n,))


@pytest.mark.slow
@each_pair
def test_values_are_those_of_optax_in_double_precision(name, x64):
    ours, theirs = PAIRS[name]
    values = ours.values(100)
    assert values.dtype == jnp.float64
    np.testing.assert_allclose(values, values_of_optax(theirs, 100), rtol=1e-9, atol=1e-15)


@pytest.mark.slow
@each_pair
def test_values_are_those_of_optax_in_single_precision(name):
    ours, theirs = PAIRS[name]
    values = ours.values(100)
    assert values.dtype == jnp.float32
    assert not values.weak_type
    np.testing.assert_allclose(values, values_of_optax(theirs, 100), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAE)
def test_values_are_those_of_the_formula(name, x64):
    schedule, formula = FORMULAE[name]
    values = schedule.values(100)
    assert values.dtype == jnp.float64
    np.testing.assert_allclose(values, formula(np.arange(100.0)), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", FORMULAE)
def test_values_are_those_of_the_formula_in_single_precision(name):
    schedule, formula = FORMULAE[name]
    values = schedule.values(100)
    assert values.dtype == jnp.float32
    assert not values.weak_type
    np.testing.assert_allclose(values, formula(np.arange(100.0)), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["single", "double"])
def test_ends_are_exact(precision, request):
    if precision == "double":
        request.getfixturevalue("x64")
    number = np.float32 if precision == "single" else np.float64
    at = jax.jit(lambda schedule, steps: jax.vmap(schedule)(steps))
    random = np.random.default_rng(0)
    for init, peak, end in random.uniform(1e-4, 3.0, (8, 3)):
        # As arguments, so that all of them share three programs.
        init, peak, end = (jnp.asarray(x, number) for x in (init, peak, end))
        line = at(S.linear(init, end, 7, transition_begin=3), jnp.array([0, 3, 10, 11, 10**9]))
        assert line.tolist() == [init, init, end, end, end]
        wave = at(S.cosine_decay(init, 9), jnp.array([0, 9, 10, 10**9]))
        assert wave.tolist() == [init, 0, 0, 0]
        warm = S.warmup_cosine_decay(init, peak, 5, 17, end)
        assert at(warm, jnp.array([0, 5, 17, 10**9])).tolist() == [init, peak, end, end]
        bent = S.polynomial(init, end, peak, 7, transition_begin=3)
        assert at(bent, jnp.array([0, 3, 10, 10**9])).tolist() == [init, init, end, end]
        stable = S.warmup_stable_decay(init, peak, 5, 6, 7, end, decay_type="sqrt")
        steps = jnp.array([0, 5, 8, 11, 18, 10**9])
        assert at(stable, steps).tolist() == [init, peak, peak, peak, end, end]
        root = S.inverse_sqrt(init, peak, 5)
        assert at(root, jnp.array([0, 5])).tolist() == [init, peak]
        fall = S.warmup_exponential_decay(init, peak, 5, 6, 0.5, 2)
        assert at(fall, jnp.array([0, 5, 7])).tolist() == [init, peak, peak]
        cycle = S.linear_onecycle(20, peak, div_factor=4.0, final_div_factor=8.0)
        steps = jnp.array([0, 6, 17, 20, 10**9])
        assert at(cycle, steps).tolist() == [peak / 4, peak, peak / 4, peak / 32, peak / 32]
        cycle = S.cosine_onecycle(20, peak, div_factor=4.0, final_div_factor=8.0)
        assert at(cycle, steps[jnp.array([0, 1, 3, 4])]).tolist() == [
            peak / 4,
            peak,
            peak / 32,
            peak / 32,
        ]


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.25, 0.3, 0.7, 1.0])
def test_cosine_decay_to_a_fraction_is_exact_at_both_ends(alpha):
    wave = S.cosine_decay(0.3, 9, alpha=alpha)
    assert wave(0) == np.float32(0.3)
    assert wave(9) == np.float32(0.3) * np.float32(alpha)


@pytest.mark.slow
def test_no_warm_up_begins_at_the_peak():
    schedule = S.warmup_cosine_decay(0.0, 0.3, 0, 10)
    assert schedule(0) == np.float32(0.3)
    assert np.all(np.diff(schedule.values(11)) < 0)


@pytest.mark.parametrize(
    "schedule",
    [S.warmup_constant(0.1, 0.9, 0), S.warmup_exponential_decay(0.1, 0.9, 0, 10, 1.0)],
)
def test_without_warm_up_the_peak_is_all_there_is(schedule):
    np.testing.assert_array_equal(schedule.values(5), np.full(5, 0.9, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_jump_at_step_0_counts_from_there(kind):
    for schedule in (
        S.piecewise_constant(1.0, {0: 0.5}),
        S.piecewise_interpolate(kind, 1.0, {0: 0.5}),
    ):
        np.testing.assert_array_equal(schedule.values(3), [0.5, 0.5, 0.5])
    np.testing.assert_array_equal(
        S.piecewise_interpolate(kind, 0.7).values(3), np.float32([0.7] * 3)
    )


def test_a_cycle_without_a_last_part_ends_where_it_should():
    # In a dict from steps to factors the corners at step 10 would be one.
    schedule = S.linear_onecycle(10, 1.0, pct_final=1.0, div_factor=4.0, final_div_factor=2.0)
    np.testing.assert_array_equal(schedule(10), 1 / 8)
    schedule = S.linear_onecycle(10, 1.0, pct_start=0.0, pct_final=0.0)
    np.testing.assert_array_equal(schedule(0), np.float32(1 / 25))
    schedule = S.cosine_onecycle(10, 1.0, pct_start=1.0, final_div_factor=2.0)
    np.testing.assert_array_equal(schedule(10), np.float32(1 / 50))
    np.testing.assert_array_equal(S.cosine_onecycle(10, 1.0, pct_start=0.0)(0), 1.0)


@pytest.mark.parametrize("precision", ["single", "double"])
def test_the_corners_of_a_cycle_are_not_rounded_away(precision, request):
    if precision == "double":
        request.getfixturevalue("x64")
    peak = jax.jit(lambda pct, total: jnp.argmax(S.linear_onecycle(total, 1.0, pct).values(200)))
    for percent in range(85):
        # 0.29 * 100 is 28.999999999999996, and 0.07 * 100 is 7.000000000000001.
        assert peak(jnp.asarray(percent / 100, float), jnp.int32(100)) == percent
        assert peak(jnp.asarray(percent / 100, float), jnp.int32(150)) == percent * 150 // 100


def test_stairs_fall_on_whole_steps():
    # Rounded to floats, n / 49 falls below a whole number at multiples of 49.
    stairs = S.exponential_decay(1.0, 49, 0.5, staircase=True).values(4 * 49)
    np.testing.assert_array_equal(stairs, np.repeat([1, 0.5, 0.25, 0.125], 49))
    late = S.exponential_decay(1.0, 2**24 + 1, 0.5, staircase=True)
    assert [float(late(2**24 + n)) for n in range(2)] == [1.0, 0.5]


@pytest.mark.slow
def test_restarts_are_at_the_ends_of_the_cycles():
    values = S.sgdr(CYCLES).values(70)
    at = {0: 0.0, 5: 0.9, 20: 0.5, 50: 0.1, 53: 0.2, 59: 0.0, 69: 0.0}
    np.testing.assert_array_equal(values[np.array(list(at))], np.float32(list(at.values())))
    cycles = [S.warmup_cosine_decay(**kwargs) for kwargs in CYCLES]
    assert S.sgdr(cycles) == S.sgdr(CYCLES)


def test_the_inverse_root_halves_after_three_timescales():
    assert S.inverse_sqrt(0.0, 1.0, 10)(40) == 0.5
    assert S.inverse_sqrt(0.0, 1.0, 10, timescale=7)(31) == 0.5
    assert S.inverse_sqrt(0.0, 1.0, 0)(3) == 0.5


def test_join_switches_at_its_boundaries():
    schedule = S.join([S.constant(1.0), S.linear(5.0, 6.0, 2), S.constant(9.0)], [2, 5])
    np.testing.assert_array_equal(schedule.values(7), [1, 1, 5, 5.5, 6, 9, 9])


def test_join_takes_functions():
    schedule = S.join([lambda n: 10 * n, lambda n: 20 * n], [3])
    np.testing.assert_array_equal(schedule.values(6), [0, 10, 20, 0, 20, 40])


def test_join_takes_numbers():
    schedule = S.constant(0.5).then(0.25, at=1).then(lambda n: 10 * n, at=3)
    np.testing.assert_array_equal(schedule.values(5), [0.5, 0.25, 0.25, 0, 10])


def test_one_after_another_is_one_list():
    s = S.linear(0.0, 1.0, 4)
    assert s.then(s, at=2).then(s, at=5) == S.join([s, s, s], [2, 5])


def test_steps_beyond_float32_are_not_rounded():
    # 2²⁴ + 1 is no float32: the beginning of a late line must not be missed by a rounding.
    begin = 2**24
    line = S.linear(0.0, 1.0, 2, transition_begin=begin)
    assert [float(line(begin + n)) for n in range(4)] == [0.0, 0.5, 1.0, 1.0]
    jump = S.piecewise_constant(1.0, {begin + 1: 0.5})
    assert [float(jump(begin + n)) for n in range(3)] == [1.0, 0.5, 0.5]
    then = S.constant(0.0).then(S.linear(0.0, 1.0, 2), at=begin + 1)
    assert [float(then(begin + n)) for n in range(4)] == [0.0, 0.0, 0.5, 1.0]


@pytest.mark.slow
@each
def test_one_compiled_function_for_all_steps(name):
    schedule = ALL[name]
    traces = []

    @jax.jit
    def value(step):
        traces.append(step)
        return schedule(step)

    values = [value(jnp.int32(n)) for n in range(0, 90, 9)]
    assert len(traces) == 1
    np.testing.assert_allclose(values, schedule.values(90)[::9], rtol=1e-6, atol=1e-7)
    # Eagerly, of a Python int, too.
    np.testing.assert_allclose(schedule(27), values[3], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_values_over_a_batch_of_schedules():
    # A schedule's numbers are leaves: one program for several of them.
    peaks = jnp.array([0.1, 0.2, 0.3])
    made = jax.vmap(lambda peak: S.warmup_cosine_decay(0.0, peak, 3, 9).values(9))(peaks)
    for row, peak in zip(made, peaks, strict=True):
        alone = S.warmup_cosine_decay(0.0, float(peak), 3, 9).values(9)
        np.testing.assert_allclose(row, alone, rtol=1e-6)


# --- arithmetic -----------------------------------------------------------------------------


ARITHMETIC = {
    "2 * s": (lambda s, t: 2 * s, "2.0 * s"),
    "s * 2": (lambda s, t: s * 2, "s * 2.0"),
    "NumPy's number": (lambda s, t: np.float32(2.0) * s, "2.0 * s"),
    "NumPy's array": (lambda s, t: np.array(2.0, np.float32) * s, "2.0 * s"),
    "JAX's array": (lambda s, t: jnp.array(0.1) * s, "0.1 * s"),
    "s + t": (lambda s, t: s + t, "s + t"),
    "s + 1.0": (lambda s, t: s + 1.0, "s + 1.0"),
    "1 + s": (lambda s, t: 1 + s, "1.0 + s"),
    "s - t": (lambda s, t: s - t, "s - t"),
    "1 - s": (lambda s, t: 1 - s, "1.0 - s"),
    "-s": (lambda s, t: -s, "-s"),
    "twice negated": (lambda s, t: -(0 - -s), "-(0.0 - -s)"),
    "s / 2": (lambda s, t: s / 2, "s / 2.0"),
    "1 / t": (lambda s, t: 1 / t, "1.0 / t"),
    "s * t": (lambda s, t: s * t, "s * t"),
    "(s + t) * 2": (lambda s, t: (s + t) * 2, "(s + t) * 2.0"),
    "s - t - 1": (lambda s, t: s - t - 1, "s - t - 1.0"),
    "s - (t - 1)": (lambda s, t: s - (t - 1), "s - (t - 1.0)"),
    "s + (t + 1)": (lambda s, t: s + (t + 1), "s + (t + 1.0)"),
    "s / (t * 2)": (lambda s, t: s / (t * 2), "s / (t * 2.0)"),
    "s + t * 2": (lambda s, t: s + t * 2, "s + t * 2.0"),
    "-(s + t)": (lambda s, t: -(s + t), "-(s + t)"),
    "-(s * t)": (lambda s, t: -(s * t), "-(s * t)"),
    "-s * t": (lambda s, t: -s * t, "-s * t"),
    "s * -t": (lambda s, t: s * -t, "s * -t"),
    "s - -2 * t": (lambda s, t: s - -2 * t, "s - -2.0 * t"),
}


@pytest.mark.parametrize("what", ARITHMETIC)
def test_arithmetic_is_that_of_the_values_and_prints_as_it_is_written(what):
    operation, code = ARITHMETIC[what]
    s, t = S.linear(1.0, 2.0, 4), S.constant(3.0)
    made = operation(s, t)
    exact = operation(np.linspace(1.0, 2.0, 5), np.full(5, 3.0))
    np.testing.assert_allclose(made.values(5), exact, rtol=1e-6)
    assert made.values(5).dtype == jnp.float32
    line = eqx.tree_pformat(made, width=10_000)
    assert line.replace(repr(s), "s").replace(repr(t), "t") == code
    again = eval(repr(made), {"sl": sl})
    assert repr(again) == repr(made)
    if "array" not in what:
        assert again == made
    bound = sl.Optimizer(sl.sgd(made), jnp.ones(())).transform
    assert repr(bound) == repr(sl.sgd(made))


def test_arithmetic_takes_functions():
    made = S.constant(2.0) * (lambda n: n + 1)
    np.testing.assert_array_equal(made.values(3), [2, 4, 6])


def test_arithmetic_of_another_precision_is_in_the_canonical_one(x64):
    made = jnp.array(2, jnp.int32) * (S.constant(0.1) + (lambda n: jnp.float32(0.5)))
    assert made.values(1).dtype == jnp.float64
    np.testing.assert_allclose(made(0), 1.2, rtol=1e-15)


@pytest.mark.slow
def test_factors_are_traced():
    traces = []

    @jax.jit
    def first(schedule):
        traces.append(schedule)
        return schedule(1)

    s = S.linear(0.0, 1.0, 2)
    assert [float(first(factor * s)) for factor in (2.0, 3, jnp.array(4.0))] == [1.0, 1.5, 2.0]
    # A Python float is weakly typed under jit where an array is not.
    assert len(traces) <= 2
    many = jax.vmap(lambda factor: (factor * s)(1))(jnp.arange(3.0))
    np.testing.assert_array_equal(many, [0, 0.5, 1])
    assert jax.grad(lambda factor: (factor * s)(1))(3.0) == 0.5


# --- as modules -----------------------------------------------------------------------------


@every
def test_printed_as_the_code_that_makes_it(name):
    schedule = ALL[name]
    again = eval(repr(schedule), {"sl": sl})
    assert again == schedule
    assert repr(again) == repr(schedule)
    assert jax.tree.structure(again) == jax.tree.structure(schedule)
    assert jax.tree.leaves(again) == jax.tree.leaves(schedule)


@every
def test_bound_it_prints_the_same(name):
    schedule = ALL[name]
    bound = sl.Optimizer(sl.sgd(schedule), jnp.ones(())).transform
    assert repr(bound) == repr(sl.sgd(schedule))


@pytest.mark.slow
def test_changed_numbers_do_not_trace_again():
    traces = []

    class Count(sl.AbstractTransform):
        """Passes on; notes each time it is traced."""

        def init(self, params):
            return None

        def update(self, updates, state, params=None, context=None):
            traces.append(context)
            return updates, state

    schedule = S.join([S.linear(0.0, 0.1, 4), S.warmup_cosine_decay(0.1, 0.2, 2, 9)], [4])
    lines = S.linear(0.9, 0.99, 10)
    x = jnp.ones(())
    opt = sl.Optimizer(Count() | sl.adam(schedule, b2=lines), x)
    _, opt = opt.step(x, x)
    opt = opt.with_hyperparams({"b2.end_value": 0.999, "b2.transition_steps": 20})
    _, opt = opt.step(x, x)
    opt = opt.with_hyperparams({"scale_by_adam.b2": S.linear(0.5, 0.6, 3)})
    _, opt = opt.step(x, x)
    assert len(traces) == 1
    np.testing.assert_allclose(opt.hyperparams["b2"], 0.6, rtol=1e-6)


@pytest.mark.slow
@each
def test_all_numbers_are_leaves(name):
    # Of all of them one program, over a batch of schedules too, and differentiable.
    schedule = bind_numbers(ALL[name])
    traces = []

    @jax.jit
    def values(schedule, steps):
        traces.append(schedule)
        return jax.vmap(lambda step: schedule(step))(steps)

    steps = jnp.arange(60)
    first = values(schedule, steps)
    changed = jax.tree.map(lambda x: x * 2 if x.dtype == jnp.int32 else x / 2, schedule)
    assert np.any(first != values(changed, steps))
    assert len(traces) == 1
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), schedule, changed)

    @jax.jit
    @jax.vmap
    def with_slopes(schedule):
        numbers, rest = eqx.partition(schedule, eqx.is_inexact_array)

        def total(numbers):
            made = jax.vmap(eqx.combine(numbers, rest))(steps)
            return jnp.sum(made), made

        return jax.grad(total, has_aux=True)(numbers)

    slopes, batched = with_slopes(both)
    np.testing.assert_allclose(batched[0], first, rtol=2e-6, atol=1e-7)
    assert all(np.isfinite(slope[0]) for slope in jax.tree.leaves(slopes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "path", "value", "after"),
    [
        (2 * S.constant(0.5), "learning_rate.left", 4.0, 4 * S.constant(0.5)),
        (2 * S.constant(0.5), "value", 1.0, 2 * S.constant(1.0)),
        (-S.constant(0.5), "learning_rate.schedule.value", 1.0, -S.constant(1.0)),
        (
            S.linear(0.0, 1.0, 4).then(S.linear(1.0, 0.0, 4), at=4),
            "schedules.1.transition_steps",
            9,
            S.linear(0.0, 1.0, 4).then(S.linear(1.0, 0.0, 9), at=4),
        ),
        (S.sgdr(CYCLES), "**.end_value", 0.2, S.sgdr([c | {"end_value": 0.2} for c in CYCLES])),
        (S.constant(0.5) + S.constant(1.0), "right", S.constant(2.0), S.constant(0.5) + 2.0),
    ],
)
def test_numbers_inside_schedules_are_reached_by_their_path(schedule, path, value, after):
    opt = sl.Optimizer(sl.sgd(schedule), jnp.ones(()))
    changed = opt.with_hyperparams({path: value})
    assert jax.tree.structure(changed) == jax.tree.structure(opt)
    used = changed.transform[sl.ScaleByLearningRate].learning_rate.values(60)
    np.testing.assert_allclose(used, after.values(60), rtol=1e-6, atol=1e-7)


def test_jumps_at_other_steps_do_not_trace_again():
    opt = sl.Optimizer(sl.sgd(S.piecewise_constant(1.0, {1: 0.5, 4: 0.5})), jnp.ones(()))
    other = opt.with_hyperparams(learning_rate=S.piecewise_constant(1.0, {2: 0.1, 3: 0.1}))
    assert jax.tree.structure(opt) == jax.tree.structure(other)
    assert [x.dtype for x in opt.arrays] == [x.dtype for x in other.arrays]


def test_changed_numbers_are_used():
    x = jnp.ones(())
    opt = sl.Optimizer(sl.sgd(S.cosine_decay(0.1, 10)), x)
    opt = opt.with_hyperparams({"learning_rate.init_value": 0.4})
    for n in range(3):
        exact = S.cosine_decay(0.4, 10)(n)
        np.testing.assert_allclose(opt.hyperparams["learning_rate"], exact, rtol=1e-6)
        _, opt = opt.step(x, x)


@pytest.mark.slow
def test_schedules_are_differentiable_in_their_numbers():
    def after(peak):
        return jnp.sum(S.warmup_cosine_decay(0.0, peak, 2, 6).values(6))

    slope = jax.grad(after)(jnp.float32(0.3))
    np.testing.assert_allclose(slope, float(after(jnp.float32(1.0))), rtol=1e-5)
