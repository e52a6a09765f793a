"""The learning-rate range test."""

import builtins
import math
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import mean_square

X, Y = jax.random.normal(jax.random.key(1), (16, 2)), jnp.ones((16, 1))
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]


def model():
    return eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))


def result(losses, diverged=False):
    losses = np.asarray(losses, np.float64)
    return sl.LRRangeTestResult(np.geomspace(1e-4, 1.0, len(losses)), losses, diverged)


# --- the run ----------------------------------------------------------------------------------


def by_hand(tx, learning_rates):
    """The losses of steps with these learning rates."""
    trained, opt, losses = model(), sl.Optimizer(tx, model()), []
    step = sl.train_step(mean_square)
    for i, learning_rate in enumerate(learning_rates):
        opt = opt.with_hyperparams(learning_rate=learning_rate)
        trained, opt, loss = step(trained, opt, *BATCHES[i % 2])
        losses.append(float(loss))
    return losses


@pytest.mark.slow
def test_each_step_has_its_learning_rate():
    tx = sl.ClipByGlobalNorm(1.0) | sl.adam(0.5)
    found = sl.lr_range_test(mean_square, tx, model(), BATCHES, lr_min=1e-4, lr_max=1e-1, steps=13)
    np.testing.assert_allclose(found.learning_rates, 10 ** np.linspace(-4, -1, 13))
    assert not found.diverged
    np.testing.assert_array_equal(found.losses, by_hand(tx, found.learning_rates))


def test_a_schedule_gives_way_to_the_test():
    tx = sl.sgd(sl.schedules.cosine_decay(1.0, 100))
    found = sl.lr_range_test(mean_square, tx, model(), BATCHES, lr_min=1e-4, lr_max=0.1, steps=10)
    np.testing.assert_array_equal(found.losses, by_hand(sl.sgd(1.0), found.learning_rates))


def test_the_step_is_traced_once_and_the_model_stays_valid():
    traces, start = [], model()

    def loss_fn(model, x, y):
        traces.append(None)
        return mean_square(model, x, y)

    before = jax.tree.map(np.asarray, eqx.filter(start, eqx.is_array))
    sl.lr_range_test(loss_fn, sl.adam(0.1), start, BATCHES, steps=20)
    assert len(traces) == 1
    after = jax.tree.map(np.asarray, eqx.filter(start, eqx.is_array))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_it_stops_at_a_loss_that_is_not_finite(bad):
    def loss_fn(model, i):
        return jnp.where(i == 12, bad, jnp.sum(model**2))

    batches = ((jnp.asarray(i),) for i in range(50))
    found = sl.lr_range_test(loss_fn, sl.sgd(0.1), jnp.ones(()), batches, lr_max=1e-3, steps=50)
    assert found.diverged
    assert len(found.losses) == len(found.learning_rates) == 13


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_it_stops_when_the_loss_has_grown_by_the_factor(sign):
    def loss_fn(model, loss):
        return loss + 0 * model

    def run(**options):
        batches = iter([jnp.asarray(sign if i < 20 else sign + 3.5) for i in range(40)])
        return sl.lr_range_test(
            loss_fn, sl.sgd(0.1), jnp.ones(()), batches, lr_max=1e-3, steps=40, **options
        )

    # The mean of the last 5 losses has grown by more than 3 when all of them are large.
    found = run()
    assert found.diverged
    assert len(found.losses) == 25
    assert not run(stop_factor=math.inf).diverged


def test_several_learning_rates_by_a_glob_or_a_path():
    tx = sl.sgd(0.1).partition({sl.where.path("**.bias"): sl.sgd(0.2)})
    options = {"lr_min": 1e-4, "lr_max": 1e-2, "steps": 10}
    both = sl.lr_range_test(mean_square, tx, model(), BATCHES, name="**.learning_rate", **options)
    whole = sl.lr_range_test(mean_square, sl.sgd(0.1), model(), BATCHES, **options)
    one = sl.lr_range_test(
        mean_square, tx, model(), BATCHES, name="partition.0.**.learning_rate", **options
    )
    np.testing.assert_allclose(both.losses, whole.losses, rtol=1e-6)
    assert not np.allclose(one.losses, whole.losses, rtol=1e-3)


def test_a_loss_with_aux_weight_and_microbatches():
    def loss_fn(model, x, y):
        return mean_square(model, x, y), jnp.ones(()), x

    options = {"lr_max": 1e-2, "steps": 10}
    plain = sl.lr_range_test(mean_square, sl.sgd(0.1), model(), BATCHES, **options)
    rich = sl.lr_range_test(
        loss_fn,
        sl.sgd(0.1),
        model(),
        BATCHES,
        has_aux=True,
        has_weight=True,
        microbatches=2,
        batch_args=("x", "y"),
        **options,
    )
    np.testing.assert_allclose(rich.losses, plain.losses, rtol=1e-5)


