"""Tools of a loop: the best model that it had, and the learning rate range test."""

import copy
import functools
import math
import pickle
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slalom as sl
from helpers import Counting, after_training, assert_same_bits, mean_square, mlp, params_of

VALUES = [np.nan, 0.9, np.inf, 0.5, 0.5, -np.inf, 0.7, np.nan, 0.4, 0.6]


def numbered(i):
    return {"w": jnp.full((2,), float(i)), "act": jax.nn.relu}


def by_hand(values, min_delta=0.0, sign=1.0):
    best, held, stale, rows = np.inf, -1, 0, []
    for i, v in enumerate(values):
        if np.isfinite(v) and sign * v < best - min_delta:
            best, held, stale = sign * v, i, 0
        else:
            stale += 1
        rows.append((held, stale))
    return rows


@pytest.mark.parametrize(("min_delta", "minimize"), [(0.0, True), (0.25, True), (0.25, False)])
def test_it_keeps_what_a_loop_by_hand_keeps_also_in_a_scan(min_delta, minimize):
    def update(best, given):
        number, value = given
        best = best.update({"w": jnp.full((2,), number)}, value)
        return best, (best.model["w"][0], best.stale, best.stop)

    numbers = jnp.arange(10.0), jnp.asarray(VALUES, float)
    options = {"patience": 3, "min_delta": min_delta, "minimize": minimize}
    best = sl.KeepBest({"w": jnp.full((2,), -1.0)}, **options)
    last, scanned = jax.lax.scan(update, best, numbers)
    rows = by_hand(VALUES, min_delta, 1.0 if minimize else -1.0)
    for i, (held, stale) in enumerate(rows):
        assert [x[i] for x in scanned] == [held, stale, stale >= 3]
        best, _ = update(best, [x[i] for x in numbers])
    assert_same_bits(best, last)


def test_all_dtypes_and_kinds_of_leaves_are_kept_from_the_first_model_on():
    best, patient = sl.KeepBest(numbered(-1), patience=2), sl.KeepBest(numbered(-1))
    assert not best.stop
    for value in (np.nan, np.inf, -np.inf):
        best, patient = best.update(numbered(5), value), patient.update(numbered(5), value)
    assert_same_bits(best.model, numbered(-1))
    assert float(best.value) == np.inf
    assert best.stop
    assert not patient.stop

    for dtype in ("bfloat16", "float16", "float32", "int32"):
        best = sl.KeepBest(numbered(0)).update(numbered(1), jnp.asarray(3, dtype))
        assert best.value.dtype == jnp.float32, dtype
        assert float(best.value) == 3, dtype
    with jax.enable_x64(True):
        best = sl.KeepBest({"w": jnp.zeros(2)}).update({"w": jnp.ones(2)}, 1.0)
        best = best.update({"w": jnp.full(2, 2.0)}, 1.0 - 1e-12)
        assert float(best.model["w"][0]) == 2
        assert best.value.dtype == jnp.float64

    floats = {"half": jnp.ones(2, jnp.bfloat16), "complex": jnp.ones(2, jnp.complex64)}
    numbers = {"numpy": np.arange(3), "rate": 0.5, "flag": True, "weak": jnp.asarray(1.0)}
    model = floats | numbers | {"key": jax.random.key(0), "hole": None}
    changed = model | {"half": 2 * model["half"], "key": jax.random.key(1), "weak": jnp.ones(())}
    best = sl.KeepBest(model).update(changed, 1.0)
    assert_same_bits(best.model, changed)


def test_it_survives_donation_copies_pickles_and_files(tmp_path):
    model, x = mlp(), jnp.ones((4, 2))
    step, best = sl.train_step(mean_square, donate="all"), sl.KeepBest(model)
    model, opt, _ = step(model, sl.Optimizer(sl.sgd(0.1), model), x, x[:, :1])
    best = best.update(model, 1.0).update(model, 2.0)
    kept = np.asarray(model.layers[0].weight)
    step(model, opt, x, x[:, :1])
    np.testing.assert_array_equal(best.model.layers[0].weight, kept)
    # Training goes on from the best model, which is given away too.
    step(best.model, sl.Optimizer(sl.sgd(0.1), best.model), x, x[:, :1])
    np.testing.assert_array_equal(best.model.layers[0].weight, kept)

    model = eqx.nn.Linear(2, 1, key=jax.random.key(0)), abs
    best = sl.KeepBest(model, patience=3).update(model, 0.5).update(model, 0.7)
    # Its file is that of any tree.
    eqx.tree_serialise_leaves(tmp_path / "best.eqx", best)
    read = eqx.tree_deserialise_leaves(tmp_path / "best.eqx", sl.KeepBest(model, patience=3))
    for again in (copy.deepcopy(best), pickle.loads(pickle.dumps(best)), read):
        assert eqx.tree_equal(again, best)
    assert repr(best) == "KeepBest(patience=3, value=0.5, stale=1, stop=False)"


