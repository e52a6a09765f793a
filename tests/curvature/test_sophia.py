"""Sophia: its two estimates of the diagonal of the Hessian, and who computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl

CURVATURE = jnp.array([0.5, 2.0, -1.0, 8.0])
START = jnp.array([1.0, -2.0, 3.0, 0.5])
X = jax.random.normal(jax.random.key(1), (4, 2))
LABELS = jnp.array([0, 1, 2, 0])


def quadratic(w):
    return 0.5 * jnp.sum(CURVATURE * w**2)


def cross_entropy(model, x, labels):
    log_probs = jax.nn.log_softmax(x @ model["w"])
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))


def sampled(model, key, x, labels):
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
    step, w, opt = sl.train_step(quadratic), START, sl.Optimizer(tx, START)
    for _ in range(5):
        w, opt, _ = step(w, opt)
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
        grad, n = jax.grad(sampled, has_aux=True)(model, key, X, LABELS)
        return n * grad["w"] ** 2

    mean = jnp.mean(jax.vmap(estimate)(jax.random.split(jax.random.key(0), 20_000)), axis=0)
    probs = jax.nn.softmax(X @ model["w"])
    expected = jnp.einsum("bi,bj->ij", X**2, probs * (1 - probs)) / 4
    np.testing.assert_allclose(mean, expected, rtol=0.05)
    # And it is what a step takes, with labels of its own in each estimate.
    tx = sl.contrib.ScaleBySophia(b2=0.0, update_interval=1, estimator="gauss_newton_bartlett")
    tx = tx | sl.ScaleByLearningRate(0.0)
    step = sl.train_step(cross_entropy, sampled_loss_fn=sampled)
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
