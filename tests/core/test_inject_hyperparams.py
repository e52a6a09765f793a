"""What `optax.inject_hyperparams` is for, without it: its documented example, and bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slalom as sl

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "s": jnp.array(0.5)}


def grads_at(n, params=PARAMS):
    return jax.tree.map(lambda p: jnp.cos(p * (n + 1)), params)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 9.0])
def test_a_piecewise_interpolated_b1_and_a_b2_changed_by_hand(factor, x64):
    # The example of the public page has the factor 1, which interpolates nothing.
    params = jax.tree.map(lambda p: p.astype(jnp.float64), PARAMS)
    theirs_b1 = optax.piecewise_interpolate_schedule("linear", 0.1, {10: factor})
    ours_b1 = sl.schedules.piecewise_interpolate("linear", 0.1, {10: factor})
    # Of an int32 step optax computes its schedule in float32 always.
    rival = optax.inject_hyperparams(optax.scale_by_adam)(
        b1=lambda step: theirs_b1(step.astype(jnp.float64)), b2=0.99
    )
    opt = sl.Optimizer(sl.ScaleByAdam(b1=ours_b1, b2=0.99), params)
    with jax.numpy_dtype_promotion("standard"):
        state = rival.init(params)
    for n in range(8):
        if n == 3:
            state.hyperparams["b2"] = jnp.asarray(0.95)
            opt = opt.with_hyperparams(b2=0.95)
        with jax.numpy_dtype_promotion("standard"):
            expected, state = rival.update(grads_at(n, params), state)
        np.testing.assert_allclose(opt.hyperparams["b1"], state.hyperparams["b1"], rtol=1e-12)
        updates, opt = opt.update(params, grads_at(n, params))
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)


def test_overriding_a_schedule_by_a_number_is_no_silent_nothing():
    # There it has no effect, as its page says.
    opt = sl.Optimizer(sl.ScaleByAdam(b1=sl.schedules.linear(0.1, 0.9, 100)), PARAMS)
    with pytest.raises(ValueError, match="replace_schedules=True"):
        opt.with_hyperparams(b1=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "b2",
    [sl.schedules.linear(0.9, 0.999, 20), sl.schedules.constant(0.999), 0.999],
    ids=["rising", "constant", "number"],
)
def test_all_bfloat16_adam_updates_as_in_float32(b2):
    # bfloat16(0.999) is 1: in the parameters' dtype the bias correction would be infinite.
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    # The mean is stored in float32 in both, since its own rounding is not what is tested.
    tx = sl.ScaleByAdam(b2=b2, mu_dtype="float32")

    def run(params):
        def body(opt, n):
            grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads_at(n))
            updates, opt = opt.update(params, grads)
            return opt, jax.tree.map(lambda u: u.astype(jnp.float32), updates)

        return jax.lax.scan(body, sl.Optimizer(tx, params), jnp.arange(40.0))[1]

    for a, b in zip(jax.tree.leaves(run(half)), jax.tree.leaves(run(PARAMS)), strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, rtol=2**-7)
