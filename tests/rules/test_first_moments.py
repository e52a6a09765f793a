"""The dtype in which means of updates are stored, and decays that it cannot hold."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl


def means_of(state):
    """The leaves of the first moments in a state, by the names of their fields."""
    fields = ("mu", "m", "v", "g", "trace", "ema", "previous_gradient")
    return [x for f in fields if hasattr(state, f) for x in jax.tree.leaves(getattr(state, f))]


FIRST_MOMENTS = (
    *(sl.ScaleByAdam(), sl.ScaleByAmsgrad(), sl.ScaleByAdamax(), sl.ScaleByYogi()),
    *(sl.ScaleByRadam(), sl.ScaleByAdan(), sl.ScaleByNovograd(), sl.ScaleBySm3()),
    *(sl.ScaleByLion(), sl.Trace(0.9), sl.Ema(0.9), sl.ScaleByOptimisticGradient()),
)


def test_first_moments_of_float16_parameters_are_float32():
    for tx in FIRST_MOMENTS:
        for own, stored in ((jnp.float16, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
            means = means_of(jax.eval_shape(tx.init, jnp.ones(2, own)))
            assert means, tx
            assert all(x.dtype == stored for x in means), tx


def test_a_float16_parameter_comes_to_rest_after_its_last_gradient():
    params = jnp.ones((), jnp.float16)
    opt = sl.Optimizer(sl.adam(1e-3), params)

    @jax.jit
    def run(params, opt):
        params, opt = opt.step(params, jnp.asarray(1e-2, jnp.float16))

        def step(_, carry):
            return carry[1].step(carry[0], jnp.zeros((), jnp.float16))

        return jax.lax.fori_loop(0, 20_000, step, (params, opt))[0]

    np.testing.assert_allclose(run(params, opt), 0.996, atol=5e-3)


def test_a_decay_too_slow_for_the_dtype_of_the_mean_is_refused_by_name():
    starts = jnp.asarray(1 + np.arange(128) / 128, jnp.bfloat16)
    for decay in (0.99, 0.996, 0.9965, 0.998):
        decayed = jnp.asarray(jnp.float32(decay) * starts.astype(jnp.float32), jnp.bfloat16)
        stalls = bool(jnp.any(decayed == starts))
        with pytest.raises(ValueError, match=r"is 0\.99") if stalls else contextlib.nullcontext():
            sl.Ema(decay).init(starts)

    params = {"w": jnp.ones(2, jnp.bfloat16)}
    for make, field in (
        (functools.partial(sl.ScaleByAdam, b1=0.999), "mu_dtype"),
        (functools.partial(sl.ScaleByLion, b2=0.999), "mu_dtype"),
        (functools.partial(sl.ScaleByAdan, b2=0.999), "mu_dtype"),
        (functools.partial(sl.Ema, 0.999), "accumulator_dtype"),
        (functools.partial(sl.Trace, 0.999), "accumulator_dtype"),
    ):
        message = rf"is 0\.999.* bfloat16, .*'w'.*Write `{field}=\"float32"
        with pytest.raises(ValueError, match=message):
            sl.Optimizer(make(), params)
        with pytest.raises(ValueError, match=r"is 0\.999"):
            sl.Optimizer(make(**{field: "bfloat16"}), {"w": jnp.ones(2)})
        sl.Optimizer(make(**{field: "float32"}), params)
    # One that is not known is not refused.
    sl.ScaleByAdam(b1=lambda step: 0.999).init(params)
    jax.jit(lambda b1: sl.ScaleByAdam(b1=b1).init(params))(0.999)
    sl.Trace(1.0).init(params)
