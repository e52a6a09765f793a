"""`sl.LeastSquares`: blocks, weights, and its linearization."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import slalom as sl
from helpers import Counting, after_training, assert_close


def model_of(key=0):
    return eqx.nn.MLP(2, 2, 4, 1, jnp.tanh, key=jax.random.key(key))


def fit(model, x, y):
    return model(x) - y


def edge(model, x):
    return jnp.stack([model(x)[0], model(x)[1], jnp.sum(model(x))]).reshape(3, 1)


def batch(dtype=jnp.float32):
    x = jax.random.normal(jax.random.key(1), (7, 2), dtype)
    z = jax.random.normal(jax.random.key(2), (3, 2), dtype)
    return {"fit": (x, x**2), "edge": z}


BLOCKS = sl.LeastSquares({"fit": fit, "edge": edge}, weights={"edge": 5.0})


def dense(model, data, weights=(1.0, 5.0)):
    """The scaled residuals and their Jacobian, all at once."""
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    flat, unflatten = ravel_pytree(params)

    def rho(flat):
        model = eqx.combine(unflatten(flat), rest)
        first = jax.vmap(lambda x, y: fit(model, x, y))(*data["fit"])
        second = jax.vmap(lambda x: edge(model, x))(data["edge"])
        parts = [
            r.reshape(-1) * jnp.sqrt(2 * w / r.size)
            for w, r in zip(weights, (first, second), strict=True)
        ]
        return jnp.concatenate(parts)

    return np.asarray(rho(flat)), np.asarray(jax.jacrev(rho)(flat))


@pytest.mark.slow
def test_the_linearization_is_that_of_all_residuals_at_once(x64):
    model, data = model_of(), batch(jnp.float64)
    params = eqx.filter(model, eqx.is_inexact_array)
    residuals = BLOCKS.on(data).of(lambda p: eqx.combine(p, model))
    rho, jacobian = dense(model, data)
    v, y = np.linspace(-1, 1, jacobian.shape[1]), np.linspace(-1, 1, rho.size)
    close = {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(BLOCKS(model, data), rho @ rho / 2, rtol=1e-14)
    for chunk in (None, 1, 2, 7):
        linear = residuals.at(params, chunk)
        np.testing.assert_allclose(linear.value, rho @ rho / 2, **close)
        np.testing.assert_allclose(linear.vector, rho, **close)
        np.testing.assert_allclose(linear.gradient, jacobian.T @ rho, **close)
        np.testing.assert_allclose(linear.push(jnp.asarray(v)), jacobian @ v, **close)
        np.testing.assert_allclose(linear.pull(jnp.asarray(y)), jacobian.T @ y, **close)
        np.testing.assert_allclose(linear.jacobian(), jacobian, **close)
        np.testing.assert_allclose(linear.kernel(), jacobian @ jacobian.T, **close)
        gram, rhs = linear.fold(
            lambda carry, rows, part: (carry[0] + rows.T @ rows, carry[1] + rows.T @ part),
            (jnp.zeros((v.size, v.size)), jnp.zeros(v.size)),
            linear.vector,
        )
        np.testing.assert_allclose(gram, jacobian.T @ jacobian, **close)
        np.testing.assert_allclose(rhs, jacobian.T @ rho, **close)


@pytest.mark.slow
def test_complex_residuals_and_parameters_count_as_pairs(x64):
    z = jnp.array([1.0 + 2j, -1j, 0.5])
    params = {"a": jnp.array(0.3 - 0.2j), "b": jnp.array([0.1, 0.2])}

    def residual(p, z):
        b = p["b"].astype(complex)
        return p["a"] * z + jnp.conj(p["a"]) * b[0] + b[1]

    loss_fn = sl.LeastSquares(residual)
    r = jax.vmap(lambda z: residual(params, z))(z)
    np.testing.assert_allclose(loss_fn(params, z), np.mean(np.abs(r) ** 2), rtol=1e-14)

    def rho(flat):
        p = {"a": jax.lax.complex(flat[0], flat[1]), "b": flat[2:]}
        r = jax.vmap(lambda z: residual(p, z))(z)
        return jnp.stack([r.real, r.imag], axis=1).reshape(-1) * jnp.sqrt(2 / 3)

    flat = jnp.array([0.3, -0.2, 0.1, 0.2])
    linear = loss_fn.on(z).at(params)
    np.testing.assert_allclose(linear.vector, rho(flat), rtol=1e-13)
    np.testing.assert_allclose(linear.jacobian(), jax.jacobian(rho)(flat), rtol=1e-13, atol=1e-15)
    # The gradient as a tree is that of `jax.grad`, conjugated.
    expected = jax.tree.map(jnp.conj, jax.grad(lambda p: loss_fn(p, z))(params))
    found = linear.updates(linear.gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


@pytest.mark.slow
def test_residuals_of_all_data_and_blocks_in_microbatches(x64):
    def trajectory(p, t, y):
        return jnp.exp(-p["rate"] * t) * p["start"] - y

    p = {"rate": jnp.array(0.5), "start": jnp.array(2.0)}
    t = jnp.linspace(0, 1, 6)
    y = jnp.sin(t)
    whole = sl.LeastSquares(trajectory, per_example=False)
    each = sl.LeastSquares(trajectory)
    np.testing.assert_allclose(whole(p, t, y), each(p, t, y), rtol=1e-14)
    one, other = whole.on(t, y).at(p), each.on(t, y).at(p)
    np.testing.assert_allclose(one.jacobian(), other.jacobian(), rtol=1e-13)

    data = batch(jnp.float64)
    data = {"fit": tuple(x[:6] for x in data["fit"]), "edge": data["edge"]}
    weights = {"fit": jnp.arange(6.0)}
    for tx in (sl.sgd(0.1), sl.levenberg_marquardt()):
        opt = sl.Optimizer(tx, model_of())
        whole = sl.train_step(BLOCKS, donate=False)
        parts = sl.train_step(BLOCKS, donate=False, microbatches=3)
        a = whole(model_of(), opt, data, example_weights=weights)
        b = parts(model_of(), opt, data, example_weights=weights)
        np.testing.assert_allclose(a[2], b[2], rtol=1e-12)
        assert_close(a[0], b[0], rtol=1e-10)


@pytest.mark.slow
def test_arguments_without_examples_and_weights_of_examples(x64):
    def residual(p, x, scale, key, power):
        return p * x * scale + jax.random.normal(key) ** power

    x, key = jnp.arange(1.0, 5.0), jax.random.key(3)
    loss_fn = sl.LeastSquares(residual, in_axes=(0, None, None, None))
    p, omega = jnp.array(0.5), jnp.array([1.0, 0.0, 2.0, 0.5])
    r = p * x * 3.0 + jax.random.normal(key) ** 2
    found = jax.jit(lambda p: loss_fn(p, x, jnp.array(3.0), key, 2, example_weights=omega))(p)
    np.testing.assert_allclose(found, np.sum(omega * r**2) / 4, rtol=1e-14)
    linear = loss_fn.on(x, jnp.array(3.0), key, 2, example_weights=omega).at(p)
    np.testing.assert_allclose(linear.value, np.sum(linear.vector**2) / 2, rtol=1e-14)


@pytest.mark.slow
def test_new_weights_and_arrays_reuse_the_program():
    @Counting
    def counted(scale, model, x, y):
        return scale * fit(model, x, y)

    def loss_with(weight):
        scaled = functools.partial(counted, jnp.array(weight))
        return sl.LeastSquares({"fit": scaled, "edge": edge}, weights={"edge": weight})

    model, data = model_of(), batch()
    opt = sl.Optimizer(sl.adam(0.1), model)
    model, opt, first = sl.train_step(loss_with(1.0))(model, opt, data)
    before = counted.traces
    model, opt, second = sl.train_step(loss_with(100.0))(model, opt, data)
    assert counted.traces == before
    assert second > first


@pytest.mark.slow
def test_per_example_gradients_of_one_block_are_those_of_its_examples():
    loss_fn = sl.LeastSquares(fit)
    data = batch()["fit"]
    tx = sl.PerExampleGlobalNormClip(1e6) | sl.sgd(0.1 / 7)
    model, _, loss = sl.train_step(loss_fn)(model_of(), sl.Optimizer(tx, model_of()), *data)
    plain, _, same = sl.train_step(loss_fn)(
        model_of(), sl.Optimizer(sl.sgd(0.1), model_of()), *data
    )
    np.testing.assert_allclose(loss, same, rtol=1e-6)
    np.testing.assert_allclose(model.layers[0].weight, plain.layers[0].weight, rtol=1e-5)


@jax.custom_vjp
def _by_reverse_mode(u):
    return jnp.exp(u)


_by_reverse_mode.defvjp(lambda u: (jnp.exp(u),) * 2, lambda e, y: (e * y,))


def _by_forward_mode(u):
    """The series of exp, in a loop that has no reverse mode."""

    def body(carry):
        n, term, total = carry
        return n + 1, term * u / n, total + term

    start = (jnp.ones_like(u), jnp.ones_like(u), jnp.zeros_like(u))
    return jax.lax.while_loop(lambda carry: carry[0] < 30, body, start)[2]


RULES = {
    "lm": sl.levenberg_marquardt(),
    "lm in chunks": sl.levenberg_marquardt(chunk=3),
    "gauss_newton": sl.gauss_newton(),
    "natural_gradient": sl.natural_gradient(0.7, 1e-9),
}
MODES = {"reverse": _by_reverse_mode, "forward": _by_forward_mode}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_residuals_may_have_one_mode_of_differentiation(x64, rule, mode):
    exp = MODES[mode]
    loss_fn = sl.LeastSquares(lambda p, x, y: p["a"] * exp(p["b"] * x) - y)
    p, x = {"a": jnp.array(1.0), "b": jnp.array(0.0)}, jnp.linspace(0, 1, 7)
    found = sl.minimize(loss_fn, RULES[rule], p, x, 2 * jnp.exp(-x), max_steps=60)
    assert found.converged
    p, _, _ = after_training(sl.train_step(loss_fn), RULES[rule], 20, p, x, 2 * jnp.exp(-x))
    for fitted in (found.model, p):
        np.testing.assert_allclose([fitted["a"], fitted["b"]], [2, -1], rtol=1e-5)
