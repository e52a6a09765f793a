"""L-BFGS and self-scaled Broyden: where they arrive, what they remember, and errors of searches."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_linesearch import all_problems, rosenbrock, run, run_optax

import slalom as sl
from helpers import after_training, assert_close, slow_except


@pytest.mark.slow
def test_lbfgs_arrives_by_the_path_of_optax(x64):
    ours = all_problems(run, sl.lbfgs())
    theirs = all_problems(run_optax, optax.lbfgs())
    for (function, minimum, history, (_, metrics)), (_, _, path, (tried,)) in zip(
        ours, theirs, strict=True
    ):
        np.testing.assert_allclose(history, path, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(history[-1], minimum, atol=1e-8)
        assert function(history[-1]) < 1e-8
        assert np.sum(metrics["num_linesearch_steps"]) <= np.sum(tried)


@pytest.mark.slow
def test_lbfgs_arrives_in_groups_and_keeps_no_buffer_of_its_caller():
    for _, minimum, history, (_, metrics) in all_problems(run, sl.lbfgs(), 60):
        np.testing.assert_allclose(history[-1], minimum, atol=1e-4)
        assert np.all(np.isfinite(history))
        assert np.max(metrics["num_linesearch_steps"]) <= 20

    others = sl.sgd(0.01) | sl.ScaleByBacktrackingLinesearch(9)
    history, _, _ = run(bowl, BOWL, others.partition({FIRST: SHORT}), 1)
    assert_close(history["a"], jax.tree.map(lambda x: x[:1], alone()), rtol=1e-6)
    assert history["c"][0] != BOWL["c"]

    params, grads = jnp.array([1.0, 2.0]), jnp.array([2.0, 4.0])
    tx = sl.ScaleByLbfgs(2)
    _, state = tx.update(grads, tx.init(params), params)
    theirs = {params.unsafe_buffer_pointer(), grads.unsafe_buffer_pointer()}
    assert theirs.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(state))


def test_lbfgs_is_the_dense_formula(x64):
    hessian = jnp.array([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 2.0]])
    tx = sl.ScaleByLbfgs(2)
    step = jax.jit(tx.update)
    params = jnp.array([1.0, -2.0, 0.5])
    state = tx.init(params)
    pairs, before = [], None
    for _ in range(5):
        grad = hessian @ params
        update, state = step(grad, state, params)
        if before is not None:
            pairs.append((params - before[0], grad - before[1]))
        inverse = np.eye(3) * min(1, 1 / np.linalg.norm(grad))
        for s, y in pairs[-2:]:
            inverse = np.eye(3) * (s @ y) / (y @ y)
        for s, y in pairs[-2:]:
            project = np.eye(3) - np.outer(y, s) / (s @ y)
            inverse = project.T @ inverse @ project + np.outer(s, s) / (s @ y)
        np.testing.assert_allclose(update, inverse @ grad, rtol=1e-12)
        before = (params, grad)
        params = params - 0.3 * update


def bowl(p):
    return rosenbrock(jnp.stack([p["a"][0], p["b"]])) + jnp.sum(p["a"][1] ** 2) + p["c"] ** 4


BOWL = {"a": (jnp.array(-0.5), jnp.array([1.0, 2.0])), "b": jnp.array(2.0), "c": jnp.array(3.0)}
FIRST = sl.where.path("a.**")
SHORT = sl.lbfgs(memory_size=1, linesearch=sl.ScaleByBacktrackingLinesearch(30, store_grad=True))


@functools.cache
def alone(tx=SHORT):
    """The path of "a" where nothing else is there."""
    return run(lambda a: bowl(BOWL | {"a": a}), BOWL["a"], tx, 3)[0]


WRAPPED = {
    "only": SHORT.only(FIRST),
    "nested": SHORT.only(FIRST | sl.where.path("b")).only(~sl.where.path("b")).only(FIRST),
    "mask": SHORT.mask(FIRST) | sl.SetToZero().mask(~FIRST),
    "partition": sl.SetToZero().partition({FIRST: SHORT}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_a_search_on_some_parameters_sees_the_others_stand_still(name):
    history, opt, _ = run(bowl, BOWL, WRAPPED[name], 3)
    assert_close(history["a"], alone(), rtol=1e-5)
    assert np.all(history["b"] == BOWL["b"])
    assert np.all(history["c"] == BOWL["c"])
    assert jax.tree.leaves(opt.state_of(sl.ScaleByLbfgs).updates["b"]) == []


@jax.jit
def walk(params, grads):
    """The state of L-BFGS, and its direction, after parameters and gradients."""
    tx = sl.ScaleByLbfgs(3)

    def body(state, given):
        update, state = tx.update(given[1], state, given[0])
        return state, update

    state, updates = jax.lax.scan(body, tx.init(params[0]), (params, grads))
    return state, updates[-1]


def pairs_of(path):
    return walk(*(jnp.array(x) for x in zip(*path, strict=True)))


@pytest.mark.slow
def test_lbfgs_remembers_pairs_of_positive_curvature_in_single():
    up, down = [([0.0, 0.0], [1.0, 1.0]), ([1.0, 0.0], [2.0, 1.0])], ([2.0, 0.0], [1.0, 1.0])
    state, update = pairs_of([*up, down])
    assert int(state.count) == 1
    np.testing.assert_array_equal(state.products, [1.0, 0.0, 0.0])
    assert jnp.vdot(update, jnp.array([1.0, 1.0])) > 0

    path = [([4.0, 3.0], [4.0, 30.0]), ([2.0, 2.0], [2.0, 20.0]), ([1.0, 1.0], [1.0, 10.0])]
    state, _ = pairs_of(path)
    assert int(state.count) == 2
    # The search found nothing: the same place again.
    state, update = pairs_of([*path, path[-1]])
    assert int(state.count) == 0
    np.testing.assert_allclose(update, np.array([1.0, 10.0]) / np.sqrt(101), rtol=1e-6)

    state = sl.ScaleByLbfgs(2).init(jnp.ones(2, jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_lbfgs_after_a_reset_of_some_parameters_goes_on_with_the_others():
    def loss_fn(p):
        return jnp.sum(p["a"] ** 2 * jnp.array([1.0, 5.0])) + p["b"] ** 2

    params = {"a": jnp.array([1.0, 1.0]), "b": jnp.array(1.0)}
    step = sl.train_step(loss_fn, donate=False)
    params, opt, _ = after_training(step, sl.lbfgs(memory_size=3), 3, params)
    opt = opt.reset(params, where=sl.where.path("b"))
    state = opt.state_of(sl.ScaleByLbfgs)
    assert np.all(state.diff_params["b"] == 0)
    assert np.all(state.diff_params["a"][:2] != 0)
    after, opt, _ = step(params, opt)
    assert loss_fn(after) < loss_fn(params)
    # Nothing was seen of "b" before, so it has no part in the newest pair.
    state = opt.state_of(sl.ScaleByLbfgs)
    assert int(state.count) == 3
    assert np.all(state.diff_params["a"] != 0)
    assert np.all(state.diff_params["b"] == 0)
    assert np.all(state.diff_updates["b"] == 0)
    empty = opt.reset(after).state_of(sl.ScaleByLbfgs)
    grad = jax.grad(loss_fn)(after)
    update, _ = sl.ScaleByLbfgs(3).update(grad, empty, after)
    norm = jnp.maximum(sl.tree.global_norm(grad), 1)
    np.testing.assert_allclose(update["a"], grad["a"] / norm, rtol=1e-6)


@pytest.mark.slow
def test_memories_need_little_and_a_step_that_stood_still_forgets_the_matrix():
    params = jnp.zeros(100_000)
    opt = sl.Optimizer(sl.lbfgs(), params)
    step = sl.train_step(lambda x: jnp.sum((x - 1.0) ** 2))
    scratch = step.lower(params, opt).compile().memory_analysis().temp_size_in_bytes
    # The direction, the trial, its gradient, and the gradient at the start; not the memories.
    assert scratch <= 8 * params.nbytes

    params = {"x": jnp.ones(2), "z": jnp.array(1.0 + 2.0j)}
    tx = sl.contrib.ScaleBySelfScaledBroyden()
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    _, state = tx.update(grads, tx.init(params), params)
    moved = jax.tree.map(lambda x: 0.9 * x, params)
    _, state = tx.update(jax.tree.map(lambda x: 0.8 * x, grads), state, moved)
    assert state.inverse.shape == (4, 4)
    assert float(state.inverse[0, 0]) > 0
    direction, state = tx.update(grads, state, moved)
    assert not np.any(state.inverse)
    ratios = [u / g for u, g in zip(*map(jax.tree.leaves, (direction, grads)), strict=True)]
    np.testing.assert_allclose(np.concatenate([x.ravel() for x in ratios]), ratios[0][0], rtol=1e-5)


FAMILIES = ("broyden", "bfgs", "plain")
DIAGONAL = np.array([1.0, 10.0])
# After the second of two steps of 0.9 times the exact length, from a run of the authors' code.
SCALED = [[0.347080, 0.065879], [0.065879, 0.093353]]


def broyden_walk(family, steps):
    """Matrices, positions and differences after steps of 0.9 times the exact length."""
    tx, x = sl.contrib.ScaleBySelfScaledBroyden(family), jnp.ones(2)
    update, diagonal = jax.jit(tx.update), jnp.asarray(DIAGONAL)
    direction, state = update(diagonal * x, tx.init(x), x)
    found = []
    for _ in range(steps):
        g = diagonal * x
        rate = 0.9 * jnp.vdot(g, direction) / jnp.vdot(direction, diagonal * direction)
        s, x = -rate * direction, x - rate * direction
        direction, state = update(diagonal * x, state, x)
        found.append((state.inverse, x, s, direction))
    return found


@pytest.mark.slow
def test_two_steps_are_those_of_the_authors_code(x64):
    (first, x, *_), (second, *_) = broyden_walk("broyden", 2)
    np.testing.assert_allclose(x, [0.909191, 0.091908], atol=1e-6)
    np.testing.assert_allclose(first, [[0.101888, 0.008981], [0.008981, 0.099910]], atol=1e-6)
    np.testing.assert_allclose(second, SCALED, atol=1e-6)


@pytest.mark.parametrize("family", slow_except(FAMILIES, "broyden"))
def test_the_matrix_is_positive_definite_and_solves_the_secant_equation(x64, family):
    for inverse, x, s, direction in broyden_walk(family, 4):
        np.testing.assert_allclose(inverse @ (DIAGONAL * s), s, rtol=1e-9)
        assert np.linalg.eigvalsh(inverse).min() > 0
        # The direction is computed without a second pass over the matrix.
        np.testing.assert_allclose(direction, inverse @ (DIAGONAL * x), rtol=1e-9)


def loss_fn(x):
    return jnp.sum(x**2)


def step(tx=None, **given):
    params = jnp.ones(3)
    known = {"value": jnp.array(3.0), "grad": 2 * params, "value_fn": loss_fn} | given
    opt = sl.Optimizer(sl.lbfgs() if tx is None else tx, params)
    return opt.step(params, 2 * params, **known)


def reused(tx):
    params = jnp.ones(3)
    sl.train_step(loss_fn, reuse_linesearch=True)(params, sl.Optimizer(tx, params))


BACKTRACKING = sl.sgd(1.0) | sl.ScaleByBacktrackingLinesearch(9)
ITSELF = " `sl.train_step` passes value, grad and value_fn itself."
NONE_KEPT = (
    "`reuse_linesearch=True` takes loss and gradient from a line search that ends the chain, such "
    "as `sl.ScaleByZoomLinesearch` or `sl.ScaleByBacktrackingLinesearch(…, store_grad=True)`. This "
    "chain ends with {}, which keeps no gradient."
)

TYPES = {
    "ScaleByZoomLinesearch ('scale_by_zoom_linesearch') needs 'value_fn': pass the loss as a "
    "function of the model: `opt.step(..., value_fn=fn)`." + ITSELF: (lambda: step(value_fn=None)),
    "ScaleByZoomLinesearch ('scale_by_zoom_linesearch') needs 'value': pass the loss: "
    "`opt.step(model, grads, value=loss)`, or `sl.Context(value=loss)`." + ITSELF: (
        lambda: step(value=None)
    ),
    "ScaleByBacktrackingLinesearch ('scale_by_backtracking_linesearch') needs 'grad': pass the "
    "gradient of the loss: `opt.step(model, grads, grad=grads)`." + ITSELF: (
        lambda: step(BACKTRACKING, grad=None)
    ),
    "ScaleByLbfgs needs 'params': pass the parameters: `tx.update(grads, state, params)`.": (
        lambda: sl.ScaleByLbfgs().update(jnp.ones(3), sl.ScaleByLbfgs().init(jnp.ones(3)))
    ),
    "The `value_fn` passed to ScaleByZoomLinesearch must return a real scalar, got None of type "
    "NoneType.": lambda: step(value_fn=lambda x: None),
    "The `value_fn` passed to ScaleByZoomLinesearch must return a real floating-point number, got "
    "dtype complex64.": lambda: step(value_fn=lambda x: jnp.sum(x).astype(jnp.complex64)),
    NONE_KEPT.format("ScaleByBacktrackingLinesearch"): lambda: reused(BACKTRACKING),
    NONE_KEPT.format("Mask"): (
        lambda: reused(sl.sgd(1.0) | sl.ScaleByZoomLinesearch(9).mask(sl.where.everything()))
    ),
}

# A number outside of its interval.
OUTSIDE = [
    (sl.ScaleByBacktrackingLinesearch, "decrease_factor", 1.0, "(0, 1)"),
    (sl.ScaleByBacktrackingLinesearch, "increase_factor", 0.5, "[1, inf]"),
    (sl.ScaleByZoomLinesearch, "increase_factor", 1.0, "(1, inf)"),
    (sl.ScaleByZoomLinesearch, "slope_rtol", -0.1, "[0, 1)"),
    (sl.ScaleByZoomLinesearch, "approx_dec_rtol", -1.0, "[0, inf)"),
]
VALUES = {
    f"{search.__name__}.{field} must be in {interval}, got {x}.": partial(search, 9, **{field: x})
    for search, field, x, interval in OUTSIDE
} | {
    "The `value_fn` passed to ScaleByZoomLinesearch must return a scalar, got an array of "
    "shape (3,). Average it over the batch, for example with `jnp.mean`.": (
        lambda: step(value_fn=lambda x: x**2)
    ),
    "`reuse_linesearch=True` reuses the loss and the gradient of the previous step, so there is no "
    "`aux` to return. Remove `has_aux`.": lambda: sl.train_step(
        loss_fn, reuse_linesearch=True, has_aux=True
    ),
}


@pytest.mark.parametrize(
    ("error", "message"),
    [(error, m) for error, cases in ((TypeError, TYPES), (ValueError, VALUES)) for m in cases],
)
def test_messages_are_as_stated_to_the_last_word(error, message):
    with pytest.raises(error) as caught:
        (TYPES | VALUES)[message]()
    assert str(caught.value) == message