@pytest.mark.slow
def test_runs_states_and_shardings_are_kept_by_one_conditional():
    start = {"w": jnp.zeros((3, 2))}
    best = jax.vmap(lambda m: sl.KeepBest(m, patience=2))(start)
    values = jnp.array([[3.0, 1.0, jnp.nan], [2.0, 2.0, jnp.nan], [2.5, 0.5, jnp.nan]])
    for i, row in enumerate(values):
        best = jax.vmap(lambda b, m, v: b.update(m, v))(best, {"w": start["w"] + i + 1}, row)
    np.testing.assert_array_equal(best.model["w"][:, 0], [2, 3, 0])
    np.testing.assert_array_equal(best.stale, [1, 0, 3])
    np.testing.assert_array_equal(best.stop, [False, False, True])

    def run(best, model, value):
        return best.update(model, value)

    program = jax.jit(run)
    best = sl.KeepBest(numbered(0)["w"])
    for i in range(3):
        best = program(best, numbered(i)["w"], jnp.float32(i))
    assert program._cache_size() == 1
    assert "conditional" in program.lower(best, numbered(0)["w"], 1.0).compile().as_text()

    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    model = {"w": jax.device_put(jnp.zeros((8, 2)), split)}
    best = sl.KeepBest(model)
    whole = jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, PartitionSpec()))
    for new in (model, {"w": whole}):
        best = best.update(new, 1.0)
        assert best.model["w"].sharding == split

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
    x = jnp.arange(8.0).reshape(4, 2)
    best = sl.KeepBest((norm, state))
    _, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    best = best.update((norm, state), 1.0)
    assert_same_bits(jax.tree.leaves(best.model[1]), jax.tree.leaves(state))


X, Y = jax.random.normal(jax.random.key(1), (16, 2)), jnp.ones((16, 1))
BATCHES = [(X[:8], Y[:8]), (X[8:], Y[8:])]


def search(loss_fn=mean_square, tx=None, model=None, batches=BATCHES, **options):
    model = mlp() if model is None else model
    options = {"steps": 10} | options
    return sl.lr_range_test(loss_fn, tx or sl.sgd(0.1), model, batches, **options)


def result(losses, diverged=False):
    losses = np.asarray(losses, np.float64)
    return sl.LRRangeTestResult(np.geomspace(1e-4, 1.0, len(losses)), losses, diverged)


def by_loop(tx, learning_rates):
    """The losses of steps with these learning rates."""
    trained, opt, losses = mlp(), sl.Optimizer(tx, mlp()), []
    step = sl.train_step(mean_square)
    for i, learning_rate in enumerate(learning_rates):
        opt = opt.with_hyperparams(learning_rate=learning_rate)
        trained, opt, loss = step(trained, opt, *BATCHES[i % 2])
        losses.append(float(loss))
    return losses


@pytest.mark.slow
def test_each_step_has_its_learning_rate_until_a_loss_is_not_finite():
    loss_fn, start = Counting(mean_square), mlp()
    before = jax.tree.map(np.asarray, params_of(start))
    tx = sl.ClipByGlobalNorm(1.0) | sl.adam(0.5)
    found = search(loss_fn, tx, start, lr_min=1e-4, lr_max=1e-1, steps=13)
    assert loss_fn.traces == 1
    np.testing.assert_allclose(found.learning_rates, 10 ** np.linspace(-4, -1, 13))
    assert not found.diverged
    np.testing.assert_array_equal(found.losses, by_loop(tx, found.learning_rates))
    # The model that was passed stays valid.
    assert_same_bits(params_of(start), before)

    tx = sl.sgd(sl.schedules.cosine_decay(1.0, 100))
    found = search(tx=tx, lr_min=1e-4, lr_max=0.1)
    np.testing.assert_array_equal(found.losses, by_loop(sl.sgd(1.0), found.learning_rates))

    def loss_fn(model, i, bad):
        return jnp.where(i == 12, bad, jnp.sum(model**2))

    for bad in (jnp.inf, jnp.nan):
        batches = ((jnp.asarray(i), jnp.asarray(bad)) for i in range(50))
        found = search(loss_fn, model=jnp.ones(()), batches=batches, lr_max=1e-3, steps=50)
        assert found.diverged, bad
        assert len(found.losses) == len(found.learning_rates) == 13, bad


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_it_stops_when_the_loss_has_grown_by_the_factor(sign):
    def loss_fn(model, loss):
        return loss + 0 * model

    def run(**options):
        batches = iter([jnp.asarray(sign if i < 20 else sign + 3.5) for i in range(40)])
        return search(
            loss_fn, model=jnp.ones(()), batches=batches, lr_max=1e-3, steps=40, **options
        )

    # The mean of the last 5 losses has grown by more than 3 when all of them are large.
    found = run()
    assert found.diverged
    assert len(found.losses) == 25
    assert not run(stop_factor=math.inf).diverged


