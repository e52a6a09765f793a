"""The numbers of schedules: what is refused, and what is printed, traced and differentiated."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_schedules import ALL, CYCLES, values_of

import slalom as sl
from helpers import kind_of

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


def test_schedules_print_as_the_code_that_makes_them():
    for name, schedule in ALL.items():
        again = eval(repr(schedule), {"sl": sl})
        assert again == schedule, name
        assert repr(again) == repr(schedule)
        assert jax.tree.structure(again) == jax.tree.structure(schedule), name
        assert jax.tree.leaves(again) == jax.tree.leaves(schedule), name
    tx = sl.chain(*map(sl.ScaleBySchedule, ALL.values()))
    assert repr(sl.Optimizer(tx, jnp.ones(())).transform) == repr(tx)


def bound(schedule):
    """A schedule whose numbers are arrays, as in an optimizer."""
    return sl.Optimizer(sl.ScaleBySchedule(schedule), jnp.ones(())).transform.step_size


@pytest.mark.slow
def test_all_numbers_are_leaves():
    # One program for all numbers, over a batch of schedules too, and differentiable.
    traces = []

    @jax.jit
    def values(schedules, steps):
        traces.append(schedules)
        return {name: jax.vmap(lambda n, s=s: s(n))(steps) for name, s in schedules.items()}

    schedules, steps = {name: bound(schedule) for name, schedule in ALL.items()}, jnp.arange(60)
    first = values(schedules, steps)
    changed = jax.tree.map(lambda x: x * 2 if x.dtype == jnp.int32 else x / 2, schedules)
    second = values(changed, steps)
    assert len(traces) == 1
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), schedules, changed)

    @jax.jit
    @jax.vmap
    def with_slopes(schedules):
        numbers, rest = eqx.partition(schedules, eqx.is_inexact_array)

        def total(numbers):
            made = {k: jax.vmap(s)(steps) for k, s in eqx.combine(numbers, rest).items()}
            return sum(map(jnp.sum, made.values())), made

        return jax.grad(total, has_aux=True)(numbers)

    slopes, batched = with_slopes(both)
    for name in ALL:
        assert np.any(first[name] != second[name]), name
        close = {"rtol": 2e-6, "atol": 1e-7, "err_msg": name}
        np.testing.assert_allclose(batched[name][0], first[name], **close)
        assert all(np.isfinite(slope[0]) for slope in jax.tree.leaves(slopes[name])), name


UP, DOWN, FLAT = S.linear(0.0, 1.0, 4), S.linear(1.0, 0.0, 4), S.constant(0.5)
JUMPS = S.piecewise_constant(1.0, {2: 0.1, 3: 0.1})
CHANGES = [
    (2 * FLAT, "learning_rate.left", 4.0, 4 * FLAT),
    (2 * FLAT, "value", 1.0, 2 * S.constant(1.0)),
    (-FLAT, "learning_rate.schedule.value", 1.0, -S.constant(1.0)),
    (UP.then(DOWN, at=4), "schedules.1.transition_steps", 9, UP.then(S.linear(1.0, 0.0, 9), at=4)),
    (S.sgdr(CYCLES), "**.end_value", 0.2, S.sgdr([c | {"end_value": 0.2} for c in CYCLES])),
    (FLAT + S.constant(1.0), "right", S.constant(2.0), FLAT + 2.0),
    (UP, "scale_by_learning_rate.learning_rate", DOWN, DOWN),
    (S.piecewise_constant(1.0, {1: 0.5, 4: 0.5}), "learning_rate", JUMPS, JUMPS),
]


@pytest.mark.slow
def test_schedules_and_numbers_inside_them_are_changed_by_their_path():
    used, after = {}, {}
    for schedule, path, value, expected in CHANGES:
        opt = sl.Optimizer(sl.sgd(schedule), jnp.ones(()))
        changed = opt.with_hyperparams({path: value})
        assert kind_of(changed) == kind_of(opt), path  # so no program is traced again
        used[path] = changed.transform[sl.ScaleByLearningRate].learning_rate
        after[path] = expected
    used, after = values_of(used, 60), values_of(after, 60)
    for path in used:
        np.testing.assert_allclose(used[path], after[path], rtol=1e-6, atol=1e-7, err_msg=path)
