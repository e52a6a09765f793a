"""The best model of a run, against a loop in Python."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slalom as sl
from helpers import assert_same_bits, mean_square, mlp

VALUES = [np.nan, 0.9, np.inf, 0.5, 0.5, -np.inf, 0.7, np.nan, 0.4, 0.6]


def ramp(x):
    return jnp.maximum(x, 0)


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

    model = eqx.nn.Linear(2, 1, key=jax.random.key(0)), ramp
    best = sl.KeepBest(model, patience=3).update(model, 0.5).update(model, 0.7)
    # Its file is that of any tree.
    eqx.tree_serialise_leaves(tmp_path / "best.eqx", best)
    read = eqx.tree_deserialise_leaves(tmp_path / "best.eqx", sl.KeepBest(model, patience=3))
    for again in (copy.deepcopy(best), pickle.loads(pickle.dumps(best)), read):
        assert eqx.tree_equal(again, best)
    assert repr(best) == "KeepBest(patience=3, value=0.5, stale=1, stop=False)"


def test_each_run_of_a_vmap_keeps_its_own_by_a_conditional_compiled_once():
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


def test_states_of_layers_are_kept_and_shardings_stay():
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
