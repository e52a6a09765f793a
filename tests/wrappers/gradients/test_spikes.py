"""Skipped spikes and clips by recent norms, against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except

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
CASES = {
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


@pytest.mark.parametrize("name", CASES)
def test_it_skips_what_the_rule_says(name):
    values, number = CASES[name]
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


@pytest.mark.slow
def test_a_norm_that_is_not_finite_does_zclip_no_lasting_harm():
    params = {"w": jnp.zeros(1)}
    opt = sl.Optimizer(sl.ZClip(warmup_steps=3), params)
    for norm in (1.0, 2.0, 3.0):
        _, opt = opt.update(params, {"w": jnp.array([norm])})
    for bad in (jnp.nan, jnp.inf):
        updates, after = opt.update(params, {"w": jnp.array([bad])})
        assert jnp.isnan(updates["w"][0])
        for name in ("age", "mean", "std"):
            assert getattr(after.state, name) == getattr(opt.state, name)
