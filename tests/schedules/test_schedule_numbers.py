"""The numbers of schedules: printed, traced, differentiated, and changed in an optimizer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_schedules import ALL, CYCLES, values_of

import slalom as sl
from helpers import kind_of

S = sl.schedules


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
