"""IVON: its numbers, its posteriors, and where the gradient is taken."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import SLOW, slow_except
from slalom._core.engine.encoded import decoded
from slalom.contrib.curvature.ivon import ScaleByIvonState


# With the normal numbers 1 and −0.5, in float64, of the authors' code at f = θ², θ₀ = 1.
@pytest.mark.parametrize(
    ("b2", "thetas", "hessians"),
    [
        (0.9, (0.958525, 0.897018), (5.305090, 3.297921)),
        pytest.param(0.99999, (0.780037, 0.598996), (1.000210, 1.000127), marks=SLOW),
    ],
)
def test_two_steps_are_those_of_the_authors(b2, thetas, hessians, monkeypatch):
    drawn = []
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: jnp.full(shape, drawn[-1]))
    model = jnp.ones(())
    opt = sl.Optimizer(sl.contrib.ivon(0.1, 100, b2=b2), model)
    for xi, theta, hessian in zip((1.0, -0.5), thetas, hessians, strict=True):
        drawn.append(xi)
        # Not compiled, since a compiled step would keep the first number.
        with jax.disable_jit():
            grads = jax.grad(lambda m: m**2)(opt.sample_params(model))
            model, opt = opt.step(model, grads)
        np.testing.assert_allclose(model, theta, atol=2e-6)
        precision = opt.state_of("scale_by_ivon").precision
        np.testing.assert_allclose(precision - 1e-4, hessian, rtol=2e-6)


def loss_fn(model, x, y):
    return 0.5 * jnp.mean((x @ model["w"] + model["b"] - y) ** 2) / 0.25


@pytest.mark.slow
def test_the_posterior_of_a_linear_regression_is_the_closed_form():
    # Orthogonal features, so that the exact posterior is one with a diagonal covariance.
    random = np.random.default_rng(0)
    n, weight_decay = 64, 0.05
    q = np.linalg.qr(np.column_stack([np.ones(n), random.standard_normal((n, 3))]))[0]
    x = np.sqrt(n) * q[:, 1:] * np.array([1.0, 0.5, 2.0])
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.3 + 0.5 * random.standard_normal(n)
    design = np.column_stack([x, np.ones(n)])
    precision = design.T @ design / 0.25 + n * weight_decay * np.eye(4)
    mean = np.linalg.solve(precision, design.T @ y / 0.25)
    variance = 1 / np.diag(precision)

    rate = sl.schedules.cosine_decay(0.05, 4000)
    tx = sl.contrib.ivon(rate, n, b2=0.999, hessian_init=1.0, weight_decay=weight_decay)
    model = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    data = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}
    step, opt = sl.train_step(loss_fn), sl.Optimizer(tx, model)
    model, opt, _ = step.scan(model, opt, length=4000, **data)
    found = np.append(model["w"], model["b"])
    assert (np.abs(found - mean) < 0.2 * np.sqrt(variance)).all()

    keys = jax.random.split(jax.random.key(1), 4000)
    samples = jax.vmap(lambda key: opt.sample_params(model, key))(keys)
    samples = np.column_stack([samples["w"], samples["b"]])
    np.testing.assert_allclose(samples.std(0), np.sqrt(variance), rtol=0.12)
    np.testing.assert_allclose(samples.mean(0), found, atol=4 * np.sqrt(variance.max() / 4000))


@pytest.mark.slow
def test_a_step_takes_one_gradient_at_the_sample_and_returns_the_loss_there():
    calls = []

    @sl.train_step
    def step(model):
        calls.append(1)
        return jnp.sum((model["w"] - 3) ** 2)

    model = {"w": jnp.ones(3), "n": 2}
    tx = (sl.ClipByGlobalNorm(5.0) | sl.contrib.ivon(0.1, 10, b2=0.9)).only(sl.where.path("w"))
    opt = sl.Optimizer(tx, model)
    at = opt.sample_params(model)
    assert at["n"] == 2
    assert (at["w"] != model["w"]).all()
    grads = eqx.filter_grad(lambda m: jnp.sum((m["w"] - 3) ** 2))(at)
    by_hand, _ = opt.step(model, grads)
    one, two, again = (opt.sample_params(model, jax.random.key(k))["w"] for k in (0, 1, 0))
    new, after, loss = step(model, opt)
    assert len(calls) == 1
    np.testing.assert_allclose(loss, jnp.sum((at["w"] - 3) ** 2), rtol=1e-6)
    np.testing.assert_allclose(new["w"], by_hand["w"], rtol=1e-6)
    # The next sample is another, and a key decides the others.
    assert (after.sample_params(model)["w"] != at["w"]).all()
    assert (one != two).all()
    np.testing.assert_array_equal(one, again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "steps", "rtol"),
    [
        (lambda tx: tx, 1, 1e-5),
        (lambda tx: tx.store("int8"), 1, 0.02),
        (lambda tx: tx.split_complex(), 1, 1e-5),
        (lambda tx: tx.every_k(2).if_finite().average(), 2, 1e-5),
        (lambda tx: sl.sgd(0.1).partition({sl.where.path("w"): tx}), 1, 1e-5),
        (lambda tx: tx.only(sl.where.path("w")).record(), 1, 1e-5),
        (lambda tx: tx.write("stochastic"), 1, 1e-5),
    ],
    ids=["plain", "store", "split_complex", "every_k", "partition", "only", "write"],
)
def test_the_step_sees_the_noise_of_the_sample(wrap, steps, rtol):
    size = 1200  # which int8 encodes
    start = jnp.zeros(size)
    if wrap(sl.sgd(1.0)).__class__.__name__ == "SplitComplex":
        start = start.astype(jnp.complex64)
    model = {"w": start, "b": jnp.zeros(())}
    tx = wrap(sl.contrib.ScaleByIvon(10.0, b2=0.0) | sl.ScaleByLearningRate(0.1))
    opt = sl.Optimizer(tx, model)
    first = np.asarray(opt.sample_params(model)["w"])
    # The gradient is the noise ε, so the estimate of the curvature is ε²·λ·(h₀ + δ) = ξ².
    step = sl.train_step(lambda m: 0.5 * jnp.sum(abs(m["w"]) ** 2) + 0.0 * m["b"])
    moved = model
    for _ in range(steps):
        moved, opt, _ = step(moved, opt)
    states = jax.tree.leaves(opt.state, is_leaf=lambda x: isinstance(x, ScaleByIvonState))
    (state,) = (x for x in states if isinstance(x, ScaleByIvonState))
    found = np.concatenate([np.ravel(x) for x in jax.tree.leaves(decoded(state.precision["w"]))])
    noise = np.concatenate([first.real, first.imag]) if np.iscomplexobj(first) else first
    before = 1.0001
    change = noise.astype(np.float64) ** 2 * 10 * before - 1
    np.testing.assert_allclose(
        found, before + change + change**2 / 2 / before, rtol=rtol, atol=rtol
    )


def is_finite(context, updates):
    return jnp.all(jnp.isfinite(updates))


SKIPPING = {
    "if_finite": lambda tx: tx.if_finite(on_limit="skip"),
    "skip_spikes": lambda tx: tx.skip_spikes(by="grad_norm"),
    "scale_loss": lambda tx: tx.scale_loss(),
    "every_k": lambda tx: tx.every_k(1, skip=sl.SkipNotFinite()),
    "when": lambda tx: tx.when(is_finite, otherwise="zero"),
}


def sampled(opt):
    return float(opt.sample_params(jnp.zeros(3))[0])


@pytest.mark.parametrize("name", slow_except(SKIPPING, "if_finite"))
def test_a_skipped_step_draws_another_sample_and_a_window_keeps_its_own(name):
    skip, rule = SKIPPING[name], sl.contrib.ivon(0.1, 10.0)
    model, good = jnp.zeros(3), jnp.ones(3)
    opt = sl.Optimizer(skip(rule).store("int8"), model)
    _, after = opt.step(model, jnp.nan * good)
    assert sampled(after) != sampled(opt)
    _, after = after.step(model, good)
    assert int(after.state_of(sl.contrib.ScaleByIvon).age) == 1

    # The window ends with the second good mini-batch.
    own = name == "every_k"
    window = rule.every_k(2, skip=sl.SkipNotFinite()) if own else skip(rule.every_k(2))
    opt = sl.Optimizer(window, model)
    samples = [sampled(opt)]
    for g in (jnp.nan, 1.0, jnp.nan, 1.0):
        _, opt = opt.step(model, g * good)
        samples.append(sampled(opt))
    assert samples[1] == samples[2] == samples[3]
    assert len({samples[0], samples[1], samples[4]}) == 3


def test_all_wrappers_that_skip_draw_another_sample():
    paced = sl.wrappers.AbstractPacedWrapper.__subclasses__()
    tested = {type(wrap(sl.sgd(0.1))) for wrap in SKIPPING.values()}
    assert {cls for cls in paced if cls.__module__.startswith("slalom.")} <= tested
    # A step that passes the gradients on is skipped by the rule.
    tx, params = sl.contrib.ScaleByIvon(10.0).when(is_finite), jnp.zeros(3)
    state = tx.init(params)
    _, after = tx.update(jnp.nan * params, state, params, sl.Context(step=0))
    assert (after.inner.key != state.inner.key).any()
