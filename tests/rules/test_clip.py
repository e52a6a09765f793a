"""Clipping by the norm of the step before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl

PARAMS = {"w": jnp.zeros(2)}


def clipped(tx, norms):
    """The norms that come out, and the optimizer after them."""
    opt, out = sl.Optimizer(tx, PARAMS), []
    for norm in norms:
        updates, opt = opt.update(PARAMS, {"w": jnp.array([0.6, -0.8]) * norm})
        out.append(float(jnp.linalg.norm(updates["w"]) * jnp.sign(updates["w"][0])))
    return np.array(out), opt


DELAYED = sl.ClipByGlobalNorm(1.0, delayed=True)


def test_a_delayed_clip_uses_the_norm_of_the_last_step_that_is_finite_and_not_skipped():
    out, opt = clipped(DELAYED, [4.0, 2.0, 0.5, 3.0])
    np.testing.assert_allclose(out, [4.0, 2 / 4, 0.5 / 2, 3.0], rtol=1e-6)
    np.testing.assert_allclose(opt.state.norm, 3.0, rtol=1e-6)
    out, _ = clipped(DELAYED, [4.0, np.nan, 2.0, np.inf, 2.0])
    np.testing.assert_allclose(out[[0, 2, 4]], [4.0, 2 / 4, 2 / 2], rtol=1e-6)
    assert not np.isfinite(out[[1, 3]]).any()
    out, _ = clipped((DELAYED | sl.Scale(-1.0)).if_finite(), [4.0, np.nan, 2.0])
    np.testing.assert_allclose(out, [-4.0, 0.0, -2 / 4], rtol=1e-6)


@pytest.mark.slow
def test_a_delayed_clip_does_not_hold_all_gradients():
    layers, width = 8, 256
    model = [jnp.ones((width, width)) for _ in range(layers)]

    def loss_fn(model, x):
        for w in model:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def scratch(tx):
        step = sl.train_step(loss_fn, donate="all")
        compiled = step.lower(model, sl.Optimizer(tx, model), jnp.ones((4, width))).compile()
        params = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
        return compiled.memory_analysis().temp_size_in_bytes / params

    assert scratch(DELAYED | sl.adam(0.1)) < 0.4
    assert scratch(sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)) > 0.9
