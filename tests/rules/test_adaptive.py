"""What is special to adaptive rules, clips, decays and means beside their formulas.

`test_accuracy.py` has the formulas, and `test_parity.py` the paths of other libraries.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import assert_close, sampled, updates_of


@pytest.mark.slow
def test_radam_rectifies_exactly_at_any_age():
    b2 = np.float32([0.5, 0.9, 0.99, 0.999, 0.9999])[:, None]
    ages = np.array([*range(1, 61), 1_000, 10**6, 10**8, 2**31 - 2])

    # Means of gradients that were 1 always: m̂ = v̂ = 1, so an update is r, or 1 before the
    # threshold.
    def update(b2, age):
        tx, one = sl.ScaleByRadam(b2=b2, eps=0.0), jnp.ones(())
        age = age - 1
        t = age.astype(jnp.float32)
        mu, nu = (-jnp.expm1(t * jnp.log(decay)) for decay in (jnp.float32(0.9), b2))
        start = dataclasses.replace(tx.init(one), age=age, mu=mu, nu=nu)
        return tx.update(one, start, one)[0]

    over_ages = jax.vmap(jax.value_and_grad(update), (None, 0))
    run = jax.jit(jax.vmap(over_ages, (0, None)))
    made, derivative = run(b2[:, 0], jnp.asarray(ages, jnp.int32))
    t, d = ages.astype(np.longdouble), b2.astype(np.longdouble)
    limit = 2 / (1 - d) - 1
    rho = limit - 2 * t * d**t / (1 - d**t)
    use = rho >= 5
    top, bottom = (rho - 4) * (rho - 2) * limit, (limit - 4) * (limit - 2) * rho
    r = np.sqrt(np.where(use, top / bottom, 1))
    np.testing.assert_allclose(made, r, rtol=5e-6)
    assert np.all(use.any(1) == (b2[:, 0] > 0.7))
    assert np.all(np.isfinite(derivative))


def test_what_rules_refuse_and_store():
    with pytest.raises(ValueError, match=r"ScaleByAdamax.eps must be in \(0, inf\), got 0.0"):
        sl.ScaleByAdamax(eps=0.0)
    with pytest.raises(ValueError, match=r"mode must be 'hard', 'smooth' or 'refined', got 'soft'"):
        sl.ScaleByLion(mode="soft")
    with pytest.raises(TypeError, match="ScaleByRprop compares signs, but 'w' is complex64"):
        sl.Optimizer(sl.rprop(0.1), {"w": jnp.ones(2, jnp.complex64)})
    tx = sl.ScaleByNovograd()
    with pytest.raises(TypeError, match="ScaleByNovograd"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))

    # Belief subtracts two numbers: in bfloat16 the difference would have few digits.
    state = sl.ScaleByBelief().init(jnp.zeros(2, jnp.bfloat16))
    assert state.mu.dtype == state.nu.dtype == jnp.float32
    state = sl.ScaleBySm3().init(jnp.zeros((2, 3)))
    assert [a.shape for a in state.accumulators] == [(2, 1), (1, 3)]


@pytest.mark.slow
def test_signs_near_zero_selected_decays_and_adadelta():
    params = {"w": jnp.ones((1, 1)), "b": jnp.ones(1)}
    tx = sl.novograd(0.1, weight_decay=0.5, decay_where=sl.where.ndim(min=2))
    zeros = jax.tree.map(jnp.zeros_like, params)
    stepped, _ = sl.Optimizer(tx, params).step(params, zeros)
    np.testing.assert_allclose(stepped["w"], [[0.95]], rtol=1e-6)
    np.testing.assert_array_equal(stepped["b"], [1.0])

    assert sl.adadelta() == sl.adadelta(1.0)
    stepped, _ = sl.Optimizer(sl.adadelta(), jnp.ones(1)).step(jnp.ones(1), jnp.ones(1))
    assert stepped[0] < 1

    u, _ = sl.ScaleBySign().update(jnp.array([3 - 4j, 0]), None)
    np.testing.assert_allclose(u, [0.6 - 0.8j, 0], rtol=1e-6)
    for size in (1.0, 1e-30):
        made = updates_of(sl.ScaleByRprop(0.1), jnp.float32([1, 1, 1, -1, 1]) * size)
        np.testing.assert_allclose(made, [0.1, 0.12, 0.144, 0.0, 0.072], rtol=1e-6)

    def first(mode, g, **options):
        return updates_of(sl.ScaleByLion(b1=0.0, mode=mode, **options), jnp.array([g])).item()

    assert [first("hard", g) for g in (0.25, -3.0)] == [1, -1]
    assert [first("refined", g) for g in (0.25, -3.0)] == pytest.approx([0.25, -1])
    assert first("smooth", 0.25, smooth_beta=2.0) == pytest.approx(np.tanh(0.5))
    z = jnp.array([[3 + 4j, 0.3 + 0.4j]], jnp.complex64)
    made = updates_of(sl.ScaleByLion(b1=0.0, mode="refined"), z)
    np.testing.assert_allclose(made, [[0.6 + 0.8j, 0.3 + 0.4j]], rtol=1e-6)


@pytest.mark.parametrize("tx", [sl.ScaleByRss(), sl.ScaleBySm3()], ids=["rss", "sm3"])
def test_a_sum_of_squares_that_is_nan_shows(tx):
    # It stays NaN, and zeros would leave the parameter where it is, for ever.
    grad = jnp.array([jnp.nan, 1.0])
    updates, _ = tx.update(grad, tx.init(jnp.ones(2)))
    np.testing.assert_array_equal(jnp.isnan(updates), [True, False])


FIRST_MOMENTS = (
    *(sl.ScaleByAdam(), sl.ScaleByAmsgrad(), sl.ScaleByAdamax(), sl.ScaleByYogi()),
    *(sl.ScaleByRadam(), sl.ScaleByAdan(), sl.ScaleByNovograd(), sl.ScaleBySm3()),
    *(sl.ScaleByLion(), sl.Trace(0.9), sl.Ema(0.9), sl.ScaleByOptimisticGradient()),
)


def test_first_moments_of_float16_are_float32_so_parameters_come_to_rest():
    for tx in FIRST_MOMENTS:
        for own, stored in ((jnp.float16, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
            state = jax.eval_shape(tx.init, jnp.ones(2, own))
            fields = ("mu", "m", "v", "g", "trace", "ema", "previous_gradient")
            means = jax.tree.leaves([getattr(state, f, None) for f in fields])
            assert means, tx
            assert all(x.dtype == stored for x in means), tx

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
        message = rf"is 0\.999.*'w'.* bfloat16, .*Write `{field}=\"float32"
        with pytest.raises(ValueError, match=message):
            sl.Optimizer(make(), params)
        with pytest.raises(ValueError, match=r"is 0\.999"):
            sl.Optimizer(make(**{field: "bfloat16"}), {"w": jnp.ones(2)})
        sl.Optimizer(make(**{field: "float32"}), params)
    # One that is not known is not refused.
    sl.ScaleByAdam(b1=lambda step: 0.999).init(params)
    jax.jit(lambda b1: sl.ScaleByAdam(b1=b1).init(params))(0.999)
    sl.Trace(1.0).init(params)


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


@pytest.mark.slow
def test_decays_are_corrected_by_changing_rates_or_return_to_the_start():
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
