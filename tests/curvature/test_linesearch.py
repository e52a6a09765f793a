"""Line searches: their paths, and what they step back from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import Counting, after_steps, after_training, assert_close, lenient, trajectory

STEPS = 40


def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


CALLS = []


def counted(x):
    """Its evaluations are in `CALLS`."""
    jax.debug.callback(lambda: CALLS.append(None))
    return rosenbrock(x)


def himmelblau(x):
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def matyas(x):
    return 0.26 * (x[0] ** 2 + x[1] ** 2) - 0.48 * x[0] * x[1]


def beale(x):
    return sum((c - x[0] + x[0] * x[1] ** n) ** 2 for n, c in ((1, 1.5), (2, 2.25), (3, 2.625)))


def zakharov(x):
    s = 0.5 * jnp.sum(jnp.arange(1, 7, dtype=x.dtype) * x)
    return jnp.sum(x**2) + s**2 + s**4


# The function, where it starts, its minimum.
PROBLEMS = {
    "rosenbrock": (rosenbrock, [0.0, 0.0], [1.0, 1.0]),
    "himmelblau": (himmelblau, [1.0, 1.0], [3.0, 2.0]),
    "matyas": (matyas, [6.0, 6.0], [0.0, 0.0]),
    "beale": (beale, [2.0, 0.0], [3.0, 0.5]),
    "zakharov": (zakharov, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0] * 6),
}


def run(function, params, tx, steps=STEPS):
    """The parameters after each step, the last optimizer, and the metrics after each step."""
    opt = sl.Optimizer(tx, params)

    def step(before, opt, _):
        params, _ = before
        value, grad = jax.value_and_grad(function)(params)
        grad = jax.tree.map(jnp.conj, grad)  # as `sl.train_step` does
        params, opt = opt.step(params, grad, value=value, grad=grad, value_fn=function)
        return (params, opt.metrics), opt

    start = params, opt.metrics
    (history, metrics), opt = trajectory(step, start, opt, (jnp.arange(steps),))
    return history, opt, metrics


def run_optax(function, params, tx, steps=STEPS):
    """The same with optax, and how many learning rates it tried in each step."""

    def tried(state):
        return optax.tree.get(state, "num_linesearch_steps")

    def step(before, state, _):
        params, _ = before
        value, grad = jax.value_and_grad(function)(params)
        known = {"value": value, "grad": grad, "value_fn": function}
        updates, state = tx.update(grad, state, params, **known)
        return (optax.apply_updates(params, updates), tried(state)), state

    with lenient():
        state = tx.init(params)
        return trajectory(step, (params, tried(state)), state, (jnp.arange(steps),))[0]


def all_problems(run, tx, steps=STEPS):
    """Every problem with one compiled program: which one is an argument, all have six numbers."""
    functions = [
        lambda x, f=function, s=start: f(x[: len(s)]) for function, start, _ in PROBLEMS.values()
    ]

    @jax.jit
    def solve(which, start):
        return run(lambda x: jax.lax.switch(which, functions, x), start, tx, steps)

    for i, (function, start, minimum) in enumerate(PROBLEMS.values()):
        history, *others = solve(i, jnp.zeros(6).at[: len(start)].set(jnp.array(start)))
        yield function, jnp.array(minimum), history[:, : len(start)], others


def falling(step):
    return 1 / (1 + step.astype(float))


ZOOM = (sl.ScaleByZoomLinesearch, optax.scale_by_zoom_linesearch)
BACKTRACKING = (sl.ScaleByBacktrackingLinesearch, optax.scale_by_backtracking_linesearch)


def after_sgd(rate, searches, *numbers, **options):
    """A search along the steps of SGD, ours and that of optax."""
    ours, theirs = (search(*numbers, **options) for search in searches)
    return sl.sgd(rate) | ours, optax.chain(optax.sgd(rate), theirs)


ZOOM_NUMBERS = (9, 2.0, 1e-9, 3.0, 1e-3, 0.1, None, 1e-4, "one")
BACKTRACKING_NUMBERS = (20, 0.1, 0.5, 4.0, 0.7, 1e-6, 1e-3)
PAIRS = {
    "lbfgs-numbers": (sl.lbfgs(falling, 3, False), optax.lbfgs(falling, 3, False), himmelblau),
    "alone": (sl.lbfgs(0.1, 4, linesearch=None), optax.lbfgs(0.1, 4, linesearch=None), matyas),
    "zoom": (*after_sgd(1.0, ZOOM, 15), beale),
    "zoom-numbers": (*after_sgd(0.1, ZOOM, *ZOOM_NUMBERS), himmelblau),
    "backtracking": (*after_sgd(1.0, BACKTRACKING, 50), rosenbrock),
    "backtracking-numbers": (
        *after_sgd(1.0, BACKTRACKING, *BACKTRACKING_NUMBERS, store_grad=True),
        himmelblau,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_same_path_as_optax(name, x64):
    ours, theirs, function = PAIRS[name]
    start = jnp.array([2.0, -1.0])
    history, _, metrics = run(function, start, ours)
    expected, tried = run_optax(function, start, theirs)
    np.testing.assert_allclose(history, expected, rtol=1e-9, atol=1e-12)
    if tried is not None:
        np.testing.assert_array_equal(metrics["num_linesearch_steps"], tried)


SEARCHES = {
    "zoom": sl.ScaleByZoomLinesearch(30, initial_guess_strategy="one"),
    "backtracking": sl.ScaleByBacktrackingLinesearch(40, store_grad=True),
}
searches = pytest.mark.parametrize("name", SEARCHES)


@pytest.mark.slow
def test_a_search_evaluates_once_for_each_rate_and_traces_the_loss_twice():
    loss_fn = Counting(rosenbrock)
    after_training(sl.train_step(loss_fn), sl.lbfgs(memory_size=2), 3, jnp.zeros(2))
    assert loss_fn.traces == 2

    params = jnp.array([-1.0, 2.0])
    grad = jax.grad(rosenbrock)(params)
    for search in (sl.ScaleByZoomLinesearch(20), sl.ScaleByBacktrackingLinesearch(40)):
        CALLS.clear()
        opt = sl.Optimizer(sl.sgd(1.0) | search, params)
        known = {"value": rosenbrock(params), "grad": grad, "value_fn": counted}
        _, opt = opt.step(params, grad, **known)
        jax.effects_barrier()
        assert len(CALLS) == int(opt.metrics["num_linesearch_steps"]) > 3


@pytest.mark.slow
@searches
def test_reuse_spares_the_evaluation_that_the_search_has_made(name):
    tried, paths = {}, {}
    for reuse in (False, True):
        params = jnp.zeros(2)
        opt = sl.Optimizer(sl.lbfgs(memory_size=1, linesearch=SEARCHES[name]), params)
        step = sl.train_step(counted, reuse_linesearch=reuse, donate=False)
        CALLS.clear()
        tried[reuse], paths[reuse] = [], []
        for _ in range(4):
            params, opt, loss = step(params, opt)
            tried[reuse].append(int(opt.metrics["num_linesearch_steps"]))
            paths[reuse].append((params, loss))
        jax.effects_barrier()
        assert len(CALLS) == sum(tried[reuse]) + (1 if reuse else 4)
    # After a reset there is no gradient to reuse.
    CALLS.clear()
    step(params, opt.reset(params))
    jax.effects_barrier()
    assert len(CALLS) > 1
    assert tried[True] == tried[False]
    assert_close(paths[True], paths[False], rtol=1e-5, atol=1e-6)


def test_partial_losses_compile_once_and_metrics_have_their_names_at_once():
    @Counting
    def loss_fn(params, target):
        return jnp.sum((params - target) ** 2)

    params = jnp.zeros(3)
    opt = sl.Optimizer(sl.sgd(0.1) | sl.ScaleByBacktrackingLinesearch(9), params)
    for target in (jnp.ones(3), 2 * jnp.ones(3)):
        grad = 2 * (params - target)
        value_fn = jax.tree_util.Partial(loss_fn, target=target)
        value = jnp.sum((params - target) ** 2)
        moved, _ = opt.step(params, grad, value=value, grad=grad, value_fn=value_fn)
        np.testing.assert_allclose(moved, 0.2 * target, rtol=1e-6)
    assert loss_fn.traces == 1

    params = jnp.ones(2)
    names = ["learning_rate", "num_linesearch_steps", "decrease_error"]
    opt = sl.Optimizer(sl.sgd(1.0) | SEARCHES["backtracking"], params)
    assert list(opt.metrics) == [f"scale_by_backtracking_linesearch.{name}" for name in names]
    opt = sl.Optimizer(sl.lbfgs(), params)
    names.append("curvature_error")
    assert list(opt.metrics) == [f"scale_by_zoom_linesearch.{name}" for name in names]
    _, opt = once("zoom", params)
    assert list(opt.metrics) == [f"scale_by_zoom_linesearch.{name}" for name in names]
    assert opt.metrics["curvature_error"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lbfgs", "backtracking"])
def test_complex_parameters_are_pairs_of_real_ones(name, x64):
    backtracking = sl.ScaleByBacktrackingLinesearch(30, store_grad=True)
    tx = sl.lbfgs(memory_size=3) if name == "lbfgs" else sl.sgd(1.0) | backtracking

    def of_pair(p):
        return rosenbrock(p[0]) + rosenbrock(p[1] + p[0])

    def of_complex(z):
        return of_pair((z.real, z.imag))

    start = jnp.array([0.5 - 1j, 1.5 + 2j])
    path, opt, _ = run(of_complex, start, tx, 8)
    pair, real, _ = run(of_pair, (start.real, start.imag), tx, 8)
    np.testing.assert_allclose(path, jax.lax.complex(*pair), rtol=1e-9)
    assert opt.metrics["num_linesearch_steps"] == real.metrics["num_linesearch_steps"]
    held = opt.state[-1].grad
    np.testing.assert_allclose(held, jnp.conj(jax.grad(of_complex)(path[-1])), rtol=1e-9)


def hill(x):
    return jnp.sum(x**4 + x**2)


def once(name, params, scale=-1.0, function=hill, **given):
    """One step along `scale` times the gradient; equal shapes share a compiled program."""
    params = jnp.asarray(params)
    value, grad = jax.value_and_grad(function)(params)
    known = {"value": value, "grad": grad, "value_fn": function} | given
    opt = sl.Optimizer(sl.Scale(scale) | SEARCHES[name], params)
    return opt.step(params, known["grad"], **known)


def pathology(x, kind):
    branches = [lambda x: 5 * x - jnp.log(x), jnp.log, jnp.sqrt]
    return jax.lax.switch(kind, branches, x)


@pytest.mark.slow
@searches
def test_what_is_not_finite_is_stepped_back_from(name):
    # NaN, −∞ and an infinite slope. Backtracking looks at the loss only, which is 0 at the last.
    for kind, scale in enumerate((-1.0, -1 / 16, -1 / 4)[: 3 if name == "zoom" else 2]):
        function = jax.tree_util.Partial(pathology, kind=jnp.array(kind))
        moved, opt = once(name, 0.25, scale, function)
        assert opt.metrics["num_linesearch_steps"] > 1, kind
        assert 0 < moved < 0.25, kind
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(opt.state)), kind
        if kind == 0:
            for _ in range(12):
                moved, opt = once(name, moved, scale, function)
            assert abs(moved - 0.2) < 1e-2


@searches
def test_where_nothing_descends_nothing_moves(name):
    start = jnp.array([1.0, 2.0])
    for bad in (jnp.nan, jnp.inf):
        moved, opt = once(name, start, grad=jnp.array([bad, 1.0]))
        np.testing.assert_array_equal(moved, start)
        assert opt.metrics["learning_rate"] == 0
        assert opt.metrics["decrease_error"] == jnp.inf
    moved, _ = once(name, start, value=jnp.array(jnp.nan))
    np.testing.assert_array_equal(moved, start)
    # An ascending direction is not followed, and the state holds the loss and gradient there.
    moved, opt = once(name, start, scale=1.0)
    np.testing.assert_array_equal(moved, start)
    assert opt.metrics["learning_rate"] == 0
    assert opt.metrics["num_linesearch_steps"] == 0
    assert opt.state[-1].guess == 1
    assert opt.state[-1].value == hill(start)
    np.testing.assert_array_equal(opt.state[-1].grad, [6.0, 36.0])
    moved, opt = once(name, [0.0, 0.0])
    np.testing.assert_array_equal(moved, [0.0, 0.0])
    assert opt.metrics["decrease_error"] == 0


@searches
def test_the_state_holds_the_loss_and_the_gradient_of_the_new_parameters(name):
    moved, opt = once(name, [1.0, 2.0])
    state = opt.state[-1]
    np.testing.assert_allclose(state.value, hill(moved), rtol=1e-6)
    np.testing.assert_allclose(state.grad, jax.grad(hill)(moved), rtol=1e-4)
    assert 0 < state.learning_rate < 1
    assert opt.metrics["decrease_error"] == 0


@pytest.mark.slow
@searches
def test_lbfgs_stays_at_a_minimum(name):
    params = grad = jnp.zeros(2, jnp.float16)
    opt = sl.Optimizer(sl.lbfgs(memory_size=2, linesearch=SEARCHES[name]), params)
    known = {"value": hill(params), "grad": grad, "value_fn": hill}
    params, opt = after_steps(opt, 2, params, grad, **known)
    assert np.all(np.asarray(params) == 0)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(opt.state))


SHORT_SEARCHES = {
    "zoom": sl.ScaleByZoomLinesearch(4),
    "backtracking": sl.ScaleByBacktrackingLinesearch(4, decrease_factor=0.5),
}


@searches
def test_a_search_that_failed_does_not_end_the_later_ones(name):
    # Too steep for four trials; each search begins where the last one ended.
    def steep(x):
        return 1e4 * jnp.sum(x**2)

    history, _, metrics = run(steep, jnp.ones(2), sl.sgd(1.0) | SHORT_SEARCHES[name], 10)
    assert metrics["learning_rate"][0] == 0
    np.testing.assert_array_equal(history[0], [1.0, 1.0])
    assert steep(history[-1]) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sl.ScaleByZoomLinesearch, sl.ScaleByBacktrackingLinesearch])
def test_verbose_prints_where_the_search_failed(kind, capfd):
    params = jnp.array([1.0, 2.0])
    value, grad = jax.value_and_grad(hill)(params)
    for scale in (-0.01, 1.0):
        opt = sl.Optimizer(sl.Scale(scale) | kind(3, verbose=True), params)
        opt.step(params, grad, value=value, grad=grad, value_fn=hill)
        jax.effects_barrier()
        said = capfd.readouterr().out
        assert (said == "") == (scale < 0)
    assert said.startswith(f"{kind.__name__} found no learning rate")
    assert said.endswith("loss 22.0, slope 1332.0.\n")