@pytest.mark.slow
def test_losses_with_aux_state_and_several_learning_rates():
    tx = sl.sgd(0.1).partition({sl.where.path("**.bias"): sl.sgd(0.2)})
    between = {"lr_min": 1e-4, "lr_max": 1e-2}
    whole = search(**between).losses
    both = search(tx=tx, name="**.learning_rate", **between)
    np.testing.assert_allclose(both.losses, whole, rtol=1e-6)
    one = search(tx=tx, name="partition.0.**.learning_rate", **between)
    assert not np.allclose(one.losses, whole, rtol=1e-3)
    # A head that is trained alone has the losses of no other run.
    head = search(trainable=sl.where.path("layers.1.**"), **between)
    np.testing.assert_allclose(head.losses[0], whole[0], rtol=1e-6)
    assert head.losses[-1] != whole[-1]

    def loss_fn(model, x, y):
        return mean_square(model, x, y), jnp.ones(()), x

    plain = search(lr_max=1e-2)
    divided = {"microbatches": 2, "batch_args": ("x", "y")}
    rich = search(loss_fn, lr_max=1e-2, has_aux=True, has_weight=True, **divided)
    np.testing.assert_allclose(rich.losses, plain.losses, rtol=1e-5)

    def loss_fn(model, state, x):
        return jnp.sum((model - x) ** 2) + 0.1 * state, state + 1

    start = {"model": jnp.zeros(()), "model_state": jnp.zeros(())}
    found = search(loss_fn, batches=[(jnp.ones(()),)], lr_min=1e-8, lr_max=2e-8, **start)
    np.testing.assert_allclose(found.losses, 1 + 0.1 * np.arange(10), rtol=1e-5)


def test_the_suggestion_is_where_the_loss_falls_fastest_before_its_minimum():
    steps = np.linspace(-1, 1, 101)
    falling = 1 / (1 + np.exp(20 * (steps - 0.2)))  # steepest at step 60
    found = result(falling)
    assert found.suggestion == found.learning_rates[60]
    noisy = result(falling + 0.01 * np.random.default_rng(0).normal(size=101))
    assert 56 <= np.searchsorted(noisy.learning_rates, noisy.suggestion) <= 64

    falling = [np.ones(40), np.linspace(1, 0, 20)]
    later = result(np.concatenate([*falling, np.linspace(0, 9, 20), np.linspace(9, 2, 21)]))
    infinite = result(np.concatenate([*falling, [5.0, np.inf]]), diverged=True)
    for found in (later, infinite):
        assert found.learning_rates[40] <= found.suggestion <= found.learning_rates[60]
    assert np.isnan(infinite.smoothed[-1])
    assert "diverged, suggestion" in repr(infinite)

    for losses in (np.linspace(1, 2, 50), np.ones(50), np.full(50, np.nan)):
        found = result(losses)
        assert found.suggestion is None, losses
        assert "no suggestion" in repr(found), losses


@pytest.mark.slow
def test_a_run_finds_a_learning_rate_that_works():
    found = search(tx=sl.adam(0.1), steps=60)
    step, tx = sl.train_step(mean_square), sl.adam(found.suggestion)
    _, _, loss = after_training(step, tx, 20, mlp(), *BATCHES[0])
    assert loss < 0.2 * mean_square(mlp(), *BATCHES[0])


def test_the_plot_shows_losses_and_suggestion():
    pytest.importorskip("matplotlib")
    found = result([*np.ones(40), *np.linspace(1, 0, 20), 500.0, np.inf], diverged=True)
    (axes,) = found.plot().axes
    each, smoothed, suggestion = axes.lines
    np.testing.assert_array_equal(each.get_xdata(), found.learning_rates)
    np.testing.assert_array_equal(each.get_ydata(), found.losses)
    np.testing.assert_array_equal(smoothed.get_ydata(), found.smoothed)
    assert set(suggestion.get_xdata()) == {found.suggestion}
    assert axes.get_xscale() == "log"
    assert axes.get_ylim()[1] < 2  # the last losses do not flatten the others
    result(np.full(12, np.nan), diverged=True).plot()


def sweep(**options):
    """Ten steps in chunks of one run."""
    grid = {"learning_rate": [0.1, 0.2]}
    sl.sweep(mean_square, sl.sgd(0.1), mlp(), BATCHES, grid, steps=5, chunk=1, **options)


@pytest.mark.parametrize("tool", [functools.partial(search, lr_max=1e-3), sweep])
def test_a_progress_bar_on_demand_and_in_a_terminal(tool, capsys, monkeypatch):
    pytest.importorskip("tqdm")

    def said(**options):
        tool(**options)
        return capsys.readouterr().err

    assert said() == ""
    assert "10/10" in said(progress=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "10/10" in said()
    assert said(progress=False) == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert "10/10" not in said()
    with pytest.raises(ImportError, match=r"`progress=True` needs tqdm: pip install tqdm\."):
        said(progress=True)
