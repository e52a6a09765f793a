"""`tx.sam()`: the gradient at the worst point nearby, by `sl.train_step` and by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_close, mean_square, mlp, params_of

X = jax.random.normal(jax.random.key(1), (4, 2))
Y = jnp.sin(X.sum(axis=1, keepdims=True))
MODEL = mlp()


@eqx.filter_jit
def by_the_book(model, steps, rho, rate, every):
    """Adaptive SAM, on every few steps."""
    for n in range(steps):
        grads = eqx.filter_grad(mean_square)(model, X, Y)
        if n % every == 0:
            sizes = jax.tree.map(jnp.abs, params_of(model))
            scaled = jax.tree.map(jnp.multiply, sizes, grads)
            norm = jnp.sqrt(sum(jnp.sum(u**2) for u in jax.tree.leaves(scaled)))
            up = jax.tree.map(lambda s, u, n=norm: rho * s * u / n, sizes, scaled)
            grads = eqx.filter_grad(mean_square)(eqx.apply_updates(model, up), X, Y)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [None, 2])
def test_steps_are_those_of_the_textbook(microbatches):
    expected = by_the_book(MODEL, 3, 0.3, 0.1, every=2)
    step = sl.train_step(mean_square, donate=False, microbatches=microbatches)
    tx = sl.sgd(0.1).sam(0.3, adaptive=True, every=2)
    for either in (tx, tx.scale_loss()):
        model, opt = MODEL, sl.Optimizer(either, MODEL)
        for _ in range(3):
            model, opt, _ = step(model, opt, X, Y)
        assert_close(params_of(model), params_of(expected), rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_package_takes_the_same_steps(adaptive):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    package = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed")
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = package.SAM([weight], torch.optim.SGD, rho=0.3, adaptive=adaptive, lr=0.1)
    for _ in range(3):
        for half_step in (optimizer.first_step, optimizer.second_step):
            torch.sum(torch.sin(weight) * weight).backward()
            half_step(zero_grad=True)

    @sl.train_step
    def step(w):
        return jnp.sum(jnp.sin(w) * w)

    ours = jnp.array([1.0, -2.0, 3.0])
    opt = sl.Optimizer(sl.sgd(0.1).sam(0.3, adaptive), ours)
    for _ in range(3):
        ours, opt, _ = step(ours, opt)
    np.testing.assert_allclose(ours, weight.detach().numpy(), rtol=1e-5)


@pytest.mark.slow
def test_both_gradients_see_the_same_masks_and_transformation():
    def loss_fn(w, key):
        return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, w.shape), w**2, 0))

    seen = []

    def doubled(grads):
        seen.append(1)
        return 2 * grads

    step = sl.train_step(loss_fn, transform_grads=doubled)
    w = jnp.arange(1.0, 9.0)
    new, _, loss = step(w, sl.Optimizer(sl.sgd(0.1).sam(0.5), w), jax.random.key(3))
    assert len(seen) == 2
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, w.shape).astype(float)
    grad = 4 * kept * w
    worst = w + 0.5 * grad / jnp.linalg.norm(grad)
    np.testing.assert_allclose(new, w - 0.1 * 4 * kept * worst, rtol=1e-5)
    np.testing.assert_allclose(loss, jnp.sum(kept * w**2), rtol=1e-6)


@pytest.mark.slow
def test_second_gradients_of_groups_idle_steps_and_overflows():
    vectors = sl.where.ndim(1)

    @sl.train_step
    def step(model):
        return jnp.sum(model["m"] ** 2) * jnp.sum(model["v"] ** 2)

    model = {"m": jnp.ones((2, 2)), "v": jnp.array([3.0, 4.0])}
    tx = sl.sgd(0.1).partition({vectors: sl.sgd(0.01).sam(1.0)})
    new, _, _ = step(model, sl.Optimizer(tx, model))
    np.testing.assert_allclose(new["m"], model["m"] * (1 - 0.1 * 2 * 25), rtol=1e-6)
    worst = model["v"] * (1 + 1 / 5)
    np.testing.assert_allclose(new["v"], model["v"] - 0.01 * 2 * 4 * worst, rtol=1e-6)

    def loss_fn(w):
        return jnp.sum(jnp.tanh(w) ** 2)

    w = jnp.ones(5)
    tx = sl.sgd(0.1).sam(0.5, every=3)
    text = sl.train_step(loss_fn).lower(w, sl.Optimizer(tx, w)).as_text()
    outside, *_ = text.partition("stablehlo.case")
    assert outside.count("stablehlo.tanh") == 1
    assert text.count("stablehlo.tanh") == 2

    def loss_fn(w):
        return jnp.sum(jnp.where(w > 1, jnp.inf, 1.0) * w)

    w = jnp.array([0.9, 0.5])
    opt = sl.Optimizer(sl.sgd(0.1).if_finite().sam(1.0).scale_loss(), w)
    new, opt, _ = sl.train_step(loss_fn)(w, opt)
    np.testing.assert_array_equal(new, w)
    assert opt.metrics["scale_loss.last_finite"]  # the first gradient was


def test_losses_and_places_are_checked_and_a_zero_gradient_perturbs_nothing():
    w = jnp.zeros(3)
    new, _, _ = sl.train_step(lambda w: jnp.sum(w**2))(w, sl.Optimizer(sl.sgd(0.1).sam(), w))
    assert jnp.all(new == 0)

    opt = sl.Optimizer(sl.sgd(0.1).sam(), MODEL)
    with pytest.raises(TypeError, match=r"Sam \('sam'\) needs 'grad_fn': pass the loss as a funct"):
        opt.step(MODEL, MODEL)
    tx = sl.sgd(0.1).sam()
    with pytest.raises(TypeError, match="Sam needs 'grad_fn'"):
        tx.update(X, tx.init(X), X)
    converted = sl.interop.to_optax(tx)
    with pytest.raises(TypeError, match=r"params, value_fn=\.\.\."):
        converted.update(X, converted.init(X), X)

    model = {"w": X}
    opt = sl.Optimizer(sl.sgd(0.1).sam(), model)
    with pytest.raises(ValueError, match="The result of `grad_fn` does not have the structure"):
        opt.step(model, model, grad_fn=lambda model: {"v": X})
    with pytest.raises(TypeError, match="No transform uses 'grad_fn'"):
        sl.Optimizer(sl.sgd(0.1), model).step(model, model, grad_fn=lambda model: model)
    with pytest.raises(ValueError, match=r"`\(clip \| adam\)\.sam\(0\.05\)`"):
        sl.ClipByGlobalNorm(1.0) | sl.sgd(0.1).sam()
    with pytest.raises(ValueError, match=r"`tx\.every_k\(k\)\.sam\(\.\.\.\)`"):
        sl.sgd(0.1).sam().every_k(2)


def test_by_hand_the_second_gradient_is_that_of_the_loss_itself():
    def loss_fn(w):
        return jnp.sum(w**2) / 2

    w = jnp.array([3.0, 4.0])
    opt = sl.Optimizer(sl.sgd(0.1).sam(1.0).scale_loss(2.0**10), w)
    new, _ = opt.step(w, jax.grad(lambda w: opt.loss_scale * loss_fn(w))(w), value_fn=loss_fn)
    np.testing.assert_allclose(new, w - 0.1 * w * (1 + 1 / 5), rtol=1e-6)
