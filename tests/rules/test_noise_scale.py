"""The gradient noise scale: estimates without bias, from examples or from two batch sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl

MEAN, DEVIATION = 0.5, 2.0
SIZE = 12
EXACT = SIZE * DEVIATION**2 / (SIZE * MEAN**2)
"""The noise scale of gradients that are normal with this mean and deviation."""


def draw(key, examples):
    w = MEAN + DEVIATION * jax.random.normal(key, (examples, SIZE))
    return {"w": w[:, :8].reshape(-1, 2, 4), "b": w[:, 8:], "hole": None}


@pytest.mark.slow
def test_examples_give_the_noise_scale_of_their_distribution():
    tx = sl.contrib.MeasureGradientNoise(0.9999) | sl.sgd(0.0)
    params = {"w": jnp.zeros((2, 4)), "b": jnp.zeros(4), "hole": None}

    @jax.jit
    def run(opt):
        def body(opt, key):
            return opt.update(params, draw(key, 8))[1], None

        return jax.lax.scan(body, opt, jax.random.split(jax.random.key(0), 2_000))[0]

    metrics = run(sl.Optimizer(tx, params)).metrics
    np.testing.assert_allclose(metrics["noise_scale"], EXACT, rtol=0.05)
    np.testing.assert_allclose(metrics["gradient_variance"], SIZE * DEVIATION**2, rtol=0.05)
    np.testing.assert_allclose(metrics["squared_gradient_norm"], SIZE * MEAN**2, rtol=0.05)


@pytest.mark.slow
def test_one_step_is_the_formula_also_in_microbatches():
    grads = draw(jax.random.key(1), 5)
    params = jax.tree.map(lambda g: g[0], grads)
    tx = sl.contrib.MeasureGradientNoise()
    updates, state = tx.update(grads, tx.init(params), params)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, g.mean(0), rtol=1e-6), updates, grads)
    rows = np.concatenate([np.asarray(g).reshape(5, -1) for g in jax.tree.leaves(grads)], 1)
    trace = np.sum(np.var(rows, 0, ddof=1))
    np.testing.assert_allclose(state.variance, trace, rtol=1e-5)
    norm = np.sum(rows.mean(0) ** 2) - trace / 5
    np.testing.assert_allclose(state.squared_norm, norm, rtol=1e-4)

    def loss(w, x):
        return jnp.mean((x - w[None]) ** 2)

    x = jax.random.normal(jax.random.key(0), (8, 3))
    tx = sl.contrib.MeasureGradientNoise() | sl.sgd(0.1)
    w = jnp.ones(3)
    found = []
    for microbatches in (None, 4):
        step = sl.train_step(loss, donate=False, microbatches=microbatches)
        found.append(step(w, sl.Optimizer(tx, w), x)[1].metrics["noise_scale"])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_two_batch_sizes_give_the_same_and_bad_input_is_refused():
    # The expected squared norm of the mean of n gradients.
    def squared(n):
        return SIZE * (MEAN**2 + DEVIATION**2 / n)

    found = sl.contrib.gradient_noise_scale(squared(4), 4, squared(64), 64)
    np.testing.assert_allclose(found, EXACT, rtol=1e-5)
    assert sl.contrib.gradient_noise_scale(2.0, 1, 0.5, 2) == jnp.inf

    with pytest.raises(ValueError, match=r"^gradient_noise_scale needs a large batch that is larg"):
        sl.contrib.gradient_noise_scale(1.0, 4, 1.0, 4)
    tx, w = sl.contrib.MeasureGradientNoise(), jnp.ones(3)
    with pytest.raises(ValueError, match=r"^MeasureGradientNoise needs the gradients of at"):
        tx.update(w[None], tx.init(w), w)
