"""Gradients and parameters whose squares overflow or underflow."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slow_except

SIZES = [1e-36, 1e-30, 1e-22, 1e-16, 1.0, 1e15, 3e20, 1e36]


def around(size):
    return jnp.asarray([[3.0, -4.0], [0.0, 1.0]], jnp.float32) * jnp.float32(size)


def test_trust_ratios_of_any_size():
    scale = jax.jit(lambda u, p: sl.ScaleByTrustRatio().update(u, None, p)[0])
    for size in SIZES:
        for of_params in (1e-15, 1.0, 4e20):
            u = around(size)
            wanted = np.asarray(u) / np.float32(size) * of_params
            out = scale(u, around(of_params))
            np.testing.assert_allclose(out, wanted, rtol=2e-6, err_msg=f"{size}, {of_params}")


@pytest.mark.parametrize("name", slow_except(["lamb", "lars", "fromage"], "lars"))
def test_large_parameters_take_a_finite_step(name):
    params = {"w": around(4e20), "b": jnp.zeros(2)}
    grads = {"w": around(1.0), "b": jnp.ones(2)}
    opt = sl.Optimizer(getattr(sl, name)(0.1), params)
    updates, _ = opt.update(params, grads)
    scale = np.linalg.norm(np.asarray(params["w"], np.float64))
    size = np.linalg.norm(np.asarray(updates["w"], np.float64))
    assert 1e-5 * scale < size < scale


def test_a_norm_that_no_float_holds_is_not_a_silent_zero():
    u = jnp.full(4, 3e38)
    for tx in (sl.NormalizeByUpdateNorm(), sl.ScaleByTrustRatio(), sl.ClipByGlobalNorm(1.0)):
        out, _ = tx.update(u, tx.init(u), jnp.ones(4))
        assert not bool(jnp.any(jnp.isfinite(out)))


def test_the_derivative_of_a_norm_of_any_size():
    derivative = jax.jit(jax.grad(sl.tree.scaled_norm))
    for size in (1e-30, 1.0, 1e30):
        wanted = around(1.0) / np.sqrt(26)
        np.testing.assert_allclose(derivative(around(size)), wanted, rtol=1e-6, err_msg=f"{size}")


HUGE = [(shape, bound) for shape in [(3,), (4, 4)] for bound in (None, 1.0)]


@pytest.mark.parametrize("case", slow_except(HUGE, HUGE[-1]), ids=str)
def test_adafactor_recovers_from_a_huge_gradient(case):
    shape, clipping_threshold = case
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, clipping_threshold=clipping_threshold)
    state, update = tx.init(jnp.ones(shape)), jax.jit(tx.update)
    for g in (1.0, 3e20, 1.0):
        updates, state = update(jnp.full(shape, g), state)
        assert bool(jnp.all(jnp.isfinite(updates) & (updates > 0)))
    later = jnp.full(shape, 1e17)
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 200, lambda _, s: tx.update(later, s)[1], s))(
        state
    )
    updates, _ = update(later, state)
    assert bool(jnp.all(updates > 1e-2))


def test_adafactor_takes_the_smallest_epsilon():
    tx = sl.ScaleByFactoredRms(min_dim_size_to_factor=2, eps=1e-300)
    zeros = {"vector": jnp.zeros(3), "matrix": jnp.zeros((4, 4))}
    updates, _ = jax.jit(tx.update)(zeros, tx.init(zeros))
    assert eqx.tree_equal(updates, zeros)


def test_the_norm_of_a_leaf_does_not_depend_on_the_others():
    norms_of = jax.jit(sl.tree.leaf_norms)
    for other in (0.0, 1e-30, 1e30):
        leaves = {"a": around(0.3), "b": around(7.0), "c": around(other)}
        norms = norms_of(leaves | {"empty": jnp.zeros((0, 2))})
        for name, size in (("a", 0.3), ("b", 7.0), ("c", other), ("empty", 0.0)):
            np.testing.assert_allclose(norms[name], size * np.sqrt(26), rtol=1e-6)
