"""Accumulation over mini-steps: its numbers, its clock, its weights, and where it may stand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_same_bits,
    assert_same_path,
    distance,
    gradients,
    mean_square,
    mlp,
    nested_dict,
    optax_trajectory,
    slalom_trajectory,
    slow_except,
)

WEIGHT = sl.where.path("dense.weight")


def rows_of(history, rows):
    return jax.tree.map(lambda x: x[rows], history)


def windows(grads, k, reduce=jnp.mean):
    """The stacked gradients of `k` mini-steps each, reduced."""
    return jax.tree.map(lambda x: reduce(x.reshape(-1, k, *x.shape[1:]), axis=1), grads)


def emissions(history, k):
    """The parameters at the end of each window."""
    return jax.tree.map(lambda x: x[k - 1 :: k], history)


# --- against others -------------------------------------------------------------------------

INNER = {
    "adamw": (sl.adamw(0.05, weight_decay=0.1), optax.adamw(0.05, weight_decay=0.1)),
    "sgd": (sl.sgd(0.1, 0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True)),
}


@pytest.mark.parametrize(
    ("inner", "mean"),
    [
        ("adamw", True),
        pytest.param("adamw", False, marks=pytest.mark.slow),
        pytest.param("sgd", True, marks=pytest.mark.slow),
        pytest.param("sgd", False, marks=pytest.mark.slow),
    ],
)
def test_same_path_as_optax(inner, mean):
    ours, theirs = INNER[inner]
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 23)
    path, _ = slalom_trajectory(ours.every_k(4, mean=mean), params, grads)
    exact, _ = optax_trajectory(optax.MultiSteps(theirs, 4, use_grad_mean=mean), params, grads)
    assert_same_path(path, exact, params, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [True, False])
def test_same_path_as_optax_in_double_precision(mean, x64):
    ours, theirs = INNER["adamw"]
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 23)
    path, _ = slalom_trajectory(ours.every_k(4, mean=mean), params, grads)
    reference = optax.MultiSteps(theirs, 4, use_grad_mean=mean, accumulator_dtype=jnp.float64)
    exact, _ = optax_trajectory(reference, params, grads)
    for a, b in zip(jax.tree.leaves(path), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("mean", "reduce"),
    [(True, jnp.mean), pytest.param(False, jnp.sum, marks=pytest.mark.slow)],
)
def test_same_path_as_the_inner_transform_on_whole_windows(mean, reduce):
    tx = sl.adam(sl.schedules.linear(0.1, 0.01, 5))
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 24)
    path, _ = slalom_trajectory(tx.every_k(3, mean=mean), params, grads)
    exact, _ = slalom_trajectory(tx, params, windows(grads, 3, reduce))
    assert_same_path(emissions(path, 3), exact, params, 2e-5)
    # In between the parameters keep every bit.
    for offset in (0, 1):
        held = jax.tree.map(lambda x, o=offset: x[3 + o :: 3], path)
        before = jax.tree.map(lambda x: x[2:-1:3], path)
        assert_same_bits(held, before)
    assert_same_bits(
        rows_of(path, slice(0, 2)),
        jax.tree.map(lambda x: jnp.stack([x, x]), params),
    )


def test_windows_of_one_are_the_inner_transform():
    params = jnp.ones(3)
    grads = gradients(params, 10)
    path, _ = slalom_trajectory(sl.adam(0.1).every_k(1), params, grads)
    exact, _ = slalom_trajectory(sl.adam(0.1), params, grads)
    assert_same_path(path, exact, params, 1e-6)


@pytest.mark.slow
def test_update_holds_zeros_and_then_the_update():
    params = {"a": jnp.ones(3), "b": jnp.ones(())}
    grads = gradients(params, 6)
    tx = sl.adam(0.1).every_k(3)
    opt = stepped = sl.Optimizer(tx, params)
    model = params
    for n in range(6):
        g = rows_of(grads, n)
        updates, opt = opt.update(params, g)
        zero = all(np.all(u == 0) for u in jax.tree.leaves(updates))
        assert zero == (n % 3 != 2)
        assert bool(opt.has_updated) == (n % 3 == 2)
        if n < 3:  # from the same parameters, so that both ways of one step can be compared
            model, stepped = stepped.step(model, g)
            assert distance(model, sl.apply_updates(params, updates)) <= 1e-7


# --- weights and values ---------------------------------------------------------------------


@pytest.mark.slow
def test_unequal_micro_batches_equal_the_full_batch():
    # Gradients of means over 1, 5 and 2 examples, weighted by how many they are.
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((8, 3)), jnp.float32)
    y = jnp.asarray(random.standard_normal(8), jnp.float32)

    def loss(w, x, y):
        return jnp.mean(jnp.square(x @ w - y))

    w = jnp.zeros(3)
    tx = sl.adam(0.1)
    exact, _ = sl.Optimizer(tx, w).step(w, jax.grad(loss)(w, x, y))
    opt, w_split = sl.Optimizer(tx.every_k(3), w), w
    for begin, end in ((0, 1), (1, 6), (6, 8)):
        part = x[begin:end], y[begin:end]
        w_split, opt = opt.step(w_split, jax.grad(loss)(w, *part), weight=end - begin)
    np.testing.assert_allclose(w_split, exact, rtol=1e-5)


def weighted(mean, weights, k, seed=1):
    """The accumulated gradient at the end of each window, from `sgd(-1)`, and by hand."""
    grads = gradients(jnp.zeros(4), len(weights), seed)
    tx = sl.Scale(-1.0).every_k(k, mean=mean)
    opt = sl.Optimizer(tx, jnp.zeros(4))

    def body(opt, given):
        updates, opt = opt.update(jnp.zeros(4), given[0], weight=given[1])
        return opt, -updates

    weights = jnp.asarray(weights, jnp.float32)
    _, out = jax.lax.scan(body, opt, (grads, weights))
    sums = jnp.sum((grads * weights[:, None]).reshape(-1, k, 4), 1)
    totals = jnp.sum(weights.reshape(-1, k), 1)[:, None]
    return out[k - 1 :: k], sums / totals if mean else sums


@pytest.mark.parametrize("mean", slow_except([True, False], True))
def test_weights_over_several_windows(mean):
    ours, exact = weighted(mean, [1, 2, 3, 0.5, 0.25, 7, 1, 0, 3, 0, 2, 1, 0, 0, 5], 3)
    np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6)


def test_only_ratios_of_weights_count_in_a_mean():
    ours, _ = weighted(True, [1, 2, 3], 3)
    scaled, _ = weighted(True, [1e-3, 2e-3, 3e-3], 3)
    np.testing.assert_allclose(ours, scaled, rtol=1e-5)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("where", slow_except([0, 1, 2], 1))
def test_a_mini_batch_of_weight_zero_leaves_no_trace(where, mean):
    # Padding: whatever stands in it, NaN included, in its gradient and in its loss.
    k = 3
    grads = np.array([[1.0, -2.0], [3.0, 5.0], [7.0, -11.0]], np.float32)
    values = np.array([1.0, 2.0, 4.0], np.float32)
    weights = np.array([1.0, 3.0, 2.0], np.float32)
    grads[where], values[where], weights[where] = np.nan, np.nan, 0.0
    opt = sl.Optimizer((Recorder() | sl.Scale(-1.0)).every_k(k, mean=mean), jnp.zeros(2))
    for g, v, w in zip(grads, values, weights, strict=True):
        updates, opt = opt.update(jnp.zeros(2), jnp.asarray(g), value=v, weight=w)
    kept = np.arange(3) != where
    total = weights[kept].sum()
    exact = (weights[kept, None] * grads[kept]).sum(0) / (total if mean else 1)
    np.testing.assert_allclose(-updates, exact, rtol=1e-6)
    seen = opt.state_of(Recorder)
    np.testing.assert_allclose(seen.value, (weights[kept] * values[kept]).sum() / total, rtol=1e-6)
    np.testing.assert_allclose(seen.weight, total if mean else 1, rtol=1e-6)


def test_a_window_of_weight_zero_is_a_step_on_zeros():
    opt = sl.Optimizer(sl.Scale(-1.0).every_k(2), jnp.zeros(2))
    for _ in range(2):
        updates, opt = opt.update(jnp.zeros(2), jnp.full(2, jnp.nan), weight=0.0)
    np.testing.assert_array_equal(updates, np.zeros(2))
    assert bool(opt.has_updated)
    # The window after it does not know of it.
    for _ in range(2):
        updates, opt = opt.update(jnp.zeros(2), jnp.ones(2), weight=2.0)
    np.testing.assert_array_equal(updates, -np.ones(2))


class Seen(eqx.Module):
    """What a `Recorder` saw in its last step."""

    value: jax.Array
    weight: jax.Array
    step: jax.Array
    calls: jax.Array


class Recorder(sl.AbstractTransform):
    """Passes updates on, and notes what it was told."""

    def init(self, params):
        zero = jnp.zeros((), jnp.float32)
        return Seen(zero, zero, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(self, updates, state, params=None, context=None):
        value = jnp.float32(-1) if context.value is None else context.value
        weight = jnp.float32(-1) if context.weight is None else context.weight
        return updates, Seen(value, weight, context.step, state.calls + 1)


def record(tx, model, grads, **known):
    """What the `Recorder` inside `tx` had seen after each step."""

    def body(opt, given):
        g, known = given
        _, opt = opt.update(model, g, **known)
        return opt, opt.state_of(Recorder)

    return jax.lax.scan(body, sl.Optimizer(tx, model), (grads, known))[1]


def test_the_inner_transform_sees_the_mean_value_and_the_total_weight():
    value = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], np.float32)
    weight = np.array([1.0, 1.0, 2.0, 3.0, 0.5, 0.5], np.float32)
    tx = (Recorder() | sl.sgd(0.1)).every_k(3)
    known = {"value": jnp.asarray(value), "weight": jnp.asarray(weight)}
    seen = record(tx, jnp.zeros(2), jnp.ones((6, 2)), **known)
    np.testing.assert_array_equal(seen.calls, [0, 0, 1, 1, 1, 2])
    np.testing.assert_array_equal(seen.step, [0, 0, 0, 0, 0, 1])
    np.testing.assert_allclose(seen.weight[2::3], [4.0, 4.0])
    np.testing.assert_allclose(seen.value[2::3], [11 / 4, 48 / 4], rtol=1e-6)


def test_without_weights_mini_batches_count_one_each_and_no_value_stays_none():
    seen = record((Recorder() | sl.sgd(0.1)).every_k(3), jnp.zeros(2), jnp.ones((3, 2)))
    assert float(seen.weight[-1]) == 3.0
    assert float(seen.value[-1]) == -1.0


NESTED = {
    "last in a chain": lambda tx: sl.ClipByGlobalNorm(9.0) | tx.every_k(3),
    "within a chain": lambda tx: (sl.Clip(9.0) | tx).every_k(3) | sl.Scale(0.5),
    "in a mask": lambda tx: tx.every_k(3).mask(sl.where.everything()) | sl.Scale(0.5),
    "in a group": lambda tx: sl.sgd(0.1).partition({sl.where.everything(): tx.every_k(3)}),
}


@pytest.mark.parametrize("name", slow_except(NESTED, "within a chain", "in a group"))
def test_the_context_reaches_the_inner_transform_wherever_it_stands(name):
    # optax drops `value` on the way through a chain.
    value = np.array([1.0, 2.0, 6.0], np.float32)
    known = {"value": jnp.asarray(value), "weight": jnp.ones(3)}
    seen = record(NESTED[name](Recorder() | sl.sgd(0.1)), jnp.zeros(2), jnp.ones((3, 2)), **known)
    assert float(seen.value[-1]) == 3.0
    assert float(seen.weight[-1]) == 3.0
    assert int(seen.calls[-1]) == 1


# --- windows --------------------------------------------------------------------------------


def updated_at(tx, n):
    """In which of `n` steps something was written."""

    def body(opt, g):
        _, opt = opt.update(jnp.zeros(2), g)
        return opt, opt.has_updated

    opt = sl.Optimizer(tx, jnp.zeros(2))
    assert not opt.has_updated
    return np.flatnonzero(jax.lax.scan(body, opt, jnp.ones((n, 2)))[1]).tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'every_k' returns zeros")
def test_has_updated_says_whether_anything_was_written():
    assert updated_at(sl.adam(0.1), 3) == [0, 1, 2]
    assert updated_at(sl.adam(0.1).every_k(4), 12) == [3, 7, 11]
    assert updated_at(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1).every_k(2), 4) == [1, 3]
    assert updated_at(sl.Identity().every_k(2) | sl.sgd(0.1), 4) == [1, 3]
    # Adam's momentum writes also where zeros come in.
    assert updated_at(sl.Identity().every_k(2) | sl.adam(0.1), 4) == [0, 1, 2, 3]
    assert updated_at(sl.adam(0.1).every_k(2).every_k(3), 12) == [5, 11]


def test_a_scheduled_k_is_sampled_at_the_start_of_each_window():
    tx = sl.sgd(0.1).every_k(lambda window: jnp.where(window < 3, window + 1, 4))
    assert updated_at(tx, 14) == [0, 2, 5, 9, 13]


def test_a_scheduled_k_is_rounded_and_at_least_one():
    assert updated_at(sl.sgd(0.1).every_k(sl.schedules.linear(0.0, 2.6, 2)), 8) == [0, 1, 4, 7]


@pytest.mark.slow
@pytest.mark.parametrize("mean", [True, False])
def test_a_scheduled_k_walks_as_optax_does(mean):
    ours, theirs = INNER["adamw"]
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 12)
    ks = jnp.array([1, 2, 3, 3, 3])
    path, _ = slalom_trajectory(ours.every_k(lambda n: ks[n], mean=mean), params, grads)
    reference = optax.MultiSteps(theirs, lambda n: ks[n], use_grad_mean=mean)
    exact, _ = optax_trajectory(reference, params, grads)
    assert_same_path(path, exact, params, 2e-5)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("where", slow_except([0, 1, 2], 1))
def test_a_mini_batch_with_nan_ends_with_its_window(where, mean):
    grads = np.ones((9, 2), np.float32)
    grads[3 + where, 0] = np.nan
    opt = sl.Optimizer(sl.Scale(-1.0).every_k(3, mean=mean), jnp.zeros(2))
    value = jnp.asarray(grads[:, 0])

    def body(opt, given):
        updates, opt = opt.update(jnp.zeros(2), given[0], value=given[1])
        return opt, (-updates, opt.state.value)

    _, (out, values) = jax.lax.scan(body, opt, (jnp.asarray(grads), value))
    one = 1.0 if mean else 3.0
    np.testing.assert_allclose(out[2::3], [[one, one], [np.nan, one], [one, one]], rtol=1e-6)
    np.testing.assert_allclose(values[2::3], [1.0, np.nan, 1.0])


def test_a_schedule_inside_sees_emitted_updates():
    tx = sl.sgd(sl.schedules.linear(1.0, 0.0, 4)).every_k(2)
    path, opt = slalom_trajectory(tx, jnp.zeros(2), jnp.ones((8, 2)))
    moves = -np.diff(np.asarray(path)[:, 0], prepend=0.0)
    np.testing.assert_allclose(moves, [0, 1, 0, 0.75, 0, 0.5, 0, 0.25], atol=1e-6)
    assert int(opt.count) == 8
    assert int(opt.state.count) == 4


def test_hyperparams_inside_show_what_the_next_emitted_update_uses():
    rate = sl.schedules.linear(1.0, 0.0, 4)
    opt = sl.Optimizer(sl.ScaleBySchedule(rate) | sl.sgd(rate).every_k(3), jnp.zeros(2))
    inside, outside = [], []
    for _ in range(7):
        inside.append(float(opt.hyperparams["every_k.scale_by_learning_rate.learning_rate"]))
        outside.append(float(opt.hyperparams["step_size"]))
        _, opt = opt.update(jnp.zeros(2), jnp.ones(2))
    assert inside == [1, 1, 1, 0.75, 0.75, 0.75, 0.5]
    assert outside == [1, 0.75, 0.5, 0.25, 0, 0, 0]


# --- dtypes ---------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("grads_dtype", DTYPES)
@pytest.mark.parametrize("params_dtype", slow_except(DTYPES, "bfloat16"))
def test_half_precision_accumulates_in_float32(params_dtype, grads_dtype):
    # 1 + 63·2⁻¹²: in bfloat16 or float16 each of the small ones would be lost.
    grads = np.full((64, 2), 2**-12, np.float32)
    grads[0] = 1.0
    params = jnp.zeros(2, params_dtype)
    opt = sl.Optimizer(sl.Scale(-1.0).every_k(64, mean=False), params)
    assert opt.state.accumulated.dtype == jnp.float32

    def body(opt, g):
        return opt.update(params, g)[1], None

    opt, _ = jax.lax.scan(body, opt, jnp.asarray(grads, grads_dtype))
    np.testing.assert_array_equal(opt.state.accumulated, np.float32(1 + 63 * 2**-12))
    assert bool(opt.has_updated)


@pytest.mark.parametrize("grads_dtype", slow_except(DTYPES, "float32"))
@pytest.mark.parametrize("params_dtype", slow_except(DTYPES, "bfloat16"))
def test_parameters_keep_their_dtype(params_dtype, grads_dtype):
    params = jnp.array([1.0, -2.0, 3.0], params_dtype)
    grads = gradients(params, 6, dtype=jnp.dtype(grads_dtype))
    path, _ = slalom_trajectory(sl.adam(0.1).every_k(3), params, grads)
    assert path.dtype == params.dtype
    wide = params.astype(jnp.float32), grads.astype(jnp.float32)
    exact, _ = slalom_trajectory(sl.adam(0.1).every_k(3), *wide)
    # Two roundings of parameters below 4 in magnitude.
    allowed = 8 * float(jnp.finfo(params_dtype).eps)
    assert distance(path, exact) <= max(allowed, 1e-6)


@pytest.mark.slow
def test_accumulator_dtype_as_asked_for(x64):
    params = {"wide": jnp.zeros(2, jnp.float64), "half": jnp.zeros(2, jnp.bfloat16)}

    def dtypes(**options):
        opt = sl.Optimizer(sl.sgd(0.1).every_k(2, **options), params)
        _, opt = opt.step(params, params)
        return {name: str(a.dtype) for name, a in opt.state.accumulated.items()}

    assert dtypes() == {"wide": "float64", "half": "float32"}
    assert dtypes(accumulator_dtype=jnp.float32) == {"wide": "float32", "half": "float32"}
    assert dtypes(accumulator_dtype="bfloat16") == {"wide": "bfloat16", "half": "bfloat16"}


def test_accumulator_dtype_rounds_what_is_stored():
    tx = sl.Scale(-1.0).every_k(2, mean=False, accumulator_dtype="bfloat16")
    zero = jnp.zeros(())
    _, opt = sl.Optimizer(tx, zero).update(zero, jnp.float32(1.0))
    updates, _ = opt.update(zero, jnp.float32(2**-10))
    assert float(updates) == -1.0


def test_complex_parameters():
    grads = gradients(jnp.zeros(3, jnp.complex64), 4)
    path, _ = slalom_trajectory(sl.sgd(0.5).every_k(2), jnp.zeros(3, jnp.complex64), grads)
    exact = -0.5 * np.cumsum(np.asarray(windows(grads, 2)), axis=0)
    np.testing.assert_allclose(path[1::2], exact, rtol=1e-5, atol=1e-6)


# --- where it may stand ---------------------------------------------------------------------


@pytest.mark.slow
def test_every_k_inside_a_partition_gives_each_group_its_own_window():
    # Each group at its own pace.
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 12)
    tx = sl.adam(0.1).every_k(3).partition({WEIGHT: sl.sgd(0.1).every_k(2)}, names=("weight",))
    path, opt = slalom_trajectory(tx, params, grads)
    thirds, _ = slalom_trajectory(sl.adam(0.1).every_k(3), params, grads)
    halves, _ = slalom_trajectory(sl.sgd(0.1).every_k(2), params, grads)
    assert distance(path["dense"]["weight"], halves["dense"]["weight"]) <= 1e-6
    assert distance(path["dense"]["bias"], thirds["dense"]["bias"]) <= 1e-6
    assert distance(path["scales"], thirds["scales"]) <= 1e-6
    assert int(opt.state_of("partition.rest.every_k").count) == 4
    assert int(opt.state_of("partition.weight.every_k").count) == 6


@pytest.mark.slow
def test_has_updated_of_a_partition_is_that_of_any_group():
    tx = sl.partition({"a": sl.adam(0.1).every_k(3), "b": sl.sgd(0.1).every_k(2)}, ("a", "b"))
    model = (jnp.zeros(2), jnp.zeros(2))
    opt = sl.Optimizer(tx, model)
    wrote = []
    for _ in range(6):
        _, opt = opt.update(model, (jnp.ones(2), jnp.ones(2)))
        wrote.append(bool(opt.has_updated))
    assert wrote == [False, True, True, True, False, True]


@pytest.mark.slow
def test_every_k_around_a_partition_steps_all_groups_with_window_means():
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 12)
    tx = sl.adam(0.1).partition({WEIGHT: sl.sgd(0.1)})
    path, _ = slalom_trajectory(tx.every_k(3), params, grads)
    exact, _ = slalom_trajectory(tx, params, windows(grads, 3))
    assert_same_path(emissions(path, 3), exact, params, 2e-5)


@pytest.mark.slow
def test_every_k_inside_only_updates_the_selected_parameters():
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 6)
    path, _ = slalom_trajectory(sl.adam(0.1).every_k(3).only(WEIGHT), params, grads)
    exact, _ = slalom_trajectory(sl.adam(0.1).every_k(3), params, grads)
    assert distance(path["dense"]["weight"], exact["dense"]["weight"]) <= 1e-6
    still = jnp.broadcast_to(params["dense"]["bias"], path["dense"]["bias"].shape)
    assert_same_bits(path["dense"]["bias"], still)


@pytest.mark.slow
def test_every_k_of_every_k_multiplies_the_windows():
    params = jnp.ones(3)
    grads = gradients(params, 12)
    path, _ = slalom_trajectory(sl.adam(0.1).every_k(2).every_k(3), params, grads)
    exact, _ = slalom_trajectory(sl.adam(0.1).every_k(6), params, grads)
    assert_same_path(path, exact, params, 2e-5)


def test_sums_of_sums_are_sums():
    params = jnp.zeros(2)
    grads = gradients(params, 12)
    tx = sl.sgd(0.1)
    path, _ = slalom_trajectory(tx.every_k(2, mean=False).every_k(3, mean=False), params, grads)
    exact, _ = slalom_trajectory(tx.every_k(6, mean=False), params, grads)
    assert_same_path(path, exact, params, 2e-5)


def test_means_of_weighted_means_are_weighted_means():
    # The inner one weighs each outer window by that window's total weight.
    params = jnp.zeros(2)
    grads = gradients(params, 12)
    weight = jnp.asarray(np.random.default_rng(2).uniform(0.1, 3.0, 12), jnp.float32)
    tx = sl.sgd(0.1)
    path, _ = slalom_trajectory(tx.every_k(2).every_k(3), params, grads, weight=weight)
    exact, _ = slalom_trajectory(tx.every_k(6), params, grads, weight=weight)
    assert_same_path(path, exact, params, 2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'every_k' returns zeros")
def test_in_the_middle_of_a_chain():
    # Idle steps hand zeros on: Adam is fed 0, 0, 0, mean, 0, 0, 0, mean.
    params = nested_dict(jax.random.key(0))
    grads = gradients(params, 16)
    tx = sl.ClipByGlobalNorm(1.0) | sl.Trace(0.0).every_k(4) | sl.adam(0.1)
    path, _ = slalom_trajectory(tx, params, grads)

    def clip(g):
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(g)))
        return jax.tree.map(lambda x: x * jnp.minimum(1.0, 1.0 / norm), g)

    means = windows(jax.vmap(clip)(grads), 4)
    fed = jax.tree.map(lambda g, m: jnp.zeros_like(g).at[3::4].set(m), grads, means)
    exact, _ = optax_trajectory(optax.adam(0.1), params, fed)
    assert_same_path(path, exact, params, 2e-5)


def test_in_the_middle_of_a_chain_nothing_is_lost_in_bfloat16():
    # An update far below the parameter's last place: only what is never subtracted survives.
    params = jnp.ones(2, jnp.bfloat16)
    tx = sl.Trace(0.0).every_k(2) | sl.Scale(-1e-6) | sl.Scale(1e6) | sl.Scale(0.5)
    path, _ = slalom_trajectory(tx, params, jnp.ones((2, 2), jnp.bfloat16))
    np.testing.assert_array_equal(path, [[1, 1], [0.5, 0.5]])


@pytest.mark.slow
def test_on_a_whole_model_with_train_step():
    model = mlp()
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((8, 2)), jnp.float32)
    y = jnp.asarray(random.standard_normal((8, 1)), jnp.float32)

    full, _, loss = sl.train_step(mean_square, donate=False)(
        model, sl.Optimizer(sl.adamw(0.1), model), x, y
    )
    step = sl.train_step(mean_square, donate=False)
    opt = sl.Optimizer((Recorder() | sl.adamw(0.1)).every_k(4), model)
    split = model
    for i in range(4):
        split, opt, _ = step(split, opt, x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2])
    assert distance(eqx.filter(split, eqx.is_array), eqx.filter(full, eqx.is_array)) <= 1e-5
    np.testing.assert_allclose(opt.state_of(Recorder).value, loss, rtol=1e-5)


@pytest.mark.slow
def test_over_a_vmap_of_runs():
    # Its own counters batched, a wrapper selects instead of branching: the values stay right.
    params = jnp.zeros(2)
    grads = gradients(params, 6)

    def run(rate):
        return slalom_trajectory(sl.adam(rate).every_k(3), params, grads)[0]

    rates = jnp.array([0.1, 0.3])
    for path, rate in zip(jax.vmap(run)(rates), rates, strict=True):
        np.testing.assert_allclose(path, run(rate), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx.every_k(2),
        lambda tx: tx.every_k(2).split_complex().record(),
        lambda tx: tx.every_k(2).partition({sl.where.ndim(2): tx}).only(sl.where.ndim(1)),
        lambda tx: sl.ApplyEvery(2) | tx,
    ],
    ids=["every_k", "split_complex", "partition", "apply_every"],
)
def test_a_batch_of_optimizers_tells_of_each_whether_it_wrote(wrap):
    opts = jax.vmap(lambda rate: sl.Optimizer(wrap(sl.sgd(rate)), jnp.zeros(2)))(jnp.ones(3))
    assert opts.has_updated.tolist() == [False] * 3


@pytest.mark.parametrize(
    ("k", "error"),
    [(0, ValueError), (-2, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)],
)
def test_bad_windows_are_refused(k, error):
    with pytest.raises(error, match=rf"(?s)EveryK.*{k}"):
        sl.sgd(0.1).every_k(k)


# --- links after it -------------------------------------------------------------------------

DECAY = sl.SubtractDecayedWeights(0.1)
WARNED = {
    "decay": (
        sl.adam(0.1).every_k(4) | DECAY,
        "every_k",
        "subtract_decayed_weights",
        ".every_k(4)",
    ),
    "later, by name": (
        sl.named_chain(slow=sl.adam(0.1).every_k(4, mean=False), less=sl.Scale(0.5), decay=DECAY),
        "slow",
        "decay",
        ".every_k(4, mean=False)",
    ),
    "inside": (
        (sl.ClipByGlobalNorm(1.0) | (sl.adam(0.1).every_k(4).only(WEIGHT) | DECAY)).every_k(2),
        "every_k.only.every_k",
        "every_k.subtract_decayed_weights",
        ".every_k(4)",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_link_that_moves_parameters_on_idle_steps_is_warned_of(name):
    tx, paced, link, how = WARNED[name]
    with pytest.warns(UserWarning, match="returns zeros") as caught:
        sl.Optimizer(tx, nested_dict(jax.random.key(0)))
    (warning,) = caught
    assert str(warning.message) == (
        f"'{paced}' returns zeros in its idle steps, and '{link}' after it turns them into nonzero "
        "updates, so the parameters change in idle steps too. Move it inside: "
        f"`(... | sl.SubtractDecayedWeights(weight_decay=0.1)){how}`."
    )


@pytest.mark.filterwarnings("ignore:'clip' comes after")
def test_links_that_keep_zeros_or_stand_before_are_not_warned_of():
    # Every warning is an error here.
    params = nested_dict(jax.random.key(0))
    for tx in (
        (sl.adam(0.1) | DECAY).every_k(4) | sl.Scale(0.5).mask(WEIGHT) | sl.Clip(1.0),
        sl.AddDecayedWeights(0.1) | sl.adam(0.1).every_k(4),
        sl.adam(0.1).every_k(4).partition({WEIGHT: sl.SetToZero()}) | sl.Scale(0.5),
        sl.ApplyEvery(2) | sl.adam(0.1),
    ):
        sl.Optimizer(tx, params)


def test_an_idle_step_emits_nothing_through_wrapped_links_that_keep_zeros():
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    tx = sl.sgd(0.1).every_k(2) | sl.Scale(0.5).mask(sl.where.ndim(min=2))
    opt = sl.Optimizer(tx, params)
    told = []
    for _ in range(4):
        params, opt = opt.step(params, params)
        told.append(bool(opt.has_updated))
    assert told == [False, True, False, True]


# --- infinities and metrics -------------------------------------------------------------------


@pytest.mark.parametrize("grads", [(jnp.inf, jnp.inf), (jnp.inf, 1.0), (1.0, jnp.inf)])
def test_the_mean_of_infinite_gradients_is_infinite(grads):
    model = jnp.zeros(())
    opt = sl.Optimizer(sl.ScaleBySign().every_k(2) | sl.sgd(1.0), model)
    for g in grads:
        model, opt = opt.step(model, jnp.float32(g))
    assert float(model) == -1.0


def test_the_mean_of_opposite_infinities_is_no_number():
    model = jnp.zeros(())
    opt = sl.Optimizer(sl.sgd(1.0).every_k(2), model)
    for g in (jnp.inf, -jnp.inf):
        model, opt = opt.step(model, jnp.float32(g))
    assert jnp.isnan(model)


def test_metrics_have_the_mean_loss_of_the_window():
    model, opt = jnp.zeros(()), sl.Optimizer(sl.sgd(1.0).every_k(2), jnp.zeros(()))
    for loss in (1.0, 4.0):
        model, opt = opt.step(model, jnp.ones(()), value=loss)
    assert float(opt.metrics["mean_value"]) == 2.5


def test_the_window_is_a_hyperparameter():
    traces = []

    @jax.jit
    def step(params, opt):
        traces.append(1)
        return opt.step(params, {"w": jnp.ones(2)})

    params = {"w": jnp.zeros(2)}
    opt = sl.Optimizer(sl.sgd(1.0).every_k(2), params)
    assert opt.hyperparams["k"] == 2
    assert opt.hyperparams["k"].dtype == jnp.int32
    opt = opt.with_hyperparams(k=3)
    for _ in range(3):
        assert params["w"][0] == 0
        params, opt = step(params, opt)
    assert params["w"][0] == -1
    params, opt = step(params, opt.with_hyperparams(k=lambda k: k // 3))
    assert params["w"][0] == -2
    assert len(traces) == 1
    with pytest.raises(ValueError, match="must be at least 1 mini-step, got 0"):
        opt.with_hyperparams(k=0)
    scheduled = sl.Optimizer(sl.sgd(1.0).every_k(lambda n: 1 + n), params)
    assert scheduled.hyperparams["k"] == 1
    _, scheduled = scheduled.step(params, params)
    assert scheduled.hyperparams["k"] == 2
