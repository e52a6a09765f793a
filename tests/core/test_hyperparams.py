"""Hyperparameters: read, changed, scheduled, swept and differentiated without compiling anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_close, assert_same_bits, slow_except

B = sl.where.path("b")


def params(dtype=jnp.float32):
    return {"b": jnp.array([1.0, -2.0], dtype), "w": jnp.array([[2.0, -3.0]], dtype)}


def grads(step=0):
    return jax.tree.map(lambda p: 0.5 * p + 0.25 * (1 + step), params())


def trained(opt, steps=5, model=None):
    model = params() if model is None else model
    for n in range(steps):
        model, opt = opt.step(model, grads(n))
    return model, opt


DEEP = sl.ClipByGlobalNorm(2.0) | sl.adamw(1e-2, weight_decay=0.1, decay_where=~B).partition(
    {B: sl.sgd(1e-3, momentum=0.8).every_k(2)}, names=("bias",)
).every_k(2)


def test_full_paths_and_whole_segments_of_them_reach_everywhere():
    found = sl.Optimizer(DEEP, params()).hyperparams
    # The order is that of the links, groups in the order they were given, the rest last.
    assert {path: pytest.approx(float(value), rel=1e-6) for path, value in found.items()} == {
        "clip_by_global_norm.max_norm": 2.0,
        "every_k.k": 2.0,
        "every_k.partition.bias.every_k.k": 2.0,
        "every_k.partition.bias.every_k.trace.decay": 0.8,
        "every_k.partition.bias.every_k.scale_by_learning_rate.learning_rate": 1e-3,
        "every_k.partition.rest.scale_by_adam.b1": 0.9,
        "every_k.partition.rest.scale_by_adam.b2": 0.999,
        "every_k.partition.rest.scale_by_adam.eps": 1e-8,
        "every_k.partition.rest.scale_by_adam.eps_root": 0.0,
        "every_k.partition.rest.mask.add_decayed_weights.weight_decay": 0.1,
        "every_k.partition.rest.scale_by_learning_rate.learning_rate": 1e-2,
    }

    found = sl.Optimizer(DEEP, params()).hyperparams
    for suffix, value in {
        "max_norm": 2.0,
        "b2": 0.999,
        "scale_by_adam.b1": 0.9,
        "weight_decay": 0.1,
        "rest.scale_by_learning_rate.learning_rate": 1e-2,
        "trace.decay": 0.8,
    }.items():
        assert float(found[suffix]) == pytest.approx(value, rel=1e-6)
    for suffix in ("y_k.b1", "earning_rate", "2", ""):
        with pytest.raises(KeyError, match="Candidates"):
            found[suffix]
    # An ambiguous key never fails silently.
    for read in (found.__getitem__, found.__contains__, found.get):
        with pytest.raises(KeyError, match=r"'learning_rate' is ambiguous. Candidates: 'every_k"):
            read("learning_rate")


def test_hyperparams_are_a_mapping_of_what_the_next_step_uses():
    found = sl.Optimizer(sl.sgd(0.1, momentum=0.9), params()).hyperparams
    assert len(found) == 2
    assert list(found) == ["trace.decay", "scale_by_learning_rate.learning_rate"]
    assert dict(found).keys() == set(found)
    assert repr(found) == "{'trace.decay': 0.9, 'scale_by_learning_rate.learning_rate': 0.1}"
    assert "decay" in found
    assert "rate" not in found
    assert 3 not in found
    assert found.get("decay") == found["decay"]
    assert found.get("rate") is None
    assert found.get("rate", 3) == 3
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(found)]
    assert [path[0].key for path in paths] == list(found)
    nothing = jax.tree.map(lambda _: None, found)
    assert "decay" in nothing
    assert nothing.get("decay", 3) is None

    schedule = sl.schedules.linear(1.0, 0.0, 10)
    tx = sl.sgd(schedule).partition({B: sl.sgd(schedule).every_k(2)})
    model, opt = params(), sl.Optimizer(tx, params())
    path = "partition.{}.scale_by_learning_rate.learning_rate"
    for n in range(6):
        outer, inner = (opt.hyperparams[path.format(at)] for at in ("rest", "0.every_k"))
        before = model
        model, opt = opt.step(model, jax.tree.map(jnp.ones_like, model))
        # Two mini-steps to one step of the inner clock.
        assert (outer, inner) == (schedule(n), schedule(n // 2))
        np.testing.assert_allclose(before["w"] - model["w"], outer, rtol=1e-5)
        np.testing.assert_allclose(before["b"] - model["b"], n % 2 * inner, rtol=1e-5)


def test_numbers_are_set_by_suffix_path_glob_and_function_as_the_old_kind():
    opt = sl.Optimizer(DEEP, params())
    opt = opt.with_hyperparams(max_norm=5, b1=lambda b1: b1 / 2)
    opt = opt.with_hyperparams({"every_k.partition.rest.scale_by_adam.b2": 0.5})
    opt = opt.with_hyperparams({"**.learning_rate": lambda rate: rate * 10})
    opt = opt.with_hyperparams({"**.mask.**": 0.25, "trace.decay": 0.5})
    values = [round(float(value), 6) for value in opt.hyperparams.values()]
    assert values == [5.0, 2.0, 2.0, 0.5, 0.01, 0.45, 0.5, 0.0, 0.0, 0.25, 0.1]
    # A number may come where there was none.
    opt = sl.Optimizer(sl.sgd(0.1).average(), params()).with_hyperparams(decay=0.5)
    assert opt.hyperparams["decay"] == 0.5

    opt = sl.Optimizer(sl.adam(0.1), params())
    numpy = (np.float16(1), np.float32(1), np.float64(1), np.int64(1), np.array(1.0))
    jax_numbers = (jnp.array(1.0), jnp.array(1.0, jnp.bfloat16), jnp.array(1))
    for value in (1, 1.0, *numpy, *jax_numbers):
        new = opt.with_hyperparams(learning_rate=value)
        leaf = new.hyperparams["learning_rate"]
        found = (leaf.dtype, leaf.weak_type, leaf.shape, float(leaf))
        assert found == (jnp.float32, False, (), 1.0), repr(value)
        assert jax.tree.structure(new) == jax.tree.structure(opt)
    assert opt.hyperparams["learning_rate"] == np.float32(0.1)

    rate = jnp.array(0.5)
    opt = sl.Optimizer(sl.adam(0.1).partition({B: sl.sgd(0.1)}), params())
    opt = opt.with_hyperparams({"**.learning_rate": rate})
    buffers = [x.unsafe_buffer_pointer() for x in (rate, *opt.hyperparams.values())]
    assert len(set(buffers)) == len(buffers)


def test_several_runs_have_a_number_each_also_of_schedules():
    opt = jax.vmap(lambda rate: sl.Optimizer(sl.sgd(rate, momentum=0.9), params()))(jnp.ones(3))
    opt = opt.with_hyperparams(learning_rate=jnp.array([0.1, 0.2, 0.3]), decay=0.5)
    opt = opt.with_hyperparams(learning_rate=lambda rate: rate / 2)
    np.testing.assert_allclose(opt.hyperparams["learning_rate"], [0.05, 0.1, 0.15], rtol=1e-6)
    np.testing.assert_array_equal(opt.hyperparams["decay"], [0.5] * 3)
    with pytest.raises(ValueError, match=r"trace.decay must be in \[0, 1\], got 2.0"):
        opt.with_hyperparams(decay=jnp.array([0.1, 2.0, 0.1]))
    with pytest.raises(ValueError, match=r"got an array of shape \(2,\)"):
        opt.with_hyperparams(decay=jnp.ones(2))
    for call in (
        lambda: opt.step(params(), params()),
        lambda: opt.reset(params()),
        lambda: opt.rebind(params()),
        # Before the loss is traced, which would stumble over the axis of the runs.
        lambda: sl.train_step(lambda model: 1 / 0)(params(), opt),
        lambda: sl.minimize(lambda model: 1 / 0, opt, params(), max_steps=1),
    ):
        with pytest.raises(ValueError, match="created under `vmap` and holds 3 runs"):
            call()

    opt = jax.vmap(lambda _: sl.Optimizer(sl.sgd(1.0), params()))(jnp.ones(2))
    opt = opt.with_hyperparams(learning_rate=sl.schedules.linear(1.0, 0.0, 2))
    opt = opt.with_hyperparams({"learning_rate.init_value": jnp.array([1.0, 2.0])})
    _, opt = jax.vmap(lambda opt: opt.step(params(), params()))(opt)
    np.testing.assert_allclose(opt.hyperparams["learning_rate"], [0.5, 1.0])
    rows = opt.describe(jax.vmap(params, axis_size=2)()).to_dict().values()
    assert all(row["learning_rate"].shape == (2,) for row in rows)
    opt = opt.with_hyperparams(learning_rate=jnp.array([0.1, 0.2]), replace_schedules=True)
    np.testing.assert_allclose(opt.hyperparams["learning_rate"], [0.1, 0.2])


def test_numbers_and_schedules_are_replaced_as_if_bound_with_them():
    opt = sl.Optimizer(sl.adamw(0.1, weight_decay=0.1), params())
    changed = opt.with_hyperparams(learning_rate=0.01, weight_decay=0.2)
    fresh = sl.Optimizer(sl.adamw(0.01, weight_decay=0.2), params())
    model, after = trained(changed)
    assert_same_bits((model, after), trained(fresh))
    again = after.with_hyperparams(learning_rate=0.2)
    assert_same_bits((again.state, again.count), (after.state, after.count))

    linear, other = sl.schedules.linear(0.1, 0.0, 10), sl.schedules.linear(0.5, 0.0, 10)
    opt = sl.Optimizer(sl.sgd(linear), params())
    with pytest.raises(ValueError, match="replace_schedules=True"):
        opt.with_hyperparams(learning_rate=0.5)
    number = opt.with_hyperparams(learning_rate=0.5, replace_schedules=True)
    assert_same_bits(trained(number), trained(sl.Optimizer(sl.sgd(0.5), params())))
    # A schedule takes the place of a schedule or of a number.
    expected = trained(sl.Optimizer(sl.sgd(other), params()))
    for old in (opt, number):
        assert_same_bits(trained(old.with_hyperparams(learning_rate=other)), expected)

    opt = sl.Optimizer(sl.sgd(sl.schedules.linear(0.1, 0.0, 10)), params())
    new = opt.with_hyperparams({"learning_rate.init_value": 0.5, "transition_steps": 5})
    fresh = sl.Optimizer(sl.sgd(sl.schedules.linear(0.5, 0.0, 5)), params())
    assert_same_bits(trained(new), trained(fresh))


EVERYTHING = (
    sl.named_chain(clip=sl.ClipByGlobalNorm(1))
    | sl.adamw(sl.schedules.linear(1e-2, 0, 10), weight_decay=1, decay_where=B).every_k(
        lambda n: 1 + n
    )
    | sl.Scale(np.float32(1)).partition({B: sl.ScaleByRms(bias_correction=True)})
)


@pytest.mark.slow
def test_arrays_are_strong_copied_and_keep_their_dtype():
    opt = sl.Optimizer(EVERYTHING, params())
    for each in (opt, trained(opt, 1)[1]):
        leaves = jax.tree.leaves(each)
        assert len(leaves) > 15
        for leaf in leaves:
            assert isinstance(leaf, jax.Array)
            assert not leaf.weak_type
            assert leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_)

    rate = jnp.array(0.1, jnp.bfloat16)
    opt = sl.Optimizer(sl.adam(rate), params())
    assert opt.hyperparams["learning_rate"].dtype == jnp.bfloat16
    (held,) = (x for x in jax.tree.leaves(opt) if x.dtype == jnp.bfloat16)
    assert held.unsafe_buffer_pointer() != rate.unsafe_buffer_pointer()
    assert {v.dtype for k, v in opt.hyperparams.items() if "adam" in k} == {np.dtype("float32")}
    rate = np.array(0.1, np.float32)
    opt = sl.Optimizer(sl.sgd(rate), params())
    rate[()] = 7
    assert opt.hyperparams["learning_rate"] == np.float32(0.1)
    # An integer array is a real number.
    for one in (np.array(1), jnp.array(1)):
        opt = sl.Optimizer(sl.sgd(one), params()).with_hyperparams(learning_rate=0.5)
        assert opt.hyperparams["learning_rate"] == 0.5

    # bfloat16(0.999) is 1, which would divide by zero.
    opt = sl.Optimizer(sl.adam(0.1, b2=jnp.array(0.99, jnp.bfloat16)), params())
    float32 = sl.Optimizer(sl.adam(0.1, b2=float(jnp.bfloat16(0.99))), params())
    assert_close(trained(opt)[0], trained(float32)[0], rtol=1e-6)


def test_numbers_are_float64_under_x64(x64):
    opt = sl.Optimizer(sl.adam(0.1), {"w": jnp.ones(2)})
    assert {leaf.dtype for leaf in opt.hyperparams.values()} == {np.dtype("float64")}
    assert opt.count.dtype == jnp.int32
    assert opt.hyperparams["learning_rate"] == 0.1


@pytest.mark.parametrize("dtype", slow_except([jnp.bfloat16, "float16", jnp.float32], "float16"))
def test_hyperparam_dtype_casts_all(dtype):
    # The default b2 is 1 in bfloat16, and the default eps 0 in float16, which is refused.
    rule = sl.adam(jnp.array(0.1, jnp.float32), b2=0.99, eps=1e-6)
    tx = rule | sl.Scale(sl.schedules.linear(1.0, 0.5, 10))
    opt = sl.Optimizer(tx, params(), hyperparam_dtype=dtype)
    floats = {x.dtype for x in jax.tree.leaves(opt.transform)}
    floats = {dtype for dtype in floats if jnp.issubdtype(dtype, jnp.floating)}
    assert floats == {np.dtype(dtype)}
    model, opt = opt.step(params(), grads())
    assert {p.dtype for p in jax.tree.leaves(model)} == {np.dtype("float32")}
