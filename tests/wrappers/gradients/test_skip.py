"""Mini-batches and spikes that are left out, as if they had not been, and clips by recent norms."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl
from helpers import (
    assert_close,
    assert_same_bits,
    gradients,
    nested_dict,
    optax_trajectory,
    slalom_trajectory,
    slow_except,
)

PARAMS = nested_dict(jax.random.key(0))
LIMIT = 30.0
ADAMW = sl.adamw(0.05, weight_decay=0.1)


def rough_gradients(params, n=23, large=50.0):
    """Gradients of which some hold NaN or infinity, and some are large."""
    grads = gradients(params, n)
    grads["dense"]["weight"] = grads["dense"]["weight"].at[jnp.array([1, 7, 8]), 0, 1].set(jnp.nan)
    grads["dense"]["bias"] = grads["dense"]["bias"].at[jnp.array([4, 12]), 0].set(-jnp.inf)
    return jax.tree.map(lambda g: g.at[jnp.array([3, 16])].multiply(large), grads)


def theirs_both(updates, step, params):
    skip, state = optax.skip_not_finite(updates, step, params)
    large, more = optax.skip_large_updates(updates, step, params, max_squared_norm=LIMIT)
    # optax stores the condition's own dict, which it may not find changed.
    return skip | large, state | more | {"should_skip": skip | large}


BOTH = sl.SkipNotFinite() | sl.SkipLargeUpdates(LIMIT)
OPTAX_LARGE = functools.partial(optax.skip_large_updates, max_squared_norm=LIMIT)
CONDITIONS = {
    "not finite": (sl.SkipNotFinite(), optax.skip_not_finite),
    "both": (BOTH, theirs_both),
    "optax": (OPTAX_LARGE, OPTAX_LARGE),
}


def ks(n):
    return jnp.minimum(n + 1, 3)


CASES = (("both", 4, False), ("both", ks, True), ("not finite", ks, False), ("optax", 4, True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k", "mean"), CASES)
def test_same_path_as_optax(name, k, mean, x64):
    rough, params = jax.tree.map(lambda x: x.astype(jnp.float64), (rough_gradients(PARAMS), PARAMS))
    ours, theirs = CONDITIONS[name]
    path, opt = slalom_trajectory(ADAMW.every_k(k, mean=mean, skip=ours), params, rough)
    reference = optax.MultiSteps(
        optax.adamw(0.05, weight_decay=0.1),
        k,
        use_grad_mean=mean,
        should_skip_update_fn=theirs,
        accumulator_dtype=jnp.float64,
    )
    exact, state = optax_trajectory(reference, params, rough)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(path))
    assert_close(path, exact, rtol=1e-9, atol=1e-13)
    said = opt.metrics
    assert int(said["mini_step"]) == int(state.mini_step)
    assert int(said["gradient_step"]) == int(state.gradient_step)
    for key, value in state.skip_state.items():
        np.testing.assert_allclose(said[key], value, rtol=1e-6)


@pytest.mark.slow
def test_what_is_left_out_leaves_no_trace():
    # The path is that of the other mini-batches alone, and every bit of the state with it.
    grads = rough_gradients(PARAMS)
    tx = sl.adam(0.1).every_k(3, skip=BOTH, accumulator_dtype="bfloat16")
    opt = sl.Optimizer(tx, PARAMS)

    @jax.jit
    def step(model, opt, g, value):
        return opt.step(model, g, value=value, weight=jnp.abs(value))

    model, left_out = PARAMS, []
    for n in range(10):
        g = jax.tree.map(lambda x, n=n: x[n], grads)
        value = jnp.float32(jnp.nan if n in (1, 4) else n + 1)
        stepped, after = step(model, opt, g, value)
        if after.metrics["should_skip"]:
            left_out.append(n)
            assert_same_bits(stepped, model)
            assert not after.has_updated
            before, now = opt.state, after.state
            for field in ("mini_step", "weight", "value", "count", "inner", "accumulated"):
                assert_same_bits(getattr(now, field), getattr(before, field))
        model, opt = stepped, after
    assert left_out == [1, 3, 4, 7, 8]
    assert int(opt.count) == 10
    assert int(opt.metrics["gradient_step"]) == 1
    assert int(opt.metrics["mini_step"]) == 2


def test_limits_change_without_compiling_and_see_emitted_updates():
    opt = sl.Optimizer(sl.sgd(0.1).every_k(2, skip=sl.SkipNotFinite()), jnp.zeros(2))
    emitted = []
    for g in (1.0, 1.0, jnp.nan, 1.0, jnp.nan, 1.0):
        _, opt = opt.update(jnp.zeros(2), jnp.full(2, g))
        emitted.append(bool(opt.has_updated))
    assert emitted == [False, True, False, False, False, True]

    tx = sl.sgd(0.1).every_k(1, skip=sl.SkipNotFinite() | sl.SkipLargeUpdates(10.0))
    opt = sl.Optimizer(tx, jnp.zeros(2))
    step = jax.jit(lambda opt, g: opt.update(jnp.zeros(2), g)[1])
    assert not step(opt, jnp.ones(2)).metrics["should_skip"]
    opt = opt.with_hyperparams(max_squared_norm=2.0)
    assert float(opt.hyperparams["every_k.skip.1.max_squared_norm"]) == 2.0
    assert step(opt, jnp.ones(2)).metrics["should_skip"]  # ‖g‖² = 2 is not below 2
    assert step._cache_size() == 1

    limit = sl.schedules.piecewise_constant(5.0, {1: 0.1})
    tx = sl.sgd(0.1).every_k(2, skip=sl.SkipLargeUpdates(limit))
    opt = sl.Optimizer(tx, jnp.zeros(2))
    skipped, shown = [], []
    for _ in range(4):
        shown.append(float(opt.hyperparams["max_squared_norm"]))
        _, opt = opt.update(jnp.zeros(2), jnp.ones(2))
        skipped.append(bool(opt.metrics["should_skip"]))
    assert skipped == [False, False, True, True]
    np.testing.assert_allclose(shown, [5, 5, 0.5, 0.5])


@pytest.mark.slow
def test_metrics_have_one_structure_and_infinite_norms_do_zclip_no_harm():
    skip = sl.SkipNotFinite() | (
        lambda updates, gradient_step, params: (gradient_step > 2, {"at": gradient_step})
    )
    opt = sl.Optimizer(sl.adam(0.1).every_k(2, skip=skip), jnp.ones(3))
    before = opt.metrics
    window = {"mini_step", "gradient_step", "mean_value"}
    reported = {"should_skip", "num_not_finite", "at"}
    assert set(before) == {f"every_k.{name}" for name in window | reported}
    _, opt = opt.step(jnp.ones(3), jnp.array([1.0, jnp.nan, jnp.inf]))
    after = opt.metrics
    assert {k: x.dtype for k, x in before.items()} == {k: x.dtype for k, x in after.items()}
    assert int(after["num_not_finite"]) == 2
    plain = sl.Optimizer(sl.adam(0.1).every_k(2), jnp.ones(3)).metrics
    assert set(plain) == {f"every_k.{name}" for name in window}

    params = {"w": jnp.zeros(1)}
    opt = sl.Optimizer(sl.ZClip(warmup_steps=3), params)
    for norm in (1.0, 2.0, 3.0):
        _, opt = opt.update(params, {"w": jnp.array([norm])})
    for bad in (jnp.nan, jnp.inf):
        updates, after = opt.update(params, {"w": jnp.array([bad])})
        assert jnp.isnan(updates["w"][0])
        for name in ("age", "mean", "std"):
            assert getattr(after.state, name) == getattr(opt.state, name)


def test_norms_of_half_precision_do_not_overflow_and_conditions_print_as_code():
    # 300² is beyond float16.
    tx = sl.sgd(0.1).every_k(1, skip=sl.SkipLargeUpdates(1e6))
    opt = sl.Optimizer(tx, jnp.zeros(2, jnp.float16))
    _, opt = opt.update(jnp.zeros(2, jnp.float16), jnp.full(2, 300.0, jnp.float16))
    assert not opt.metrics["should_skip"]
    np.testing.assert_allclose(opt.metrics["norm_squared"], 180000.0)
    assert opt.metrics["norm_squared"].dtype == jnp.float32

    tx = sl.adam(0.1).every_k(4, mean=False, skip=BOTH)
    assert repr(tx.skip) == "sl.SkipNotFinite() | sl.SkipLargeUpdates(30.0)"
    assert eval(repr(tx), {"sl": sl}) == tx
    joined = theirs_both | sl.SkipNotFinite() | theirs_both
    assert repr(joined) == "theirs_both | sl.SkipNotFinite() | theirs_both"


MUST = (
    "The `skip` of every_k must return a pair: a bool scalar, and a dict of scalars by name, "
    "which may be empty. condition returned "
)
REFUSED = {
    f"{MUST}a bool scalar.": lambda u: True,
    f"{MUST}a tuple of 3.": lambda u: (True, {}, 1),
    f"{MUST}a float64 scalar as the first entry.": lambda u: (1.0, {}),
    f"{MUST}an array of dtype bool and shape (3,) as the first entry.": lambda u: (u["w"] > 0, {}),
    f"{MUST}a list of 1 as the second entry.": lambda u: (True, [1]),
    f"{MUST}an array of dtype float32 and shape (3,) under 'a'.": lambda u: (True, {"a": u["w"]}),
    f"{MUST}a str under 'a'.": lambda u: (True, {"a": "b"}),
    "condition reports 'mini_step', which every_k reports itself. Use another name.": (
        lambda u: (True, {"mini_step": 1})
    ),
}


def refuses(error, message):
    """An error with exactly this text, and perhaps a note by JAX under it."""
    return pytest.raises(error, match=rf"\A{re.escape(message)}(\n-+\n|\Z)")


@pytest.mark.parametrize("message", REFUSED)
def test_a_condition_that_returns_something_else_is_refused_at_binding(message):
    def condition(updates, gradient_step, params):
        return REFUSED[message](updates)

    tx = sl.adam(0.1).every_k(2, skip=condition)
    with refuses(TypeError if message.startswith(MUST) else ValueError, message):
        sl.Optimizer(tx, {"w": jnp.ones(3)})


def test_conditions_must_be_some_with_the_same_names_always():
    tx = sl.adam(0.1).every_k(2, skip=sl.SkipLargeUpdates(1.0) | sl.SkipLargeUpdates(2.0))
    two = "Two of the conditions sl.SkipLargeUpdates(1.0) | sl.SkipLargeUpdates(2.0) report "
    with refuses(ValueError, f"{two}'norm_squared'. Use different names."):
        sl.Optimizer(tx, jnp.ones(3))
    must = (
        "EveryK.skip must be a condition such as `sl.SkipNotFinite()`, or a function of (updates, "
        "gradient_step, params), got "
    )
    uncalled = (
        "<class 'slalom.wrappers.gradients.skip.SkipNotFinite'>. "
        "Call it first: `SkipNotFinite(...)`."
    )
    with refuses(TypeError, must + uncalled):
        sl.adam(0.1).every_k(2, skip=sl.SkipNotFinite)
    with refuses(TypeError, f"{must}3."):
        sl.SkipNotFinite() | 3

    def condition(updates, gradient_step, params):
        return False, {} if params is None else {"known": 1}

    tx = sl.Scale(-1.0).every_k(2, skip=condition)
    message = (
        "condition reports ['should_skip'], and at binding it reported ['known', 'should_skip']. "
        "The names must always be the same."
    )
    with refuses(ValueError, message):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


random = np.random.default_rng(0)
NOISE = 1 + 0.1 * random.standard_normal(200)


@functools.cache
def program(**options):
    """A compiled scan of steps with these losses and gradient norms, and what it starts from."""
    params = {"w": jnp.zeros(2)}

    def body(carry, given):
        params, opt = carry
        value, norm = given
        grads = {"w": jnp.stack([norm, jnp.zeros_like(norm)])}
        params, opt = opt.step(params, grads, value=value)
        return (params, opt), (dict(opt.metrics), opt.has_updated)

    start = params, sl.Optimizer(sl.sgd(0.1).skip_spikes(**options), params)
    return jax.jit(lambda start, given: jax.lax.scan(body, start, given)), start


def run(values, norms, **options):
    """The last optimizer, and the metrics and whether it updated in each step."""
    scan, start = program(**options)
    given = jnp.asarray(values, jnp.float32), jnp.asarray(norms, jnp.float32)
    (_, opt), (metrics, updated) = scan(start, given)
    return opt, {k.rpartition(".")[2]: np.asarray(v) for k, v in metrics.items()}, updated


def reference(values, *, sigma=6.0, window=16, max_consecutive=4):
    """Which steps are skipped."""
    kept, streak, skipped = [], 0, []
    for v in values:
        last, spike = kept[-window:], False
        if np.isfinite(v) and 2 * len(kept) >= window:
            m, s = np.mean(last), np.std(last)
            spike = v - m > sigma * max(s, abs(m) / 100)
        accepted = spike and streak >= max_consecutive
        if accepted:
            kept = []
        runs = np.isfinite(v) and (not spike or accepted)
        if runs:
            kept.append(v)
            streak = 0
        elif spike:
            streak += 1
        skipped.append(not runs)
    return skipped


def with_changes(**changes):
    values = NOISE.copy()
    for at, value in changes.items():
        first, _, length = at[1:].partition("_")
        values[int(first) : int(first) + int(length or 1)] = value
    return values


# With the number of skipped steps. Training goes on after the first four of a lasting change.
SPIKES = {
    "single": (with_changes(a50=9.0, a90=5.0, a120=1e30), 3),
    "burst": (with_changes(a60_4=7.0), 4),
    "lasting": (with_changes(a60_140=7.0 + 0.1 * random.standard_normal(140)), 4),
    "nan": (with_changes(a3=np.nan, a50_9=np.nan, a70=9.0, a71=np.inf, a72=9.0), 13),
    "constant": (np.full(200, 0.25), 0),
    "a small rise of a constant": (np.repeat([0.25, 0.25 * (1 + 1e-7)], 100), 0),
    "zero": (np.repeat([0.0, 1e-7], 100), 0),
    "huge": (with_changes(a50=9.0) * 3e37, 1),
    "tiny": (with_changes(a50=9.0) * 1e-35, 1),
}
SMALL = {"window": 16, "max_consecutive": 4}


@pytest.mark.parametrize("name", SPIKES)
def test_it_skips_what_the_rule_says(name):
    values, number = SPIKES[name]
    opt, metrics, updated = run(values, np.ones(200), by="loss", **SMALL)
    expected = reference(values.astype(np.float32).astype(float))
    if name == "zero":
        expected = [False] * 200
    assert sum(expected) == number
    np.testing.assert_array_equal(metrics["skipped"], expected)
    np.testing.assert_array_equal(updated, ~np.array(expected))
    assert metrics["total_skipped"][-1] == sum(expected)
    assert int(opt.state.count) == 200 - sum(expected)


@pytest.mark.parametrize("by", slow_except(["loss", "grad_norm", "both"], "loss", "both"))
def test_it_compares_what_it_is_told_to(by):
    values, norms = with_changes(a50=9.0), with_changes(a90=9.0)
    _, metrics, _ = run(values, norms, by=by, **SMALL)
    at = {"loss": [50], "grad_norm": [90], "both": [50, 90]}[by]
    assert np.flatnonzero(metrics["skipped"]).tolist() == at
    assert all(metrics["z"][i] > 6 for i in at)
    assert metrics["z"][:8].max() == 0


def zclip(norms, threshold=2.5, decay=0.97, warmup_steps=25, eps=1e-6):
    """The norms after the clip, by the equations of the paper."""
    first, out, mean, var = [], [], 0.0, 0.0
    for g in norms:
        c = g
        if len(first) >= warmup_steps:
            z = (g - mean) / (np.sqrt(var) + eps)
            if z > threshold:
                c = mean + threshold**2 * np.sqrt(var) / z
            mean = decay * mean + (1 - decay) * c
            var = decay * var + (1 - decay) * (c - mean) ** 2
        else:
            first.append(g)
            mean, var = np.mean(first), np.var(first)
        out.append(c)
    return np.array(out)


@pytest.mark.parametrize("scale", slow_except([1.0, 1e-3, 1e30], 1.0))
def test_zclip_scales_to_the_norms_of_the_paper(scale):
    norms = with_changes(a10=4.0, a40=9.0, a41_3=5.0, a150=300.0) * scale
    params = {"w": jnp.zeros(2)}

    def body(carry, norm):
        params, opt = carry
        updates, opt = opt.update(params, {"w": jnp.stack([0.6 * norm, -0.8 * norm])})
        return (params, opt), (updates["w"], opt.metrics["z"])

    start = params, sl.Optimizer(sl.ZClip(eps=1e-6 * scale), params)
    _, (updates, z) = jax.lax.scan(body, start, jnp.asarray(norms, jnp.float32))
    expected = zclip(norms, eps=1e-6 * scale)
    np.testing.assert_allclose(updates[:, 0], 0.6 * expected, rtol=2e-4)
    np.testing.assert_allclose(updates[:, 1], -0.8 * expected, rtol=2e-4)
    assert expected[40] < 2 * scale < norms[40]
    assert z[:25].max() == 0
    assert z[40] > 2.5