def test_the_state_of_a_model_is_carried():
    def loss_fn(model, state, x):
        return jnp.sum((model - x) ** 2) + 0.1 * state, state + 1

    start = {"lr_min": 1e-8, "lr_max": 2e-8, "steps": 10, "model_state": jnp.zeros(())}
    found = sl.lr_range_test(loss_fn, sl.sgd(0.1), jnp.zeros(()), [(jnp.ones(()),)], **start)
    np.testing.assert_allclose(found.losses, 1 + 0.1 * np.arange(10), rtol=1e-5)


def test_frozen_parameters_stay():
    head = sl.where.path("layers.1.**")
    everything = sl.lr_range_test(mean_square, sl.adam(0.1), model(), BATCHES, steps=12, lr_max=0.1)
    only_head = sl.lr_range_test(
        mean_square, sl.adam(0.1), model(), BATCHES, steps=12, lr_max=0.1, trainable=head
    )
    assert everything.losses[-1] != only_head.losses[-1]


# --- the suggestion ---------------------------------------------------------------------------


def test_the_suggestion_is_where_the_loss_falls_fastest():
    steps = np.linspace(-1, 1, 101)
    falling = 1 / (1 + np.exp(20 * (steps - 0.2)))  # steepest at step 60
    found = result(falling)
    assert found.suggestion == found.learning_rates[60]
    noisy = result(falling + 0.01 * np.random.default_rng(0).normal(size=101))
    assert 56 <= np.searchsorted(noisy.learning_rates, noisy.suggestion) <= 64


def test_a_fall_after_the_minimum_is_no_suggestion():
    losses = np.concatenate(
        [np.ones(40), np.linspace(1, 0, 20), np.linspace(0, 9, 20), np.linspace(9, 2, 21)]
    )
    assert 40 <= np.searchsorted(result(losses).learning_rates, result(losses).suggestion) <= 60


@pytest.mark.parametrize("losses", [np.linspace(1, 2, 50), np.ones(50), np.full(50, np.nan)])
def test_without_a_fall_there_is_no_suggestion(losses):
    found = result(losses)
    assert found.suggestion is None
    assert "no suggestion" in repr(found)


def test_losses_that_are_not_finite_do_not_hide_the_suggestion():
    losses = np.concatenate([np.ones(40), np.linspace(1, 0, 20), [5.0, np.inf]])
    found = result(losses, diverged=True)
    assert found.learning_rates[40] <= found.suggestion <= found.learning_rates[60]
    assert np.isnan(found.smoothed[-1])
    assert "diverged, suggestion" in repr(found)


def test_a_run_finds_a_learning_rate_that_works():
    found = sl.lr_range_test(mean_square, sl.adam(0.1), model(), BATCHES, steps=60)
    trained, opt = model(), sl.Optimizer(sl.adam(found.suggestion), model())
    step = sl.train_step(mean_square)
    for _ in range(20):
        trained, opt, loss = step(trained, opt, *BATCHES[0])
    assert loss < 0.2 * mean_square(model(), *BATCHES[0])


# --- the picture and the progress bar ---------------------------------------------------------


def test_the_plot_shows_losses_and_suggestion():
    pytest.importorskip("matplotlib")
    losses = np.concatenate([np.ones(40), np.linspace(1, 0, 20), [500.0, np.inf]])
    found = result(losses, diverged=True)
    (axes,) = found.plot().axes
    each, smoothed, suggestion = axes.lines
    np.testing.assert_array_equal(each.get_xdata(), found.learning_rates)
    np.testing.assert_array_equal(each.get_ydata(), found.losses)
    np.testing.assert_array_equal(smoothed.get_ydata(), found.smoothed)
    assert set(suggestion.get_xdata()) == {found.suggestion}
    assert axes.get_xscale() == "log"
    assert axes.get_ylim()[1] < 2  # the last losses do not flatten the others
    result(np.full(12, np.nan), diverged=True).plot()


def search(**options):
    return sl.lr_range_test(
        mean_square, sl.sgd(0.1), model(), BATCHES, lr_max=1e-3, steps=10, **options
    )


def test_a_progress_bar_on_demand_and_in_a_terminal(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    search()
    assert capsys.readouterr().err == ""
    search(progress=True)
    assert "10/10" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    search()
    assert "10/10" in capsys.readouterr().err
    search(progress=False)
    assert capsys.readouterr().err == ""


def test_a_progress_bar_without_tqdm_says_what_to_install(monkeypatch):
    imported = builtins.__import__

    def without_tqdm(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    search()
    with pytest.raises(ImportError, match=r"`progress=True` needs tqdm: pip install tqdm\."):
        search(progress=True)
