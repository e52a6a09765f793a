"""Sweeps: several runs as one program."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import Counting, mean_square, slow_except
from refusals.messages import refused
from slalom._loop.tools import sweep as sweep_module

X, Y = jax.random.normal(jax.random.key(1), (16, 2)), jnp.ones((16, 1))
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]
GRID = {"learning_rate": [1e-3, 1e-2, 1e-1], "weight_decay": [0.0, 0.1]}
STEPS = 6


def model():
    return eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))


def by_hand(tx, values, **options):
    """The losses of one run."""
    trained = model()
    opt = sl.Optimizer(tx, trained, **options).with_hyperparams(values)
    step, losses = sl.train_step(mean_square, donate=False), []
    for i in range(STEPS):
        trained, opt, loss = step(trained, opt, *BATCHES[i % 2])
        losses.append(float(loss))
    return losses


def result(final):
    """The result of a sweep with these final losses."""
    final = np.asarray(final, np.float64)
    grid = {name: np.arange(n) + 1.0 for name, n in zip("abc", final.shape, strict=False)}
    return sl.SweepResult(grid, np.stack([np.full_like(final, 9.0), final], axis=-1))


SMALLER = "smaller learning rates … `sl.ClipByGlobalNorm(1.0)`"
TX = (sl.ClipByGlobalNorm(1.0) | sl.adamw(0.5)).every_k(2)


@pytest.mark.slow
def test_a_sweep_equals_its_runs_with_aux_keys_and_state():
    loss_fn = Counting(mean_square)
    found = sl.sweep(loss_fn, TX, model(), BATCHES, GRID, steps=STEPS)
    assert loss_fn.traces == 1
    assert list(found.grid) == ["learning_rate", "weight_decay"]
    assert found.losses.shape == (3, 2, STEPS)
    for i, j in itertools.product(range(3), range(2)):
        values = {name: GRID[name][k] for name, k in zip(GRID, (i, j), strict=True)}
        np.testing.assert_allclose(found.losses[i, j], by_hand(TX, values), rtol=1e-5)
    best = sl.Optimizer(TX, model()).with_hyperparams(found.best).hyperparams
    assert best["learning_rate"] == np.float32(found.best["learning_rate"])

    def loss_fn(model, state, x, key):
        noise = 0.0 * jax.random.normal(key, ())
        return jnp.sum((model - x) ** 2) + 0.1 * state["n"] + noise, {"n": state["n"] + 1}

    keys = jax.random.split(jax.random.key(0), STEPS)
    batches = [(jnp.ones(()), key) for key in keys]
    grid = {"learning_rate": jnp.array([0.0, 0.1])}
    state = {"n": jnp.zeros(())}
    options = {"steps": STEPS, "model_state": state}
    found = sl.sweep(loss_fn, sl.sgd(0.1), jnp.zeros(()), batches, grid, **options)
    n = np.arange(STEPS)
    np.testing.assert_allclose(found.losses, [1 + 0.1 * n, 0.64**n + 0.1 * n], rtol=1e-5)


FIRST = {
    "rprop": (sl.rprop, "learning_rate", [1e-3, 1e-2]),
    "adagrad": (lambda x: sl.ScaleByRss(x) | sl.Scale(-0.1), "initial_accumulator_value", [0.1, 2]),
    "prodigy": (lambda x: sl.prodigy(1.0, estim_lr0=x).every_k(2), "estim_lr0", [1e-3, 1e-1]),
    "mechanize": (lambda x: sl.sgd(1.0).mechanize(s_init=x), "s_init", [1e-3, 1e-1]),
}


@pytest.mark.parametrize("name", slow_except(FIRST, "rprop"))
def test_numbers_that_set_the_initial_state_are_swept(name):
    make, hyperparam, values = FIRST[name]
    grid = {hyperparam: values}
    found = sl.sweep(mean_square, make(values[0]), model(), BATCHES, grid, steps=STEPS)
    for i, value in enumerate(values):
        np.testing.assert_allclose(found.losses[i], by_hand(make(value), {}), rtol=1e-5)


@pytest.mark.slow
def test_chunks_change_nothing():
    whole = sl.sweep(mean_square, sl.adamw(0.1), model(), BATCHES, GRID, steps=STEPS)
    for chunk in (1, 4, 9):
        loss_fn = Counting(mean_square)
        once = iter(BATCHES * 3)  # read once, though several chunks need it
        found = sl.sweep(loss_fn, sl.adamw(0.1), model(), once, GRID, steps=STEPS, chunk=chunk)
        np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-5, err_msg=str(chunk))
        assert loss_fn.traces == 1, chunk


def test_a_grid_may_be_of_numbers_anywhere():
    schedule = sl.schedules.linear(0.1, 0.0, 10)
    tx = sl.adam(schedule).partition({sl.where.path("**.bias"): sl.sgd(0.1)})
    grid = {"transition_steps": [5, 10], "**.init_value": [0.1, 0.2], "b1": [0.9]}
    found = sl.sweep(mean_square, tx, model(), BATCHES, grid, steps=STEPS)
    assert found.losses.shape == (2, 2, 1, STEPS)
    values = {"transition_steps": 5, "init_value": 0.2}
    np.testing.assert_allclose(found.losses[0, 1, 0], by_hand(tx, values), rtol=1e-5)


@pytest.mark.slow
def test_chunks_come_where_memory_runs_out(full):
    once = iter(BATCHES * 3)
    found = sl.sweep(mean_square, sl.adamw(0.1), model(), once, GRID, steps=STEPS)
    assert full[0].tried == [6, 3] + [2] * 3 * STEPS
    values = {"learning_rate": 0.1, "weight_decay": 0.1}
    np.testing.assert_allclose(found.losses[2, 1], by_hand(sl.adamw(0.1), values), rtol=1e-5)


def test_runs_are_updated_in_place_and_neither_the_model_nor_frozen_leaves_are(monkeypatch):
    # Otherwise parameters and states would be in memory twice.
    head, given = sl.where.path("layers.1.**"), []

    class Watched(sweep_module.Program):
        def __call__(self, arguments):
            given.append(arguments.varying)
            return super().__call__(arguments)

    monkeypatch.setattr(sweep_module, "Program", Watched)
    start, grid = model(), {"learning_rate": [0.01, 0.1]}
    found = sl.sweep(mean_square, sl.adam(0.1), start, BATCHES, grid, steps=STEPS, trainable=head)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    assert not any(x.is_deleted() for x in jax.tree.leaves(start) if isinstance(x, jax.Array))
    expected = by_hand(sl.adam(0.1), {"learning_rate": 0.1}, trainable=head)
    np.testing.assert_allclose(found.losses[1], expected, rtol=1e-5)
    assert given[0].model.layers[0].weight is None
    assert given[0].model.layers[1].weight.shape == (2, 1, 4)


class Full:
    """A program of a device on which only a few runs fit."""

    def __init__(self, program, most):
        self.program, self.most, self.tried = program, most, []

    def __call__(self, arguments):
        (runs,) = {x.shape[0] for x in jax.tree.leaves(arguments.varying)}
        self.tried.append(runs)
        if runs > self.most:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return self.program(arguments)


@pytest.fixture
def full(monkeypatch):
    """Makes the device run out of memory for more than two runs, and says what was tried."""
    programs = []

    def make(*args, **options):
        programs.append(Full(Program(*args, **options), most=2))
        return programs[-1]

    Program = sweep_module.Program
    monkeypatch.setattr(sweep_module, "Program", make)
    return programs


def test_a_chunk_that_was_asked_for_is_not_made_smaller(full):
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        sl.sweep(mean_square, sl.adamw(0.1), model(), BATCHES, GRID, steps=STEPS, chunk=4)
    assert len(full) == len(full[0].tried) == 1


def test_the_best_run_has_the_lowest_finite_loss_and_leaves_the_others_alone():
    found = result([[3.0, 2.0, 5.0], [4.0, 1.0, 6.0]])
    assert found.best_index == (1, 1)
    assert found.best == {"a": 2.0, "b": 2.0}
    assert repr(found) == "sweep of 6 runs (a: 2, b: 3) with 2 steps, best: a=2, b=2 with loss 1"
    # The final loss is the mean over a tenth of the steps.
    losses = np.zeros((1, 40))
    losses[0, -4:] = [1.0, 2.0, 3.0, 6.0]
    np.testing.assert_array_equal(sl.SweepResult({"a": np.ones(1)}, losses).final, [3.0])

    for bad in (np.nan, -np.inf, np.inf):
        assert result([bad, 3.0, bad]).best == {"a": 2.0}
        with refused(ValueError, "No run of this sweep has a finite final loss", SMALLER):
            result([bad, bad]).best  # noqa: B018
        assert repr(result([bad])) == "sweep of 1 runs (a: 1) with 2 steps, none with a finite loss"

    grid = {"learning_rate": [0.1, 1e30]}
    found = sl.sweep(mean_square, sl.sgd(0.1), model(), BATCHES, grid, steps=STEPS)
    assert not np.isfinite(found.losses[1, -1])
    assert found.best == {"learning_rate": 0.1}
    values = {"learning_rate": 0.1}
    np.testing.assert_allclose(found.losses[0], by_hand(sl.sgd(0.1), values), rtol=1e-5)


def test_one_hyperparameter_plots_as_a_line_and_several_as_a_heat_map():
    pytest.importorskip("matplotlib")
    found = result([3.0, 1.0, 2.0, np.nan])
    left, right = found.plot().axes
    assert len(left.lines) == 4
    np.testing.assert_array_equal(left.lines[0].get_ydata(), [9.0, 3.0])
    finals, bad, best = right.lines
    np.testing.assert_array_equal(finals.get_xydata(), [[1, 3], [2, 1], [3, 2]])
    np.testing.assert_array_equal(bad.get_xdata(), [4])
    np.testing.assert_array_equal(best.get_xydata(), [[2, 1]])

    pytest.importorskip("matplotlib")
    final = np.arange(1.0, 13.0).reshape(2, 3, 2)
    final[1, 2] = np.nan
    _, heat, _ = result(final).plot().axes
    (image,) = heat.images
    shown = image.get_array()
    np.testing.assert_array_equal(shown.filled(-1), [[1, 7], [3, 9], [5, -1]])  # best of c
    assert [text.get_text() for text in heat.texts] == ["1", "3", "5", "7", "9", "×"]
    assert "best of c" in heat.get_title()
    assert [label.get_text() for label in heat.get_yticklabels()] == ["1", "2", "3"]
    # Runs that all diverge have a plot too.
    for final in ([np.nan, np.inf], [[np.nan, np.inf]]):
        result(final).plot()._repr_png_()
