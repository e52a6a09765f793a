"""`sl.minimize`: why it stops, what it returns, and restarts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linesearch import CALLS, counted

import slalom as sl


def bowl(p):
    return jnp.sum((p - 3) ** 2) + 1


@pytest.mark.slow
def test_it_takes_the_steps_of_a_loop_and_reports_every_few():
    found = sl.minimize(bowl, sl.sgd(0.1), jnp.zeros(2), max_steps=5)
    p, opt, losses = jnp.zeros(2), sl.Optimizer(sl.sgd(0.1), jnp.zeros(2)), []
    step = sl.train_step(bowl)
    for _ in range(5):
        p, opt, loss = step(p, opt)
        losses.append(loss)
    np.testing.assert_allclose(found.model, p, rtol=1e-6)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-6)
    assert (int(found.steps), found.reason, bool(found.converged)) == (5, "max_steps", False)
    assert int(found.opt.count) == 5

    seen = []
    reports = {"callback": lambda step, loss: seen.append(step), "every": 3, "progress": False}
    sl.minimize(bowl, sl.sgd(0.1), jnp.zeros(2), max_steps=7, **reports)
    assert sorted(seen) == [0, 3, 6]


REASONS = {
    "gradient": {"gtol": 1e-2},
    "change": {"ftol": 1e-3, "gtol": 0.0},
    "step": {"xtol": 1e-2, "gtol": 0.0},
    "function": {"stop": lambda p, loss: loss < 5},
}


@pytest.mark.parametrize("reason", REASONS)
def test_minimize_says_why_it_stops(reason):
    found = sl.minimize(bowl, sl.sgd(0.3), jnp.zeros(2), max_steps=100, **REASONS[reason])
    assert found.reason == reason
    assert bool(found.converged) == (reason != "function")
    steps = int(found.steps)
    assert 0 < steps < 100
    assert jnp.all(jnp.isfinite(found.losses[:steps]))
    assert jnp.all(jnp.isnan(found.losses[steps:]))
    np.testing.assert_allclose(found.loss, bowl(found.model), rtol=1e-6)
    np.testing.assert_allclose(found.grad_norm, jnp.linalg.norm(jax.grad(bowl)(found.model)))


@pytest.mark.slow
def test_it_prints_values_and_lists_the_reasons_of_several_runs():
    def run(start):
        return sl.minimize(bowl, sl.lbfgs(), start, max_steps=9)

    one = run(jnp.zeros(2))
    reason, loss, model = repr(one).splitlines()
    assert reason.startswith("converged (gradient)")
    assert "loss 1, gradient" in loss
    assert str(one.model) in model
    np.testing.assert_allclose(one.model, 3, rtol=1e-6)
    several = jax.vmap(run)(jnp.array([[0.0, 1.0], [3.0, 3.0]]))
    assert several.reason == ["gradient", "gradient"]
    assert repr(several).startswith("2 of 2 runs converged")


def test_a_dict_of_losses_is_summed_for_line_searches_too():
    found = sl.minimize(lambda p: {"a": bowl(p), "b": 1.0}, sl.lbfgs(), jnp.ones(2), max_steps=9)
    np.testing.assert_allclose(found.loss, 2, rtol=1e-6)


def test_infinite_losses_and_short_steps_do_not_pass_for_convergence():
    blown = sl.minimize(lambda p: jnp.sum(p**4), sl.sgd(1.0), 100.0 * jnp.ones(1), max_steps=50)
    assert (blown.reason, bool(blown.converged)) == ("not_finite", False)
    flat = sl.minimize(lambda p: jnp.inf + 0 * jnp.sum(p), sl.sgd(1.0), jnp.ones(1), max_steps=50)
    assert flat.reason == "not_finite"
    idle = sl.minimize(bowl, sl.SetToZero(), jnp.zeros(1), max_steps=100)
    assert (idle.reason, bool(idle.converged), int(idle.steps)) == ("stuck", False, 40)

    found = sl.minimize(bowl, sl.sgd(1e-6), jnp.zeros(2), max_steps=50)
    assert found.reason == "max_steps"


SETS = {
    "a bound": (sl.lbfgs(bounds=(None, 2.0)), [2, 2]),
    "a ball": (sl.sgd(0.05).project(sl.projections.l2_ball(1.0)), [0.5**0.5, 0.5**0.5]),
    "a function": (sl.sgd(0.3).project(lambda p: jnp.minimum(p, 2)), [2, 2]),
    "a group": (sl.sgd(0.3).project(sl.projections.box(0.0, 2.0)).partition({}), [2, 2]),
}


@pytest.mark.parametrize("name", SETS)
def test_the_gradient_along_a_set_decides(name):
    tx, expected = SETS[name]
    opt = sl.Optimizer(tx, jnp.zeros(2))
    # Also from a point outside, and from one where the gradient is 0.
    for start in ([0.1, 0.7], [4.0, 5.0], [3.0, 3.0]):
        found = sl.minimize(bowl, opt, jnp.array(start), max_steps=100)
        assert found.converged
        np.testing.assert_allclose(found.model, expected, atol=1e-2)
        assert found.grad_norm < 0.1


@pytest.mark.slow
def test_evaluations_are_counted_and_none_is_made_twice():
    CALLS.clear()
    found = sl.minimize(counted, sl.lbfgs(), jnp.array([-1.2, 1.0]), max_steps=100)
    jax.effects_barrier()
    assert found.converged
    assert int(found.evaluations) == len(CALLS)


@pytest.mark.slow
def test_residuals_are_passed_and_restarts_stop_at_their_own_steps():
    loss_fn = sl.LeastSquares(lambda p, x, y: jnp.exp(p["a"] * x) - y)
    x = jnp.linspace(0, 1, 8)
    start = {"a": jnp.array(0.0)}
    tx = sl.levenberg_marquardt()
    first = sl.minimize(loss_fn, tx, start, x, jnp.exp(2 * x), max_steps=2)
    rest = sl.minimize(loss_fn, first.opt, first.model, x, jnp.exp(2 * x), max_steps=30)
    assert int(rest.opt.count) == int(first.steps + rest.steps)
    np.testing.assert_allclose(rest.model["a"], 2, rtol=1e-4)

    def run(start):
        return sl.minimize(bowl, sl.sgd(0.1), start, max_steps=100, gtol=1e-2)

    starts = jnp.array([[0.0], [2.9], [3.0]])
    together = jax.vmap(run)(starts)
    alone = [run(start) for start in starts]
    assert together.steps.tolist() == [int(a.steps) for a in alone]
    assert len(set(together.steps.tolist())) == 3
    for i, one in enumerate(alone):
        np.testing.assert_allclose(together.model[i], one.model, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [None, "columns"])
def test_it_says_when_to_scale_the_columns(scaling):
    units = jnp.array([1e-4, 1.0])
    loss_fn = sl.LeastSquares(lambda p: jnp.cosh(p * units) - 2, per_example=False)
    tx = sl.levenberg_marquardt(scaling=scaling)
    found = sl.minimize(loss_fn, tx, 3 / units, max_steps=1)
    assert not found.converged
    assert ('try `scaling="columns"`' in repr(found)) == (scaling is None)


def test_steps_that_change_nothing_do_not_meet_the_tolerance():
    def bowl(p):
        return jnp.sum((p - 3) ** 2) + 1

    found = sl.minimize(bowl, sl.sgd(0.3).every_k(2), jnp.zeros(2), max_steps=200, gtol=0.0)
    assert found.reason == "change"
    assert found.loss < 1.01


def test_an_exception_of_a_callback_ends_the_loop_as_it_was_raised():
    class OutOfTime(Exception):
        pass

    traced = []

    def slope(p):
        traced.append(p)
        return jnp.sum(p)

    def minimize(callback):
        reports = {"callback": callback, "every": 1, "progress": False}
        return sl.minimize(slope, sl.sgd(0.1), jnp.zeros(2), max_steps=10**7, gtol=0.0, **reports)

    def give_up(step, loss):
        raise OutOfTime(step)

    def interrupt(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(OutOfTime, match=r"^0$"):
        minimize(give_up)
    number = len(traced)
    with pytest.raises(KeyboardInterrupt):
        minimize(interrupt)
    assert len(traced) == number, "another callback compiles nothing"
