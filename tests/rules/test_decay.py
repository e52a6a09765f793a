"""Clipping by the norm of the step before, and kinds of weight decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_close, sampled

ZEROS = {"w": jnp.zeros(2)}


def clipped(tx, norms):
    """The norms that come out, and the optimizer after them."""
    opt, out = sl.Optimizer(tx, ZEROS), []
    for norm in norms:
        updates, opt = opt.update(ZEROS, {"w": jnp.array([0.6, -0.8]) * norm})
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


PARAMS = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([4.0])}
NO_GRADS = jax.tree.map(jnp.zeros_like, PARAMS)
matrices = sl.where.ndim(min=2)
halving = sl.schedules.piecewise_constant(0.5, {1: 0.5})


def losses(tx, steps):
    """What each step takes away, as a fraction of the parameter, where gradients are zero."""
    params, opt, found = PARAMS, sl.Optimizer(tx, PARAMS), []
    step = jax.jit(lambda params, opt: opt.step(params, NO_GRADS))
    for _ in range(steps):
        after, opt = step(params, opt)
        found.append({k: float(1 - after[k].ravel()[0] / params[k].ravel()[0]) for k in params})
        params = after
    return found


def test_corrected_decay_falls_with_the_square_of_a_learning_rate_that_changes():
    found = losses(sl.contrib.adamc(halving, 0.5, weight_decay=0.1, decay_where=matrices), 2)
    # η·λ·η/η_max
    np.testing.assert_allclose([f["w"] for f in found], [0.05, 0.0125], rtol=1e-5)
    assert [f["b"] for f in found] == [0, 0]

    grads = jax.tree.map(lambda p: p + 1, PARAMS)

    @jax.jit
    def stepped():
        both = sl.contrib.adamc(0.1, 0.1, weight_decay=0.1), sl.adamw(0.1, weight_decay=0.1)
        return [sl.Optimizer(tx, PARAMS).step(PARAMS, grads)[0] for tx in both]

    assert_close(*stepped(), rtol=1e-6)


RECIPES = (
    *(
        sl.adamw,
        sl.nadamw,
        sl.adamaxw,
        sl.adan,
        sl.lion,
        sl.ademamix,
        sl.contrib.simplified_ademamix,
    ),
    *(sl.adopt, sl.contrib.laprop, sl.contrib.mars, sl.contrib.acprop, sl.contrib.adam_mini),
)


@pytest.mark.parametrize("recipe", sampled(RECIPES))
def test_independent_decay_does_not_follow_the_learning_rate(recipe):
    options = {"weight_decay": 0.1, "decay_where": matrices}
    following = losses(recipe(halving, **options), 2)
    np.testing.assert_allclose([f["w"] for f in following], [0.05, 0.025], rtol=1e-5)
    found = losses(recipe(halving, **options, independent_decay=True), 2)
    np.testing.assert_allclose([f["w"] for f in found], [0.1, 0.1], rtol=1e-5)
    assert [f["b"] for f in found] == [0, 0]


def test_decay_to_the_initial_parameters_returns_to_them():
    decay = sl.AddDecayToInitialParams(0.5)
    opt = sl.Optimizer(decay | sl.ScaleByLearningRate(0.5), PARAMS)
    moved = jax.tree.map(lambda p: p + 1, PARAMS)
    after, opt = opt.step(moved, NO_GRADS)
    jax.tree.map(lambda a, p: np.testing.assert_allclose(a, p + 0.75), after, PARAMS)
    # A reset makes the present parameters the initial ones.
    stays, _ = opt.reset(after).step(after, NO_GRADS)
    jax.tree.map(np.testing.assert_array_equal, stays, after)

    # It is the gradient of its penalty.
    def penalty(p):
        return 0.25 * sl.tree.global_norm(jax.tree.map(jnp.subtract, p, PARAMS)) ** 2

    here = jax.tree.map(lambda p: p * 1.5 - 0.25, PARAMS)
    made, _ = decay.update(NO_GRADS, decay.init(PARAMS), here)
    assert_close(made, jax.grad(penalty)(here), rtol=1e-6)
