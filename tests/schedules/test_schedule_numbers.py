"""The numbers of schedules: printed, traced, differentiated, and changed in an optimizer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_schedules import ALL, CYCLES, values_of

import slalom as sl
from helpers import unoptimized

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


# --- traced ---------------------------------------------------------------------------------


def bound(schedule):
    """A schedule whose numbers are arrays, as in an optimizer."""
    return sl.Optimizer(sl.ScaleBySchedule(schedule), jnp.ones(())).transform.step_size


@pytest.mark.slow
@unoptimized()
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
            made = {
                name: jax.vmap(schedule)(steps)
                for name, schedule in eqx.combine(numbers, rest).items()
            }
            return sum(map(jnp.sum, made.values())), made

        return jax.grad(total, has_aux=True)(numbers)

    slopes, batched = with_slopes(both)
    for name in ALL:
        assert np.any(first[name] != second[name]), name
        np.testing.assert_allclose(
            batched[name][0], first[name], rtol=2e-6, atol=1e-7, err_msg=name
        )
        assert all(np.isfinite(slope[0]) for slope in jax.tree.leaves(slopes[name])), name


# --- changed in an optimizer ----------------------------------------------------------------


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


LINES = S.linear(0.0, 1.0, 4).then(S.linear(1.0, 0.0, 4), at=4)
CHANGES = [
    (2 * S.constant(0.5), "learning_rate.left", 4.0, 4 * S.constant(0.5)),
    (2 * S.constant(0.5), "value", 1.0, 2 * S.constant(1.0)),
    (-S.constant(0.5), "learning_rate.schedule.value", 1.0, -S.constant(1.0)),
    (
        LINES,
        "schedules.1.transition_steps",
        9,
        S.linear(0.0, 1.0, 4).then(S.linear(1.0, 0.0, 9), at=4),
    ),
    (S.sgdr(CYCLES), "**.end_value", 0.2, S.sgdr([c | {"end_value": 0.2} for c in CYCLES])),
    (S.constant(0.5) + S.constant(1.0), "right", S.constant(2.0), S.constant(0.5) + 2.0),
]


@pytest.mark.slow
def test_numbers_inside_schedules_are_reached_by_their_path():
    used, after = {}, {}
    for schedule, path, value, expected in CHANGES:
        opt = sl.Optimizer(sl.sgd(schedule), jnp.ones(()))
        changed = opt.with_hyperparams({path: value})
        assert jax.tree.structure(changed) == jax.tree.structure(opt), path
        used[path] = changed.transform[sl.ScaleByLearningRate].learning_rate
        after[path] = expected
    used, after = values_of(used, 60), values_of(after, 60)
    for path in used:
        np.testing.assert_allclose(used[path], after[path], rtol=1e-6, atol=1e-7, err_msg=path)


def test_jumps_at_other_steps_do_not_trace_again():
    opt = sl.Optimizer(sl.sgd(S.piecewise_constant(1.0, {1: 0.5, 4: 0.5})), jnp.ones(()))
    other = opt.with_hyperparams(learning_rate=S.piecewise_constant(1.0, {2: 0.1, 3: 0.1}))
    assert jax.tree.structure(opt) == jax.tree.structure(other)
    assert [x.dtype for x in opt.arrays] == [x.dtype for x in other.arrays]


def test_changed_numbers_are_used():
    x = jnp.ones(())
    opt = sl.Optimizer(sl.sgd(S.cosine_decay(0.1, 10)), x)
    opt = opt.with_hyperparams({"learning_rate.init_value": 0.4})
    for exact in S.cosine_decay(0.4, 10).values(3):
        np.testing.assert_allclose(opt.hyperparams["learning_rate"], exact, rtol=1e-6)
        _, opt = opt.step(x, x)
