"""Hyperparameters are traced: schedules, gradients and sweeps need no other program."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_hyperparams import EVERYTHING, grads, params, trained

import slalom as sl
from helpers import Counting, assert_close, assert_same_bits, slow_except


def test_a_number_and_a_schedule_have_one_state_and_an_optimizer_is_its_leaves():
    number = sl.Optimizer(sl.adam(0.1), params())
    schedule = sl.Optimizer(sl.adam(sl.schedules.constant(0.1), b2=lambda n: 0.999), params())
    assert_same_bits(number.state, schedule.state)
    assert_close(trained(schedule)[0], trained(number)[0], rtol=1e-6)

    model, opt = trained(sl.Optimizer(EVERYTHING, params()), 2)
    assert_same_bits(jax.jit(lambda o: o)(opt), opt)
    leaves, structure = jax.tree.flatten(opt)
    again = structure.unflatten([jnp.array(np.asarray(leaf)) for leaf in leaves])
    assert repr(again) == repr(opt)
    expected = trained(opt, 2, model)
    assert_same_bits(trained(again, 2, model), expected)

    # Equinox saves and loads it.
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (model, opt))
    file.seek(0)
    fresh = (params(), sl.Optimizer(EVERYTHING, params()))
    loaded = eqx.tree_deserialise_leaves(file, fresh)
    assert_same_bits(loaded, (model, opt))
    assert_same_bits(trained(loaded[1], 2, loaded[0]), expected)


def test_steps_trace_once_for_any_values():
    loss = Counting(lambda model, x: sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(model)))
    step = sl.train_step(loss, donate=False)
    model, opt = params(), sl.Optimizer(sl.adamw(0.1, weight_decay=0.1), params())
    for rate in (0.1, 1, np.float32(0.2), jnp.array(0.3), 0.0):
        opt = opt.with_hyperparams(learning_rate=rate, b1=lambda b1: b1 * 0.9)
        model, opt, _ = step(model, opt, jnp.ones(2))
    step(params(), sl.Optimizer(sl.adamw(0.7, b2=0.5, weight_decay=0), params()), jnp.zeros(2))
    sl.train_step(loss, donate=False)(model, opt, jnp.ones(2))
    assert loss.traces == 1

    counted = Counting(lambda updates, params: updates)
    model = params()
    for rate in (0.1, 1, np.float32(0.3), jnp.array(0.3)):
        opt = sl.Optimizer(sl.Stateless(counted) | sl.sgd(rate), params())
        for n in range(3):
            model, opt = opt.step(model, grads(n))
        opt = opt.with_hyperparams(learning_rate=rate)
        model, opt = opt.step(model, grads())
    assert counted.traces == 1
    for i, value in enumerate((1.0, 2, jnp.array(3.0))):
        opt.step(params(), grads(), value=value, weight=value, key=jax.random.key(i))
    assert counted.traces == 2


def test_schedules_of_one_class_share_a_program_and_replacing_one_recompiles_once():
    counted = Counting(lambda updates, params: updates)
    for schedule in (
        sl.schedules.linear(0.1, 0.0, 10),
        sl.schedules.linear(1, 0.5, 7, 2),
        sl.schedules.linear(jnp.array(0.1), 0.0, np.int64(3)),
    ):
        trained(sl.Optimizer(sl.Stateless(counted) | sl.sgd(schedule), params()), 3)
    assert counted.traces == 1

    counted = Counting(lambda updates, params: updates)
    opt = sl.Optimizer(sl.Stateless(counted) | sl.sgd(sl.schedules.constant(0.1)), params())
    opt = opt.step(params(), grads())[1]
    opt = opt.with_hyperparams(learning_rate=0.5, replace_schedules=True)
    for rate in (0.1, 0.2, 0.3):
        opt = opt.with_hyperparams(learning_rate=rate).step(params(), grads())[1]
    assert counted.traces == 2


@pytest.mark.slow
def test_traced_numbers_give_the_same_bits_and_derivatives():
    arrays, floats = sl.adam(jnp.array(0.1), b2=jnp.array(0.9999)), sl.adam(0.1, b2=0.9999)
    models = [trained(sl.Optimizer(tx, params()))[0] for tx in (arrays, floats)]
    assert_same_bits(*models)

    h = 1e-2
    rates = jnp.array([1e-3, 1e-2, 0.05 - h, 0.05 + h])
    together = jax.jit(jax.vmap(final_loss))(rates)
    apart = jnp.stack([final_loss(rate) for rate in rates])
    np.testing.assert_allclose(together, apart, rtol=1e-5)
    slope = jax.jit(jax.grad(final_loss))(jnp.array(0.05))
    np.testing.assert_allclose(slope, (apart[3] - apart[2]) / (2 * h), rtol=2e-3)

    opt = sl.Optimizer(sl.adamw(0.1, weight_decay=0.1), params())

    def loss(values):
        changed = opt.with_hyperparams(values)
        return sum(jnp.sum(p) for p in jax.tree.leaves(trained(changed, 2)[0]))

    values = {name: jnp.asarray(v) for name, v in opt.hyperparams.items()}
    slopes = jax.jit(jax.grad(loss))(values)
    del slopes["scale_by_adam.eps"], slopes["scale_by_adam.eps_root"]
    assert all(jnp.isfinite(s) and s != 0 for s in slopes.values()), slopes


def final_loss(rate):
    model, _ = trained(sl.Optimizer(sl.adam(rate), params()))
    return sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx_of",
    [
        lambda rate: sl.ClipByGlobalNorm(1.0) | sl.ClipByBlockRms(0.1) | sl.lamb(rate),
        lambda rate: sl.adafactor(rate, min_dim_size_to_factor=2),
    ],
    ids=["lamb", "adafactor"],
)
def test_the_rates_gradient_is_right_where_parameters_get_no_gradient(tx_of, x64):
    model = {"trained": jnp.array([[1.0, 2.0], [0.5, 3.0]]), "unused": jnp.zeros(2)}

    def loss_fn(model):
        return jnp.sum((model["trained"] - 0.3) ** 2) + 0.0 * jnp.sum(model["unused"])

    @jax.jit
    def last_loss(rate):
        trained, opt = model, sl.Optimizer(tx_of(rate), model)
        for _ in range(2):
            trained, opt = opt.step(trained, jax.grad(loss_fn)(trained))
        return loss_fn(trained)

    slope = jax.grad(last_loss)(0.05)
    difference = (last_loss(0.05 + 1e-6) - last_loss(0.05 - 1e-6)) / 2e-6
    np.testing.assert_allclose(slope, difference, rtol=1e-5)


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
    update = jax.jit(rival.update)
    with jax.numpy_dtype_promotion("standard"):
        state = rival.init(params)
    for n in range(8):
        if n == 3:
            state.hyperparams["b2"] = jnp.asarray(0.95)
            opt = opt.with_hyperparams(b2=0.95)
        with jax.numpy_dtype_promotion("standard"):
            expected, state = update(grads_at(n, params), state)
        np.testing.assert_allclose(opt.hyperparams["b1"], state.hyperparams["b1"], rtol=1e-12)
        updates, opt = opt.update(params, grads_at(n, params))
        assert_close(updates, expected, rtol=1e-9)


RISING = sl.schedules.linear(0.9, 0.999, 20)


@pytest.mark.parametrize("b2", slow_except([RISING, sl.schedules.constant(0.999), 0.999], RISING))
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

    exact = run(PARAMS)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(exact))
    assert_close(run(half), exact, rtol=2**-7)
