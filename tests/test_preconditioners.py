"""Cautious updates, the hyperball constraint, and the rules that precondition both sides."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import slalom_trajectory

# --- Cautious, and its decay ------------------------------------------------------------------


def cautious(updates, grads, **options):
    context = sl.Context(step=0, grad=grads)
    return sl.Cautious(**options).update(updates, None, context=context)[0]


def test_cautious_drops_what_points_against_the_gradient_and_scales_up_the_rest():
    random = np.random.default_rng(0)
    u, g = random.standard_normal((2, 3, 5)).astype(np.float32)
    g[0, 0] = 0
    keep = u * g > 0
    np.testing.assert_allclose(
        cautious(jnp.asarray(u), jnp.asarray(g)), u * keep / keep.mean(), rtol=1e-6
    )
    np.testing.assert_allclose(
        cautious(jnp.asarray(u), jnp.asarray(g), min_fraction=1.0), u * keep, rtol=1e-6
    )


def test_cautious_without_any_agreement_is_zero():
    x = jnp.array([1.0, -2.0])
    assert jnp.all(cautious(x, -x) == 0)
    assert jnp.all(cautious(0 * x, x) == 0)
    # One of 4000 entries agrees: it grows by 1000, not by 4000.
    one = jnp.ones(4000).at[1:].set(-1.0)
    np.testing.assert_allclose(cautious(one, jnp.ones(4000))[0], 1000, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cautious_compares_tiny_and_huge_numbers(dtype):
    limits = jnp.finfo(dtype)
    x = jnp.array([limits.tiny, limits.tiny, limits.max, limits.max], dtype)
    g = x * jnp.array([1, -1, 1, -1], dtype)
    kept = cautious(x, g, min_fraction=1.0)
    assert (kept != 0).tolist() == [True, False, True, False]


def test_cautious_takes_a_complex_entry_as_a_vector():
    u = jnp.array([1 + 1j, 1 + 1j, 1e-30j, 1e30 + 1j])
    g = jnp.array([2 - 1j, -2 + 1j, 1e-30j, -1e30 + 0j])
    np.testing.assert_array_equal(cautious(u, g, min_fraction=1.0), u.at[1].set(0).at[3].set(0))


def test_cautious_asks_for_the_gradient_by_name():
    params = {"w": jnp.ones(2)}
    opt = sl.Optimizer(sl.ScaleByAdam() | sl.Cautious() | sl.Scale(-0.1), params)
    with pytest.raises(TypeError, match=r"Cautious.*needs 'grad'.*grad=grads"):
        opt.step(params, params)


def test_cautious_decay_shrinks_only_what_the_update_shrinks():
    u, p = jnp.array([1.0, 1.0, 0.0, -1.0]), jnp.array([2.0, -2.0, 2.0, -2.0])
    link = sl.AddDecayedWeights(0.1, cautious=True)
    np.testing.assert_allclose(link.update(u, None, p)[0], [1.2, 1.0, 0.0, -1.2], rtol=1e-6)


# --- KeepInitialNorm --------------------------------------------------------------------------


def test_parameters_keep_their_norm_and_turn_by_the_learning_rate():
    model = {"w": jax.random.normal(jax.random.key(0), (4, 3)), "zero": jnp.zeros(2)}
    radius = float(jnp.linalg.norm(model["w"]))
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), (20, *x.shape)), model)
    tx = sl.ScaleByTrustRatio() | sl.ScaleByLearningRate(0.1) | sl.KeepInitialNorm()
    history, _ = slalom_trajectory(tx, model, grads)
    np.testing.assert_allclose(
        jnp.linalg.norm(history["w"], axis=(1, 2)), np.full(20, radius), rtol=1e-6
    )
    g = np.asarray(grads["w"][0], np.float64)
    p = np.asarray(model["w"], np.float64)
    moved = p - 0.1 * radius * g / np.linalg.norm(g)
    np.testing.assert_allclose(
        history["w"][0], moved * radius / np.linalg.norm(moved), rtol=1e-5, atol=1e-6
    )
    # What starts at zero is free.
    assert jnp.linalg.norm(history["zero"][-1]) > 1e-3


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e18, 1e30, 3e38])
def test_a_projection_to_the_norm_is_finite(size):
    params = jnp.array([3.0, 4.0])
    opt = sl.Optimizer(sl.Scale(-1.0) | sl.KeepInitialNorm(), params)
    stepped, opt = opt.step(params, jnp.array([size, 0.0]))
    assert jnp.all(jnp.isfinite(stepped))
    if size < 1e18:
        np.testing.assert_allclose(stepped, params, rtol=1e-6)
    stepped, _ = opt.step(stepped, params)
    assert jnp.all(jnp.isfinite(stepped))


def test_a_reset_takes_the_norm_of_the_present_parameters():
    params = {"a": jnp.ones(4), "b": jnp.ones(9)}
    opt = sl.Optimizer(sl.sgd(0.1) | sl.KeepInitialNorm(), params)
    larger = jax.tree.map(lambda x: 2 * x, params)
    opt = opt.reset(larger, sl.where.path("b"))
    assert eqx.tree_equal(
        opt.state_of(sl.KeepInitialNorm).radius, {"a": jnp.asarray(2.0), "b": jnp.asarray(6.0)}
    )
