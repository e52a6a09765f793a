"""Schedules: their values, their clock, and what is refused."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import assert_same_bits, gradients, lenient, nested_dict
from slalom._fields import hyperparameter_fields

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

pairs = pytest.mark.parametrize("name", PAIRS)
every = pytest.mark.parametrize("name", ALL)


def values_of_optax(schedule, n):
    # Given an int32 step it computes in float32 always, so it is given the widest float.
    with lenient():
        values = jax.vmap(schedule)(jnp.arange(n, dtype=jnp.result_type(float)))
    return np.broadcast_to(values, (n,))


@pairs
def test_values_are_those_of_optax_in_double_precision(name, x64):
    ours, theirs = PAIRS[name]
    values = ours.values(100)
    assert values.dtype == jnp.float64
    np.testing.assert_allclose(values, values_of_optax(theirs, 100), rtol=1e-9, atol=1e-15)


@pairs
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


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.25, 0.3, 0.7, 1.0])
def test_cosine_decay_to_a_fraction_is_exact_at_both_ends(alpha):
    wave = S.cosine_decay(0.3, 9, alpha=alpha)
    assert wave(0) == np.float32(0.3)
    assert wave(9) == np.float32(0.3) * np.float32(alpha)


def test_no_warm_up_begins_at_the_peak():
    schedule = S.warmup_cosine_decay(0.0, 0.3, 0, 10)
    assert schedule(0) == np.float32(0.3)
    assert np.all(np.diff(schedule.values(11)) < 0)


def test_join_switches_at_its_boundaries():
    schedule = S.join([S.constant(1.0), S.linear(5.0, 6.0, 2), S.constant(9.0)], [2, 5])
    np.testing.assert_array_equal(schedule.values(7), [1, 1, 5, 5.5, 6, 9, 9])


def test_join_takes_functions():
    schedule = S.join([lambda n: 10 * n, lambda n: 20 * n], [3])
    np.testing.assert_array_equal(schedule.values(6), [0, 10, 20, 0, 20, 40])


def test_steps_beyond_float32_are_not_rounded():
    # 2²⁴ + 1 is no float32: the beginning of a late line must not be missed by a rounding.
    begin = 2**24
    line = S.linear(0.0, 1.0, 2, transition_begin=begin)
    assert [float(line(begin + n)) for n in range(4)] == [0.0, 0.5, 1.0, 1.0]


@every
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


def test_values_over_a_batch_of_schedules():
    # A schedule's numbers are leaves: one program for several of them.
    peaks = jnp.array([0.1, 0.2, 0.3])
    made = jax.vmap(lambda peak: S.warmup_cosine_decay(0.0, peak, 3, 9).values(9))(peaks)
    for row, peak in zip(made, peaks, strict=True):
        alone = S.warmup_cosine_decay(0.0, float(peak), 3, 9).values(9)
        np.testing.assert_allclose(row, alone, rtol=1e-6)


# --- the clock ------------------------------------------------------------------------------


def rules():
    """Every rule with a hyperparameter, and every such field."""
    for name, cls in sorted(vars(sl).items()):
        is_rule = inspect.isclass(cls) and issubclass(cls, sl.AbstractTransform)
        if not is_rule or inspect.isabstract(cls):
            continue
        for field in hyperparameter_fields(cls):
            yield pytest.param(cls, field.name, id=f"{name}-{field.name}")


def made_with(cls, name, value):
    """The rule with one field given; others that must be given are 0.5."""
    required = {f.name: 0.5 for f in hyperparameter_fields(cls) if f.default is dataclasses.MISSING}
    return cls(**(required | {name: value}))


@pytest.mark.parametrize(("cls", "name"), list(rules()))
def test_update_n_uses_the_schedule_at_n(cls, name):
    # Compared with giving each step's number by hand: the same bits. The values lie within
    # every field's interval, and are computed without rounding.
    schedule = S.linear(0.75, 0.25, 4)
    values = schedule.values(5)
    params = jnp.array([1.0, -2.0, 0.5])
    grads = gradients(params, 5)
    scheduled = sl.Optimizer(made_with(cls, name, schedule), params)
    by_hand = constant = sl.Optimizer(made_with(cls, name, values[0]), params)
    if name == "initial_scale":  # only ever asked at binding
        constant = sl.Optimizer(made_with(cls, name, 0.1), params)
    differs = False
    for n in range(5):
        assert scheduled.hyperparams[name] == values[n]
        by_hand = by_hand.with_hyperparams({name: values[n]})
        updates, scheduled = scheduled.update(params, grads[n])
        same, by_hand = by_hand.update(params, grads[n])
        assert_same_bits(updates, same)
        other, constant = constant.update(params, grads[n])
        differs |= bool(np.any(updates != other))
    # Without this a field that has no effect would pass. Signs are too coarse to tell.
    assert differs or cls is sl.ScaleByLion


@every
def test_values_are_what_an_optimizer_uses(name):
    schedule = ALL[name]
    opt = sl.Optimizer(sl.ScaleBySchedule(schedule), jnp.ones(()))
    ones = jnp.ones(60)
    _, used = jax.lax.scan(lambda opt, g: opt.update(g, g)[::-1], opt, ones)
    # The same program for one step and for many at once may round a cosine differently.
    np.testing.assert_allclose(used, schedule.values(60), rtol=3e-7, atol=1e-7)


def test_a_schedule_changes_no_state():
    params = nested_dict(jax.random.key(0))
    number = sl.Optimizer(sl.adamw(1e-3), params)
    scheduled = sl.Optimizer(sl.adamw(S.cosine_decay(1e-3, 10), b2=S.constant(0.99)), params)
    assert_same_bits(number.state, scheduled.state)


def test_functional_use_must_be_told_the_time():
    tx = sl.sgd(S.linear(1.0, 0.0, 4))
    g = jnp.ones(())
    with pytest.raises(TypeError, match=r"ScaleByLearningRate\.learning_rate.*Context\(step=n\)"):
        tx.update(g, tx.init(g), g)
    updates, _ = tx.update(g, tx.init(g), g, sl.Context(step=1))
    assert float(updates) == -0.75


# --- plain functions ------------------------------------------------------------------------


def test_a_function_is_a_schedule():
    opt = sl.Optimizer(sl.sgd(lambda n: 1 / (n + 1)), jnp.ones(()))
    rates = []
    with lenient():
        for _ in range(3):
            rates.append(float(opt.hyperparams["learning_rate"]))
            _, opt = opt.step(jnp.ones(()), jnp.ones(()))
    np.testing.assert_allclose(rates, [1, 1 / 2, 1 / 3], rtol=1e-7)


def test_a_schedule_of_another_library_is_a_schedule():
    theirs = optax.cosine_decay_schedule(0.3, 10)
    tx = sl.sgd(theirs)
    with lenient():
        opt = sl.Optimizer(tx, jnp.ones(()))
        _, used = jax.lax.scan(lambda opt, g: opt.update(g, g)[::-1], opt, jnp.ones(12))
    np.testing.assert_allclose(-used, S.cosine_decay(0.3, 10).values(12), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), True])
def test_what_a_function_returns_becomes_a_float(value):
    rate = sl.Optimizer(sl.sgd(lambda n: value), jnp.ones(())).hyperparams["learning_rate"]
    assert rate.dtype == jnp.float32
    assert not rate.weak_type
    assert float(rate) == float(value)


def test_a_function_that_branches_in_python_is_told_how_to():
    def drop(step):
        return 0.1 if step < 10 else 0.01

    opt = sl.Optimizer(sl.sgd(drop), jnp.ones(()))
    with pytest.raises(TypeError, match=r"drop.*jnp\.where\(step < n, a, b\)"):
        opt.step(jnp.ones(()), jnp.ones(()))


def test_a_function_that_returns_an_array_is_refused():
    opt = sl.Optimizer(sl.sgd(lambda n: jnp.ones(3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"shape \(3,\).*one number for one step"):
        opt.step(jnp.ones(3), jnp.ones(3))


# --- what is refused ------------------------------------------------------------------------

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
    "a negative boundary": (lambda: S.join([S.constant(1.0)] * 2, [-1]), r"not negative.*\[-1\]"),
    "a boundary too few": (
        lambda: S.join([S.constant(1.0)] * 3, [5]),
        r"3 schedules and 1 boundaries",
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


def test_changed_numbers_are_used():
    x = jnp.ones(())
    opt = sl.Optimizer(sl.sgd(S.cosine_decay(0.1, 10)), x)
    opt = opt.with_hyperparams({"learning_rate.init_value": 0.4})
    for n in range(3):
        exact = S.cosine_decay(0.4, 10)(n)
        np.testing.assert_allclose(opt.hyperparams["learning_rate"], exact, rtol=1e-6)
        _, opt = opt.step(x, x)


def test_schedules_are_differentiable_in_their_numbers():
    def after(peak):
        return jnp.sum(S.warmup_cosine_decay(0.0, peak, 2, 6).values(6))

    slope = jax.grad(after)(jnp.float32(0.3))
    np.testing.assert_allclose(slope, float(after(jnp.float32(1.0))), rtol=1e-5)
