"""Schedules: their values, and their arithmetic."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import lenient

S = sl.schedules

CYCLES = [
    {"init_value": 0.0, "peak_value": 0.9, "warmup_steps": 5, "decay_steps": 20},
    {"init_value": 0.1, "peak_value": 0.5, "warmup_steps": 0, "decay_steps": 30, "end_value": 0.1},
    {"init_value": 0.1, "peak_value": 0.2, "warmup_steps": 3, "decay_steps": 9, "exponent": 2.0},
]
RISE, WAVE = S.linear(0.1, 1.5, 40), S.cosine_decay(0.3, 50)
JUMPS = {40: 0.5, 12: 0.1, 60: 4.0}


def LINE(n):
    return np.interp(n, [0, 40], [0.1, 1.5])


def COSINE(n):
    return 0.15 * (1 + np.cos(np.pi * np.minimum(n, 50) / 50))


def pair(name, *args, **options):
    """Our schedule and the one of optax, of the same numbers."""
    theirs = getattr(optax, name if name == "exponential_decay" else f"{name}_schedule")
    return getattr(S, name)(*args, **options), theirs(*args, **options)


PARTS = (pair("linear", 0.0, 1.0, 10), pair("constant", 1.0), pair("cosine_decay", 1.0, 30))
CASES = [
    pair("constant", 0.3),
    pair("linear", 0.1, 1.5, 40),
    pair("linear", 0.7, 0.1, 30, transition_begin=13),
    pair("cosine_decay", 0.3, 50),
    pair("cosine_decay", 0.3, 50, alpha=0.1, exponent=1.7),
    pair("warmup_cosine_decay", 0.01, 0.3, 11, 70, 0.02),
    pair("warmup_cosine_decay", 0.0, 0.3, 7, 50, 0.02, exponent=0.5),
    (
        S.join([ours for ours, _ in PARTS], [10, 25]),
        optax.join_schedules([theirs for _, theirs in PARTS], [10, 25]),
    ),
    pair("polynomial", 0.9, 0.1, 2.5, 40, transition_begin=7),
    pair("exponential_decay", 0.9, 20, 0.3, transition_begin=7),
    pair("exponential_decay", 0.9, 8, 0.7, 3, staircase=True, end_value=0.2),
    pair("exponential_decay", 0.1, 9, 1.4, end_value=0.8),
    pair("piecewise_constant", 0.3, JUMPS),
    pair("piecewise_constant", 0.3),
    pair("piecewise_interpolate", "linear", 0.3, JUMPS),
    pair("piecewise_interpolate", "cosine", 0.3, {0: 2.0, 12: 0.1, 60: 4.0}),
    pair("warmup_constant", 0.01, 0.3, 13),
    pair("warmup_exponential_decay", 0.01, 0.3, 13, 20, 0.4, transition_begin=5, end_value=0.05),
    pair("warmup_exponential_decay", 0.01, 0.3, 0, 20, 0.4, staircase=True),
    pair("linear_onecycle", 80, 0.7),
    pair("linear_onecycle", 75, 0.7, 0.1, 0.9, 10.0, 100.0),
    pair("cosine_onecycle", 75, 0.7, 0.4, 10.0, 100.0),
    pair("sgdr", CYCLES),
]
PAIRS = {repr(ours): (ours, theirs) for ours, theirs in CASES}

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
    "2 * s": (2 * RISE, lambda n: 2 * LINE(n)),
    "s + t": (RISE + WAVE, lambda n: LINE(n) + COSINE(n)),
    "s * t": (RISE * WAVE, lambda n: LINE(n) * COSINE(n)),
    "quotient": ((RISE - 1) / (2 - -WAVE), lambda n: (LINE(n) - 1) / (2 + COSINE(n))),
    "1 / s": (1 / RISE, lambda n: 1 / LINE(n)),
    "then": (
        (-RISE).then(0.25, at=30).then(2 * RISE, at=50),
        lambda n: np.select([n < 30, n < 50], [-LINE(n), 0.25 + 0 * n], 2 * LINE(n - 50)),
    ),
}
"""Schedules that optax has not, and what they should be in double precision."""

ALL = {name: schedule for name, (schedule, _) in (PAIRS | FORMULAE).items()}


@pytest.fixture(params=["single", "double"])
def dtype(request):
    """The dtype of floats: a test in both precisions."""
    with jax.enable_x64(request.param == "double"):
        yield jnp.result_type(float)


def values_of(schedules, n):
    """The first values of each schedule, by one program for all of them."""
    at = jax.jit(lambda steps: {name: jax.vmap(s)(steps) for name, s in schedules.items()})
    return at(jnp.arange(n))


def assert_values(schedules, expected, dtype):
    values = values_of(schedules, 100)
    rtol, atol = (1e-9, 1e-15) if dtype == jnp.float64 else (1e-6, 1e-6)
    for name, exact in expected.items():
        assert values[name].dtype == dtype, name
        assert not values[name].weak_type, name
        np.testing.assert_allclose(values[name], exact, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.slow
def test_values_are_those_of_optax_for_all_steps_in_one_function(dtype):
    # Given an int32 step optax computes in float32 always, so it is given the widest float. Not in
    # one program: there the base of its polynomial may fall below 0.
    steps = jnp.arange(100, dtype=dtype)
    with lenient():
        theirs = {name: jax.vmap(theirs)(steps) for name, (_, theirs) in PAIRS.items()}
    expected = {name: np.broadcast_to(values, (100,)) for name, values in theirs.items()}
    assert_values({name: ours for name, (ours, _) in PAIRS.items()}, expected, dtype)

    @jax.jit
    def values(*numbers):
        return [jax.vmap(made)(jnp.array([*exact])) for made, exact in ends(*numbers)]

    for numbers in np.random.default_rng(0).uniform(1e-4, 3.0, (8, 3)).astype(dtype):
        for found, (made, exact) in zip(values(*numbers), ends(*numbers), strict=True):
            np.testing.assert_array_equal(found, [*exact.values()], err_msg=repr(made))

    at = jax.jit(lambda step: {name: schedule(step) for name, schedule in ALL.items()})
    compiled = [at(jnp.int32(n)) for n in range(0, 90, 9)]
    together = values_of(ALL, 90)
    close = {"rtol": 1e-6, "atol": 1e-7}
    for name, schedule in ALL.items():
        values = [one[name] for one in compiled]
        np.testing.assert_allclose(values, together[name][::9], **close, err_msg=name)
        # Eagerly, of a Python int, too.
        np.testing.assert_allclose(schedule(27), values[3], **close, err_msg=name)


def test_values_are_those_of_the_formula(dtype):
    expected = {name: formula(np.arange(100.0)) for name, (_, formula) in FORMULAE.items()}
    assert_values({name: ours for name, (ours, _) in FORMULAE.items()}, expected, dtype)


LATE = 10**9


def ends(init, peak, end):
    """Schedules, each with its values at some steps."""
    bent = S.polynomial(init, end, peak, 7, transition_begin=3)
    stable = S.warmup_stable_decay(init, peak, 5, 6, 7, end, decay_type="sqrt")
    factors = {"div_factor": 4.0, "final_div_factor": 8.0}
    line, wave = S.linear_onecycle(20, peak, **factors), S.cosine_onecycle(20, peak, **factors)
    return [
        (S.linear(init, end, 7, 3), {0: init, 3: init, 10: end, 11: end, LATE: end}),
        (S.cosine_decay(init, 9), {0: init, 9: 0, 10: 0, LATE: 0}),
        (S.warmup_cosine_decay(init, peak, 5, 17, end), {0: init, 5: peak, 17: end, LATE: end}),
        (bent, {0: init, 3: init, 10: end, LATE: end}),
        (stable, {0: init, 5: peak, 8: peak, 11: peak, 18: end, LATE: end}),
        (S.inverse_sqrt(init, peak, 5), {0: init, 5: peak}),
        (S.warmup_exponential_decay(init, peak, 5, 6, 0.5, 2), {0: init, 5: peak, 7: peak}),
        (line, {0: peak / 4, 6: peak, 17: peak / 4, 20: peak / 32, LATE: peak / 32}),
        (wave, {0: peak / 4, 6: peak, 20: peak / 32, LATE: peak / 32}),
    ]


BEGIN = 2**24  # 2²⁴ + 1 is no float32: the beginning of a late line must not be rounded away
EXACT = [
    # Without warm-up the peak is all there is.
    (S.warmup_constant(0.1, 0.9, 0), [0.9] * 5),
    (S.warmup_exponential_decay(0.1, 0.9, 0, 10, 1.0), [0.9] * 5),
    # A jump at step 0 counts from there.
    (S.piecewise_constant(1.0, {0: 0.5}), [0.5] * 3),
    (S.piecewise_interpolate("linear", 1.0, {0: 0.5}), [0.5] * 3),
    (S.piecewise_interpolate("cosine", 1.0, {0: 0.5}), [0.5] * 3),
    (S.piecewise_interpolate("linear", 0.7), [0.7] * 3),
    (S.piecewise_interpolate("cosine", 0.7), [0.7] * 3),
    (
        S.join([S.constant(1.0), S.linear(5.0, 6.0, 2), S.constant(9.0)], [2, 5]),
        [1, 1, 5, 5.5, 6, 9, 9],
    ),
    (S.join([lambda n: 10 * n, lambda n: 20 * n], [3]), [0, 10, 20, 0, 20, 40]),
    (S.constant(0.5).then(0.25, at=1).then(lambda n: 10 * n, at=3), [0.5, 0.25, 0.25, 0, 10]),
    (S.constant(2.0) * (lambda n: n + 1), [2, 4, 6]),
    *(
        (S.cosine_decay(0.3, 9, alpha=a), {0: 0.3, 9: np.float32(0.3) * np.float32(a)})
        for a in (0.1, 0.2, 0.25, 0.3, 0.7, 1.0)
    ),
    # In a dict from steps to factors the corners at step 10 would be one.
    (S.linear_onecycle(10, 1.0, pct_final=1.0, div_factor=4.0, final_div_factor=2.0), {10: 1 / 8}),
    (S.linear_onecycle(10, 1.0, pct_start=0.0, pct_final=0.0), {0: 1 / 25}),
    (S.cosine_onecycle(10, 1.0, pct_start=1.0, final_div_factor=2.0), {10: 1 / 50}),
    (S.cosine_onecycle(10, 1.0, pct_start=0.0), {0: 1.0}),
    # Restarts are at the ends of the cycles.
    (S.sgdr(CYCLES), {0: 0.0, 5: 0.9, 20: 0.5, 50: 0.1, 53: 0.2, 59: 0.0, 69: 0.0}),
    # The inverse root halves after three timescales.
    (S.inverse_sqrt(0.0, 1.0, 10), {40: 0.5}),
    (S.inverse_sqrt(0.0, 1.0, 10, timescale=7), {31: 0.5}),
    (S.inverse_sqrt(0.0, 1.0, 0), {3: 0.5}),
    (S.linear(0.0, 1.0, 2, BEGIN), {BEGIN: 0, BEGIN + 1: 0.5, BEGIN + 2: 1, BEGIN + 3: 1}),
    (S.piecewise_constant(1.0, {BEGIN + 1: 0.5}), {BEGIN: 1, BEGIN + 1: 0.5, BEGIN + 2: 0.5}),
    (
        S.constant(0.0).then(S.linear(0.0, 1.0, 2), at=BEGIN + 1),
        {BEGIN: 0, BEGIN + 1: 0, BEGIN + 2: 0.5, BEGIN + 3: 1},
    ),
    (S.exponential_decay(1.0, BEGIN + 1, 0.5, staircase=True), {BEGIN: 1.0, BEGIN + 1: 0.5}),
    # Rounded to floats, n / 49 falls below a whole number at multiples of 49.
    (S.exponential_decay(1.0, 49, 0.5, staircase=True), np.repeat([1, 0.5, 0.25, 0.125], 49)),
]
"""Schedules, and their first values or those at some steps."""


@pytest.mark.slow
def test_values_at_corners_are_exact():
    cases = [
        (made, exact if isinstance(exact, dict) else dict(enumerate(exact)))
        for made, exact in EXACT
    ]

    @jax.jit
    def values(steps):
        return [jax.vmap(made)(at) for (made, _), at in zip(cases, steps, strict=True)]

    found = values([jnp.array([*exact]) for _, exact in cases])
    for value, (made, exact) in zip(found, cases, strict=True):
        np.testing.assert_array_equal(value, np.float32([*exact.values()]), err_msg=repr(made))
    # Without warm-up a wave begins at its peak and falls.
    wave = S.warmup_cosine_decay(0.0, 0.3, 0, 10).values(11)
    assert wave[0] == np.float32(0.3)
    assert np.all(np.diff(wave) < 0)


def test_the_corners_of_a_cycle_are_not_rounded_away(dtype):
    percents = np.arange(85)

    @jax.jit
    @jax.vmap
    def peaks(pct):
        return [jnp.argmax(S.linear_onecycle(n, 1.0, pct).values(200)) for n in (100, 150)]

    # 0.29 * 100 is 28.999999999999996, and 0.07 * 100 is 7.000000000000001.
    found = peaks((percents / 100).astype(dtype))
    np.testing.assert_array_equal(found, [percents, percents * 150 // 100])


@pytest.mark.slow
def test_equal_schedules_are_equal_and_their_arithmetic_that_of_values():
    assert S.sgdr([S.warmup_cosine_decay(**kwargs) for kwargs in CYCLES]) == S.sgdr(CYCLES)
    s = S.linear(0.0, 1.0, 4)
    assert s.then(s, at=2).then(s, at=5) == S.join([s, s, s], [2, 5])

    s, t = S.linear(1.0, 2.0, 4), S.constant(3.0)

    def of(s, t, code, number):
        return number["a"] * s if number else eval(code, {"s": s, "t": t})

    made = {name: of(s, t, *case) for name, case in ARITHMETIC.items()}
    values = values_of(made, 5)
    for name, (code, number) in ARITHMETIC.items():
        exact = of(np.linspace(1.0, 2.0, 5), np.full(5, 3.0), code, number)
        np.testing.assert_allclose(values[name], exact, rtol=1e-6, err_msg=name)
        assert values[name].dtype == jnp.float32, name
        line = eqx.tree_pformat(made[name], width=10_000)
        assert line.replace(repr(s), "s").replace(repr(t), "t") == code
        again = eval(repr(made[name]), {"sl": sl})
        assert repr(again) == repr(made[name])
        if "array" not in name:
            assert again == made[name], name
    tx = sl.chain(*map(sl.ScaleBySchedule, made.values()))
    assert repr(sl.Optimizer(tx, jnp.ones(())).transform) == repr(tx)


# As they are printed.
EXPRESSIONS = """
    2.0 * s; s * 2.0; s + t; s + 1.0; 1.0 + s; s - t; 1.0 - s; -s; -(0.0 - -s); s / 2.0; 1.0 / t
    s * t; (s + t) * 2.0; s - t - 1.0; s - (t - 1.0); s + (t + 1.0); s / (t * 2.0); s + t * 2.0
    -(s + t); -(s * t); -s * t; s * -t; s - -2.0 * t
"""
NUMBERS = {"int": 2, "NumPy's number": np.float32(2.0), "NumPy's array": np.array(2.0, np.float32)}
ARITHMETIC = {code: (code, {}) for code in EXPRESSIONS.strip().replace("\n    ", "; ").split("; ")}
ARITHMETIC |= {name: ("2.0 * s", {"a": number}) for name, number in NUMBERS.items()}
ARITHMETIC["JAX's array"] = ("0.1 * s", {"a": jnp.array(0.1)})


def test_arithmetic_of_another_precision_is_in_the_canonical_one(x64):
    made = jnp.array(2, jnp.int32) * (S.constant(0.1) + (lambda n: jnp.float32(0.5)))
    assert made.values(1).dtype == jnp.float64
    np.testing.assert_allclose(made(0), 1.2, rtol=1e-15)
