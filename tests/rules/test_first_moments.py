"""The dtype in which means of updates are stored, and decays that it cannot hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl


def means_of(state):
    """The leaves of the first moments in a state, by the names of their fields."""
    fields = ("mu", "m", "v", "g", "trace", "ema", "previous_gradient")
    return [x for f in fields if hasattr(state, f) for x in jax.tree.leaves(getattr(state, f))]


FIRST_MOMENTS = {
    **{f"{cls.__name__}": cls() for cls in (sl.ScaleByAdam, sl.ScaleByAmsgrad, sl.ScaleByAdamax)},
    **{f"{cls.__name__}": cls() for cls in (sl.ScaleByYogi, sl.ScaleByRadam, sl.ScaleByAdan)},
    **{f"{cls.__name__}": cls() for cls in (sl.ScaleByNovograd, sl.ScaleBySm3, sl.ScaleByLion)},
    "Trace": sl.Trace(0.9),
    "Ema": sl.Ema(0.9),
    "ScaleByOptimisticGradient": sl.ScaleByOptimisticGradient(),
}


@pytest.mark.parametrize("tx", FIRST_MOMENTS.values(), ids=FIRST_MOMENTS.keys())
def test_first_moments_of_float16_parameters_are_float32(tx):
    for own, stored in ((jnp.float16, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        means = means_of(tx.init(jnp.ones(2, own)))
        assert means
        assert all(x.dtype == stored for x in means)


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


@pytest.mark.slow
@pytest.mark.parametrize("g", [1e-6, 1.2e-7])
def test_small_constant_float16_gradients_are_not_lost(g):
    tx, grad = sl.Ema(0.9), jnp.asarray(g, jnp.float16)
    state = tx.init(grad)
    for _ in range(50):
        updates, state = tx.update(grad, state)
    np.testing.assert_allclose(updates, float(grad), rtol=1e-6)


def test_a_momentum_of_float16_gradients_does_not_overflow():
    tx, grad = sl.Trace(0.9), jnp.asarray(1e4, jnp.float16)
    state = tx.init(grad)
    for _ in range(50):
        updates, state = tx.update(grad, state)
    np.testing.assert_allclose(updates, float(grad) * (1 - 0.9**50) / 0.1, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.99, 0.996, 0.9965, 0.998])
def test_a_bfloat16_mean_decays_wherever_it_is_not_refused(decay):
    starts = jnp.asarray(1 + np.arange(128) / 128, jnp.bfloat16)
    decayed = jnp.asarray(jnp.float32(decay) * starts.astype(jnp.float32), jnp.bfloat16)
    stalls = bool(jnp.any(decayed == starts))
    try:
        sl.Ema(decay).init(starts)
    except ValueError:
        assert stalls
    else:
        assert not stalls


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda **kw: sl.ScaleByAdam(b1=0.999, **kw), "mu_dtype"),
        (lambda **kw: sl.ScaleByLion(b2=0.999, **kw), "mu_dtype"),
        (lambda **kw: sl.ScaleByAdan(b2=0.999, **kw), "mu_dtype"),
        (lambda **kw: sl.Ema(0.999, **kw), "accumulator_dtype"),
        (lambda **kw: sl.Trace(0.999, **kw), "accumulator_dtype"),
    ],
)
def test_a_decay_too_slow_for_the_dtype_of_the_mean_is_refused_by_name(make, field):
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match=rf"is 0\.999.* bfloat16, .*'w'.*Write `{field}=\"float32"):
        sl.Optimizer(make(), params)
    with pytest.raises(ValueError, match=r"is 0\.999"):
        sl.Optimizer(make(**{field: "bfloat16"}), {"w": jnp.ones(2)})
    sl.Optimizer(make(**{field: "float32"}), params)


def test_a_decay_that_is_not_known_is_not_refused():
    params = jnp.ones(2, jnp.bfloat16)
    sl.ScaleByAdam(b1=lambda step: 0.999).init(params)
    jax.jit(lambda b1: sl.ScaleByAdam(b1=b1).init(params))(0.999)
    sl.Trace(1.0).init(params)
