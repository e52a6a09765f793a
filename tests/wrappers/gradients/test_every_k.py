"""Accumulation over mini-steps: its numbers, its clock, its weights, and where it may stand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_bits,
    assert_same_path,
    distance,
    gradients,
    nested_dict,
    optax_trajectory,
    slalom_trajectory,
    slow_except,
    transforms_in,
)
from slalom.wrappers.gradients.every_k import WINDOW
from table import EVERYTHING, halving

WEIGHT = sl.where.path("dense.weight")
MODEL = nested_dict(jax.random.key(0))


ADAMW = sl.adamw(0.05, weight_decay=0.1), optax.adamw(0.05, weight_decay=0.1)
REFERENCES = {
    "adamw": (*ADAMW, 4),
    "sgd": (sl.sgd(0.1, 0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True), 4),
    "adamw, scheduled": (*ADAMW, lambda n: jnp.minimum(n + 1, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mean", [True, False])
def test_same_path_as_optax(mean, x64):
    params = nested_dict(jax.random.key(0), jnp.float64)
    grads = gradients(params, 23)

    @jax.jit
    def paths():
        found = {}
        for name, (ours, theirs, k) in REFERENCES.items():
            multi = optax.MultiSteps(theirs, k, use_grad_mean=mean, accumulator_dtype=jnp.float64)
            path, _ = slalom_trajectory(ours.every_k(k, mean=mean), params, grads)
            found[name] = path, optax_trajectory(multi, params, grads)[0]
        return found

    for name, (path, exact) in paths().items():
        assert_close(path, exact, rtol=1e-9, atol=1e-13, err_msg=name)


class Recorder(sl.AbstractTransform):
    """Passes updates on, and notes what it was told in its last step."""

    def init(self, params):
        zero, count = jnp.zeros(()), jnp.zeros((), jnp.int32)
        return {"value": zero, "weight": zero, "step": count, "calls": count}

    def update(self, updates, state, params=None, context=None):
        told = {name: getattr(context, name) for name in ("value", "weight", "step")}
        told = {name: jnp.float32(-1) if x is None else x for name, x in told.items()}
        return updates, told | {"calls": state["calls"] + 1}


def record(tx, model, grads, **known):
    """The updates, what the `Recorder` inside `tx` had seen, and the metrics, after each step."""

    def body(opt, given):
        g, known = given
        updates, opt = opt.update(model, g, **known)
        return opt, (updates, opt.state_of(Recorder), dict(opt.metrics))

    return jax.lax.scan(body, sl.Optimizer(tx, model), (grads, known))[1]


@pytest.mark.slow
def test_windows_are_means_or_sums_with_weights():
    # Of complex numbers. Of weight zero are mini-batches at each place of a window, and all of one.
    weights = [1, 2, 3, 0.5, 0.25, 7, 1, 0, 3, 0, 2, 1, 3, 1, 0, 0, 0, 5, 0, 0, 0, 1, 1, 1]
    weights = np.array(weights, np.float32)
    random = np.random.default_rng(1)
    grads = (random.uniform(1, 9, (24, 4)) * [1, -1, 1j, -1j]).astype(np.complex64)
    values = random.uniform(1, 9, 24)
    windows_of = weights.reshape(8, 3)
    sums = np.einsum("wkn,wk->wn", grads.reshape(8, 3, 4), windows_of)
    totals = windows_of.sum(axis=1)
    shares = windows_of / np.where(totals == 0, 1, totals)[:, None]
    # Padding leaves no trace, NaN in its gradient and its loss included.
    padded = weights == 0
    given = jnp.asarray(np.where(padded[:, None], np.nan, grads), jnp.complex64)
    known = {"value": jnp.asarray(np.where(padded, np.nan, values), jnp.float32)}

    for mean in (True, False):
        tx = (Recorder() | sl.Scale(-1.0)).every_k(3, mean=mean)
        run = jax.vmap(lambda w, tx=tx: record(tx, jnp.zeros(4, complex), given, weight=w, **known))
        # Of other units, only the ratios count in a mean.
        unit = np.array([[1.0], [1e-3]], np.float32)
        updates, seen, _ = run(jnp.asarray(weights * unit))
        expected = sums / np.where(totals == 0, 1, totals)[:, None] if mean else sums
        by_unit = np.stack([expected, expected if mean else 1e-3 * expected])
        np.testing.assert_allclose(-updates[:, 2::3], by_unit, rtol=1e-6)
        mean_values = (values.reshape(8, 3) * shares).sum(axis=1)
        # A window without weight is not seen at all.
        is_seen = totals > 0
        values_seen = seen["value"][:, 2::3][:, is_seen]
        np.testing.assert_allclose(values_seen, [mean_values[is_seen]] * 2, rtol=1e-6)
        told = (unit * totals if mean else np.ones((2, 8)))[:, is_seen]
        np.testing.assert_allclose(seen["weight"][:, 2::3][:, is_seen], told, rtol=1e-6)
        np.testing.assert_array_equal(seen["calls"][:, 2::3], [np.cumsum(is_seen)] * 2)
        held = np.arange(24) % 3 < 2
        np.testing.assert_array_equal(updates[:, held], 0)


EMPTY = {
    "momentum and decay": sl.adamw(halving, weight_decay=0.1).every_k(2),
    "a sum": sl.adam(0.1).every_k(2, mean=False),
    "windows of windows": sl.adam(0.1).every_k(1).every_k(2),
    "a plateau": sl.sgd(0.1)
    .drive({"learning_rate": sl.schedules.ReduceOnPlateau(0.1, patience=1)})
    .every_k(2),
    "terms": sl.sgd(0.1).combine(sl.combine.ReLoBRaLo(), ("a", "b")).every_k(2),
    "a posterior": sl.contrib.ivon(0.1, 10).every_k(2),
}


@pytest.mark.parametrize("name", slow_except(EMPTY, "momentum and decay", "a plateau"))
def test_a_window_without_weight_leaves_no_trace(name):
    def run(weights):
        def body(carry, weight):
            padding = jnp.where(weight == 0, jnp.nan, 1.0)
            terms = sl.combine.Terms(padding * jnp.array([1.0, 3.0]))
            known = {"weight": weight, "value": padding * 2.0, "terms": terms}
            return carry[1].step(carry[0], padding * carry[0], **known), None

        carry = jax.lax.scan(body, (jnp.ones(2), sl.Optimizer(EMPTY[name], jnp.ones(2))), weights)
        return carry[0]

    model, opt = run(jnp.array([1.0, 2.0, 0.0, 0.0, 0.0, 0.0]))
    expected, exact = run(jnp.array([1.0, 2.0]))
    assert_same_bits((model, opt.state.inner), (expected, exact.state.inner))
    assert int(opt.state.count) == int(exact.state.count)
    assert not opt.has_updated


def test_what_is_known_of_one_mini_batch_is_refused_and_each_counts_one():
    assert {*WINDOW} == {field.name for field in dataclasses.fields(sl.Context)}
    searches = [
        tx
        for tx in EVERYTHING.values()
        if any("value_fn" in part.needs for part in transforms_in(tx))
    ]
    grams = [sl.combine.UPGrad(), sl.combine.MGDA(), sl.combine.PCGrad()]
    combined = [sl.sgd(0.1).combine(own, ("a", "b")) for own in grams]
    assert len(searches) > 1
    for tx in (*searches, *combined):
        with pytest.raises(ValueError, match=r"inside `.every_k` would (compare|see)"):
            tx.every_k(2)

    _, seen, _ = record((Recorder() | sl.sgd(0.1)).every_k(3), jnp.zeros(2), jnp.ones((3, 2)))
    assert float(seen["weight"][-1]) == 3.0
    assert float(seen["value"][-1]) == -1.0


PLACES = {
    "alone": lambda tx: tx.every_k(3),
    "last in a chain": lambda tx: sl.ClipByGlobalNorm(9.0) | tx.every_k(3),
    "within a chain": lambda tx: (sl.Clip(9.0) | tx).every_k(3) | sl.Scale(0.5),
    "in a mask": lambda tx: tx.every_k(3).mask(sl.where.everything()) | sl.Scale(0.5),
    "in a group": lambda tx: sl.sgd(0.1).partition({sl.where.everything(): tx.every_k(3)}),
}


@pytest.mark.parametrize("name", slow_except(PLACES, "within a chain", "in a group"))
def test_the_inner_transform_sees_the_mean_value_and_the_total_weight(name):
    # optax drops `value` on the way through a chain.
    known = {
        "value": jnp.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]),
        "weight": jnp.array([1.0, 1.0, 2.0, 3.0, 0.5, 0.5]),
    }
    tx = PLACES[name](Recorder() | sl.sgd(0.1))
    _, seen, metrics = record(tx, jnp.zeros(2), jnp.ones((6, 2)), **known)
    np.testing.assert_array_equal(seen["calls"], [0, 0, 1, 1, 1, 2])
    np.testing.assert_array_equal(seen["step"], [0, 0, 0, 0, 0, 1])
    np.testing.assert_allclose(seen["weight"][2::3], [4.0, 4.0])
    np.testing.assert_allclose(seen["value"][2::3], [11 / 4, 48 / 4], rtol=1e-6)
    (mean_value,) = (x for path, x in metrics.items() if path.endswith("mean_value"))
    np.testing.assert_allclose(mean_value[2::3], [11 / 4, 48 / 4], rtol=1e-6)


HALVED = sl.sgd(0.1).every_k(2) | sl.Scale(0.5).mask(sl.where.path("0"))
WRITES = {
    "every 4": (sl.adam(0.1).every_k(4), [3, 7, 11]),
    "before a link that keeps zeros": (HALVED, [1, 3, 5, 7, 9, 11, 13]),
    "of windows": (sl.adam(0.1).every_k(2).every_k(3), [5, 11]),
    # A schedule is sampled at the start of each window.
    "scheduled": (sl.sgd(0.1).every_k(lambda n: jnp.where(n < 3, n + 1, 4)), [0, 2, 5, 9, 13]),
    # Of composites with two transforms inside, where either of them is idle.
    "direction": (sl.sgd(0.1).every_k(2).graft(sl.sgd(0.1)), [1, 3, 5, 7, 9, 11, 13]),
    "length": (sl.sgd(0.1).graft(sl.sgd(0.1).every_k(2)), [1, 3, 5, 7, 9, 11, 13]),
    "both": (sl.sgd(0.1).every_k(2).graft(sl.sgd(0.1).every_k(3)), [5, 11]),
    "groups": (
        sl.sgd(0.1).every_k(2).partition({sl.where.path("0"): sl.sgd(0.1).every_k(3)}),
        [1, 2, 3, 5, 7, 8, 9, 11, 13],
    ),
    "slow weights": (sl.sgd(0.1).outer(sl.sgd(0.7).every_k(2), 1), [1, 3, 5, 7, 9, 11, 13]),
    "some slow weights": (sl.sgd(0.1).outer(sl.sgd(0.7).every_k(2), 2), [*range(14)]),
    # It is rounded, and at least one.
    "rounded": (sl.sgd(0.1).every_k(sl.schedules.linear(0.0, 2.6, 2)), [0, 1, 4, 7, 10, 13]),
}


@pytest.mark.slow
def test_has_updated_says_whether_anything_was_written():
    start = (jnp.zeros(2), jnp.zeros(2))

    def run(tx):
        def body(before, g):
            model, opt = before[1].step(before[0], (g, g))
            moved = jnp.any(jnp.stack(model) != jnp.stack(before[0]))
            return (model, opt), (opt.has_updated, moved)

        opt = sl.Optimizer(tx, start)
        return opt.has_updated, jax.lax.scan(body, (start, opt), jnp.ones((14, 2)))[1]

    found = jax.jit(lambda: {name: run(tx) for name, (tx, _) in WRITES.items()})()
    for name, (at_first, (wrote, moved)) in found.items():
        assert not at_first, name
        assert np.flatnonzero(wrote).tolist() == WRITES[name][1], name
        assert wrote.tolist() == moved.tolist(), name


@pytest.mark.parametrize("mean", [True, False])
def test_a_mini_batch_with_nan_ends_with_its_window(mean):
    # In three runs it is at each place of the second window.
    grads = np.ones((3, 9, 2), np.float32)
    grads[np.arange(3), 3 + np.arange(3), 0] = np.nan
    tx = sl.Scale(-1.0).every_k(3, mean=mean)

    def body(opt, given):
        updates, opt = opt.update(jnp.zeros(2), given, value=given[0])
        return opt, (-updates, opt.state.value)

    @jax.vmap
    def run(grads):
        return jax.lax.scan(body, sl.Optimizer(tx, jnp.zeros(2)), grads)[1]

    out, values = run(jnp.asarray(grads))
    one = 1.0 if mean else 3.0
    expected = [[[one, one], [np.nan, one], [one, one]]] * 3
    np.testing.assert_allclose(out[:, 2::3], expected, rtol=1e-6)
    np.testing.assert_allclose(values[:, 2::3], [[1.0, np.nan, 1.0]] * 3)


def test_batches_of_optimizers_and_hyperparams_inside_tell_of_each_window():
    rate = sl.schedules.linear(1.0, 0.0, 4)
    tx = sl.ScaleBySchedule(rate) | sl.sgd(rate).every_k(3)

    def body(opt, g):
        shown = dict(opt.hyperparams)
        return opt.update(jnp.zeros(2), g)[1], shown

    _, shown = jax.lax.scan(body, sl.Optimizer(tx, jnp.zeros(2)), jnp.ones((7, 2)))
    inside = shown["every_k.scale_by_learning_rate.learning_rate"]
    assert inside.tolist() == [1, 1, 1, 0.75, 0.75, 0.75, 0.5]
    assert shown["scale_by_schedule.step_size"].tolist() == [1, 0.75, 0.5, 0.25, 0, 0, 0]

    for wrap in (
        lambda tx: tx.every_k(2),
        lambda tx: tx.every_k(2).split_complex().record(),
        lambda tx: tx.every_k(2).partition({sl.where.ndim(2): tx}).only(sl.where.ndim(1)),
        lambda tx: sl.ApplyEvery(2) | tx,
    ):
        bind = lambda rate, w=wrap: sl.Optimizer(w(sl.sgd(rate)), jnp.zeros(2))  # noqa: E731
        opts = jax.vmap(bind)(jnp.ones(3))
        assert opts.has_updated.tolist() == [False] * 3, wrap(sl.sgd(0.1))


DTYPES = ("float32", "bfloat16", "float16")
# A leaf for each pair of a parameter's dtype and its gradient's.
PAIRS = {f"{p}, {g}": (p, g) for p in DTYPES for g in DTYPES}


@pytest.mark.slow
def test_half_precision_loses_nothing_and_keeps_its_dtype():
    # 1 + 63·2⁻¹²: in bfloat16 or float16 each of the small ones would be lost.
    grads = np.full((64, 2), 2**-12, np.float32)
    grads[0] = 1.0
    params = {name: jnp.zeros(2, p) for name, (p, _) in PAIRS.items()}
    given = {name: jnp.asarray(grads, g) for name, (_, g) in PAIRS.items()}
    _, opt = slalom_trajectory(sl.Scale(-1.0).every_k(64, mean=False), params, given)
    for name, accumulated in opt.state.accumulated.items():
        assert accumulated.dtype == jnp.float32
        np.testing.assert_array_equal(accumulated, np.float32(1 + 63 * 2**-12), err_msg=name)
    assert bool(opt.has_updated)

    params = {name: jnp.array([1.0, -2.0, 3.0], p) for name, (p, _) in PAIRS.items()}
    drawn = gradients(jnp.zeros(3), 6)
    grads = {name: drawn.astype(g) for name, (_, g) in PAIRS.items()}
    path, _ = slalom_trajectory(sl.adam(0.1).every_k(3), params, grads)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, grads))
    exact, _ = slalom_trajectory(sl.adam(0.1).every_k(3), *wide)
    for name, p in params.items():
        assert path[name].dtype == p.dtype
        # Two roundings of parameters below 4 in magnitude.
        allowed = 8 * float(jnp.finfo(p.dtype).eps)
        assert distance(path[name], exact[name]) <= max(allowed, 1e-6), name

    # An update far below the parameter's last place: only what is never subtracted survives.
    params = jnp.ones(2, jnp.bfloat16)
    tx = sl.Trace(0.0).every_k(2) | sl.Scale(-1e-6) | sl.Scale(1e6) | sl.Scale(0.5)
    path, _ = slalom_trajectory(tx, params, jnp.ones((2, 2), jnp.bfloat16))
    np.testing.assert_array_equal(path, [[1, 1], [0.5, 0.5]])

    model = jnp.zeros(4)
    opt = sl.Optimizer(sl.ScaleBySign().every_k(2) | sl.sgd(1.0), model)
    for g in ([jnp.inf, jnp.inf, 1.0, jnp.inf], [jnp.inf, 1.0, jnp.inf, -jnp.inf]):
        model, opt = opt.step(model, jnp.array(g))
    np.testing.assert_array_equal(model, [-1, -1, -1, jnp.nan])


def test_accumulator_dtype_as_asked_for(x64):
    params = {"wide": jnp.zeros(2, jnp.float64), "half": jnp.zeros(2, jnp.bfloat16)}

    def dtypes(**options):
        def step(params):
            return sl.Optimizer(sl.sgd(0.1).every_k(2, **options), params).step(params, params)[1]

        opt = jax.eval_shape(step, params)
        return {name: str(a.dtype) for name, a in opt.state.accumulated.items()}

    assert dtypes() == {"wide": "float64", "half": "float32"}
    assert dtypes(accumulator_dtype=jnp.float32) == {"wide": "float32", "half": "float32"}
    assert dtypes(accumulator_dtype="bfloat16") == {"wide": "bfloat16", "half": "bfloat16"}


WEIGHTS = jnp.asarray(np.random.default_rng(2).uniform(0.1, 3.0, 12), jnp.float32)
NESTED = {
    "windows of windows": (sl.adam(0.1), True, {}),
    "sums of sums": (sl.sgd(0.1), False, {}),
    # The inner one weighs each outer window by that window's total weight.
    "means of weighted means": (sl.sgd(0.1), True, {"weight": WEIGHTS}),
}


@pytest.mark.parametrize("name", slow_except(NESTED, "sums of sums", "means of weighted means"))
def test_windows_of_windows_are_longer_windows(name):
    tx, mean, known = NESTED[name]
    params, nested = jnp.ones(3), tx.every_k(2, mean=mean).every_k(3, mean=mean)
    grads = gradients(params, 12)
    path, _ = slalom_trajectory(nested, params, grads, **known)
    exact, _ = slalom_trajectory(tx.every_k(6, mean=mean), params, grads, **known)
    assert_same_path(path, exact, params, 2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'every_k' returns zeros")
def test_in_the_middle_of_a_chain():
    # Idle steps hand zeros on: Adam is fed 0, 0, 0, mean, 0, 0, 0, mean.
    grads = gradients(MODEL, 16)
    tx = sl.ClipByGlobalNorm(1.0) | sl.Trace(0.0).every_k(4) | sl.adam(0.1)
    path, _ = slalom_trajectory(tx, MODEL, grads)

    def clip(g):
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(g)))
        return jax.tree.map(lambda x: x * jnp.minimum(1.0, 1.0 / norm), g)

    def means(g):
        return jnp.zeros_like(g).at[3::4].set(jnp.mean(g.reshape(4, 4, *g.shape[1:]), axis=1))

    fed = jax.tree.map(means, jax.vmap(clip)(grads))
    exact, _ = optax_trajectory(optax.adam(0.1), MODEL, fed)
    assert_same_path(path, exact, MODEL, 2e-5)


DECAY, PACED = sl.SubtractDecayedWeights(0.1), sl.adam(0.1).every_k(4)
SUMS = sl.adam(0.1).every_k(4, mean=False)
INSIDE = (sl.ClipByGlobalNorm(1.0) | (PACED.only(WEIGHT) | DECAY)).every_k(2)
NAMED = sl.named_chain(slow=SUMS, less=sl.Scale(0.5), decay=DECAY)
WARNED = [
    (PACED | DECAY, "every_k", "subtract_decayed_weights", ".every_k(4)"),
    (NAMED, "slow", "decay", ".every_k(4, mean=False)"),
    (INSIDE, "every_k.only.every_k", "every_k.subtract_decayed_weights", ".every_k(4)"),
]


@pytest.mark.parametrize(("tx", "paced", "link", "how"), WARNED, ids=["chain", "named", "inside"])
def test_a_link_that_moves_parameters_on_idle_steps_is_warned_of(tx, paced, link, how):
    with pytest.warns(UserWarning, match="returns zeros") as caught:
        sl.Optimizer(tx, MODEL)
    (warning,) = caught
    assert str(warning.message) == (
        f"'{paced}' returns zeros in its idle steps, and '{link}' after it turns them into nonzero "
        "updates, so the parameters change in idle steps too. Move it inside: "
        f"`(... | sl.SubtractDecayedWeights(weight_decay=0.1)){how}`."
    )


@pytest.mark.filterwarnings("ignore:'clip' comes after")
def test_links_that_keep_zeros_or_stand_before_are_not_warned_of():
    # Every warning is an error here.
    for tx in (
        (sl.adam(0.1) | DECAY).every_k(4) | sl.Scale(0.5).mask(WEIGHT) | sl.Clip(1.0),
        sl.AddDecayedWeights(0.1) | PACED,
        PACED.partition({WEIGHT: sl.SetToZero()}) | sl.Scale(0.5),
        sl.ApplyEvery(2) | sl.adam(0.1),
    ):
        sl.Optimizer(tx, MODEL)


def test_the_window_is_a_hyperparameter():
    step = jax.jit(lambda params, opt: opt.step(params, {"w": jnp.ones(2)}))
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
    assert step._cache_size() == 1
    with pytest.raises(ValueError, match="must be at least 1 mini-step, got 0"):
        opt.with_hyperparams(k=0)
    scheduled = sl.Optimizer(sl.sgd(1.0).every_k(lambda n: 1 + n), params)
    assert scheduled.hyperparams["k"] == 1
    _, scheduled = scheduled.step(params, params)
    assert scheduled.hyperparams["k"] == 2
