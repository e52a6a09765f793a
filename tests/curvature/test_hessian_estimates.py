"""IVON and Sophia: their numbers, their estimates of the Hessian, and who computes them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import SLOW, Counting, after_training, slow_except
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
    loss_fn = Counting(lambda model: jnp.sum((model["w"] - 3) ** 2))
    model = {"w": jnp.ones(3), "n": 2}
    tx = (sl.ClipByGlobalNorm(5.0) | sl.contrib.ivon(0.1, 10, b2=0.9)).only(sl.where.path("w"))
    opt = sl.Optimizer(tx, model)
    at = opt.sample_params(model)
    assert at["n"] == 2
    assert (at["w"] != model["w"]).all()
    grads = eqx.filter_grad(loss_fn)(at)
    by_hand, _ = opt.step(model, grads)
    one, two, again = (opt.sample_params(model, jax.random.key(k))["w"] for k in (0, 1, 0))
    new, after, loss = sl.train_step(loss_fn)(model, opt)
    assert loss_fn.traces == 2  # one of them above
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
    _, opt, _ = after_training(step, opt, steps, model)
    states = jax.tree.leaves(opt.state, is_leaf=lambda x: isinstance(x, ScaleByIvonState))
    (state,) = (x for x in states if isinstance(x, ScaleByIvonState))
    got = np.concatenate([np.ravel(x) for x in jax.tree.leaves(decoded(state.precision["w"]))])
    noise = np.concatenate([first.real, first.imag]) if np.iscomplexobj(first) else first
    before = 1.0001
    change = noise.astype(np.float64) ** 2 * 10 * before - 1
    np.testing.assert_allclose(got, before + change + change**2 / 2 / before, rtol=rtol, atol=rtol)


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


def test_a_model_of_one_array_outside_of_the_group_is_its_own_sample():
    tx = sl.contrib.ivon(0.1, 10.0).partition({sl.where.ndim(1): sl.sgd(0.5)})
    assert sampled(sl.Optimizer(tx, jnp.zeros(3))) == 0


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


CURVATURE = jnp.array([0.5, 2.0, -1.0, 8.0])
START = jnp.array([1.0, -2.0, 3.0, 0.5])
X = jax.random.normal(jax.random.key(1), (4, 2))
LABELS = jnp.array([0, 1, 2, 0])


def quadratic(w):
    return 0.5 * jnp.sum(CURVATURE * w**2)


def cross_entropy(model, x, labels):
    log_probs = jax.nn.log_softmax(x @ model["w"])
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))


def with_drawn_labels(model, key, x, labels):
    drawn = jax.random.categorical(key, x @ model["w"])
    return cross_entropy(model, x, drawn), drawn.size


def given_labels(model, key, x, labels):
    """The loss for the labels of the batch, as if they were those that were drawn."""
    del key
    return cross_entropy(model, x, labels), labels.size


def by_the_book(w, steps, rate, b1=0.965, b2=0.99, gamma=0.01, eps=1e-8, every=10):
    w, curvature = np.asarray(w, np.float64), np.asarray(CURVATURE, np.float64)
    m, h = np.zeros_like(w), np.zeros_like(w)
    for n in range(steps):
        m = b1 * m + (1 - b1) * curvature * w
        if n % every == 0:
            h = b2 * h + (1 - b2) * curvature
        w = w - rate * np.clip(m / (1 - b1 ** (n + 1)) / np.maximum(gamma * h, eps), -1, 1)
    return w, h


def test_steps_are_those_of_the_textbook():
    # The estimate v·(H·v) of a diagonal Hessian is exact.
    tx = sl.contrib.ScaleBySophia(b2=0.5, gamma=2.0, update_interval=2) | sl.ScaleByLearningRate(
        0.1
    )
    w, opt, _ = after_training(sl.train_step(quadratic), tx, 5, START)
    expected, h = by_the_book(START, 5, 0.1, b2=0.5, gamma=2.0, every=2)
    np.testing.assert_allclose(w, expected, rtol=1e-5)
    np.testing.assert_allclose(opt.state[0].hessian, h, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [None, 2])
def test_gauss_newton_bartlett_is_the_squared_gradient_times_the_number_of_labels(microbatches):
    model = {"w": jnp.arange(6.0).reshape(2, 3)}
    tx = sl.contrib.sophia(0.1, b2=0.0, estimator="gauss_newton_bartlett", weight_decay=0.0)
    step = sl.train_step(
        cross_entropy, sampled_loss_fn=given_labels, microbatches=microbatches, donate=False
    )
    _, opt, _ = step(model, sl.Optimizer(tx, model), X, LABELS)
    grad = jax.grad(cross_entropy)(model, X, LABELS)["w"]
    np.testing.assert_allclose(opt.state[0].hessian["w"], 4 * grad**2, rtol=1e-5)


@pytest.mark.slow
def test_the_estimate_of_drawn_labels_is_the_diagonal_of_gauss_newton_on_average():
    model = {"w": jnp.array([[0.5, -0.5, 0.0], [0.0, 1.0, 0.3]])}

    def estimate(key):
        grad, n = jax.grad(with_drawn_labels, has_aux=True)(model, key, X, LABELS)
        return n * grad["w"] ** 2

    mean = jnp.mean(jax.vmap(estimate)(jax.random.split(jax.random.key(0), 20_000)), axis=0)
    probs = jax.nn.softmax(X @ model["w"])
    expected = jnp.einsum("bi,bj->ij", X**2, probs * (1 - probs)) / 4
    np.testing.assert_allclose(mean, expected, rtol=0.05)
    # And it is what a step takes, with labels of its own in each estimate.
    tx = sl.contrib.ScaleBySophia(b2=0.0, update_interval=1, estimator="gauss_newton_bartlett")
    tx = tx | sl.ScaleByLearningRate(0.0)
    step = sl.train_step(cross_entropy, sampled_loss_fn=with_drawn_labels)
    opt, seen = sl.Optimizer(tx, model), []
    for _ in range(3):
        model, opt, _ = step(model, opt, X, LABELS)
        seen.append(np.asarray(opt.state[0].hessian["w"]))
    assert not np.array_equal(seen[0], seen[1]) or not np.array_equal(seen[1], seen[2])


@pytest.mark.slow
def test_each_group_of_a_partition_has_the_hessian_of_its_own_parameters():
    def loss_fn(model):
        return model["a"] ** 2 * model["b"] ** 3

    model = {"a": jnp.array(2.0), "b": jnp.array(3.0)}
    tx = sl.contrib.sophia(0.1, b2=0.0).partition(
        {sl.where.path("a"): sl.contrib.sophia(0.1, b2=0.0)}
    )
    _, opt, _ = sl.train_step(loss_fn)(model, sl.Optimizer(tx, model))
    first, rest = opt.state.groups
    assert first[0].hessian["a"] == 2 * 27
    assert rest[0].hessian["b"] == 4 * 6 * 3


@pytest.mark.slow
def test_estimates_need_little_scratch_memory_and_other_steps_none():
    def loss_fn(w):
        return jnp.sum(jnp.tanh(w) ** 2)

    text = (
        sl.train_step(loss_fn).lower(START, sl.Optimizer(sl.contrib.sophia(0.1), START)).as_text()
    )
    outside, *_ = text.partition("stablehlo.case")
    assert outside.count("stablehlo.tanh") == 1
    assert text.count("stablehlo.tanh") > 1
    assert "threefry" not in outside

    params = {name: jnp.ones((128, 256)) for name in "abc"}

    def step(params, opt, grads):
        return opt.step(
            params, grads, value_fn=lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p))
        )

    opt = sl.Optimizer(sl.contrib.sophia(1e-3), params)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt, params).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 0.1 * 3 * params["a"].nbytes


def test_complex_parameters_and_missing_inputs_are_refused():
    with pytest.raises(TypeError, match=r"but 'z' is complex64. Write `tx\.split_complex\(\)`"):
        sl.Optimizer(sl.contrib.sophia(0.1), {"z": jnp.ones(2, jnp.complex64)})
    z = jnp.array([1 + 2j])
    opt = sl.Optimizer(sl.contrib.sophia(0.1, b2=0.0).split_complex(), z)
    step = sl.train_step(lambda z: jnp.sum(z.real**2 + 3 * z.imag**2))
    _, opt, _ = step(z, opt)
    assert (opt.state[0].hessian.real, opt.state[0].hessian.imag) == (2, 6)

    opt = sl.Optimizer(sl.contrib.sophia(0.1), START)
    with pytest.raises(TypeError, match=r"needs 'grad_fn'.*value_fn=fn"):
        opt.step(START, START)
    opt = sl.Optimizer(sl.contrib.sophia(0.1, estimator="gauss_newton_bartlett"), START)
    with pytest.raises(TypeError, match=r"needs 'sampled_grad_fn'.*sampled_loss_fn=fn"):
        sl.train_step(quadratic)(START, opt)
    with pytest.raises(TypeError, match=r"`sampled_loss_fn` must return a pair.*number of them"):
        sl.train_step(quadratic, sampled_loss_fn=lambda w, key: quadratic(w))(START, opt)
    with pytest.raises(TypeError, match="`sampled_grad_fn` must return a pair"):
        opt.step(START, START, sampled_grad_fn=lambda w, key: w)
    with pytest.raises(TypeError, match="sampled_loss_fn must be a function of the model"):
        sl.train_step(quadratic, sampled_loss_fn=3)
    tx = sl.contrib.ScaleBySophia()
    with pytest.raises(TypeError, match="ScaleBySophia needs 'grad_fn'"):
        tx.update(START, tx.init(START), START, sl.Context(step=0))


@pytest.mark.slow
def test_signs_are_random_and_a_scaled_loss_changes_no_estimate():
    # In steps that scale the loss, and by hand.
    for estimator in ("hutchinson", "gauss_newton_bartlett"):
        model = {"w": jnp.arange(6.0).reshape(2, 3)}
        tx = sl.contrib.sophia(0.1, b2=0.0, estimator=estimator)
        step = sl.train_step(cross_entropy, sampled_loss_fn=given_labels, donate=False)
        plain, opt, _ = step(model, sl.Optimizer(tx, model), X, LABELS)
        new, scaled, _ = step(model, sl.Optimizer(tx.scale_loss(2.0**10), model), X, LABELS)
        estimates = opt.state[0].hessian["w"], scaled.state.inner[0].hessian["w"]
        np.testing.assert_allclose(*estimates, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(new["w"], plain["w"], rtol=1e-5)
    opt = sl.Optimizer(sl.contrib.sophia(0.1, b2=0.0).scale_loss(2.0**10), START)
    grads = jax.grad(lambda w: opt.loss_scale * quadratic(w))(START)
    _, opt = opt.step(START, grads, value_fn=quadratic)
    np.testing.assert_allclose(opt.state.inner[0].hessian, CURVATURE, rtol=1e-6)

    # The Hessian of half the square of a sum is 1 everywhere, so the estimate is v·Σv.
    w = jnp.zeros((512, 40))
    tx = sl.contrib.ScaleBySophia(b2=0.0, update_interval=1)
    _, opt = sl.Optimizer(tx, w).step(w, w, value_fn=lambda w: 0.5 * jnp.sum(w) ** 2)
    total = np.sqrt(np.sum(opt.state.hessian))
    signs = np.asarray(opt.state.hessian) / total
    np.testing.assert_allclose(np.abs(signs), 1.0, rtol=1e-5)
    # Each is as often 1 as −1, and no two are correlated: five standard deviations.
    assert total < 5 * signs.size**0.5
    np.testing.assert_array_less(np.abs(signs.T @ signs - 512 * np.eye(40)), 5 * 512**0.5)
