"""Many training steps in one program, `step.scan`, against a loop over the step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_microbatches import normed_loss

import slalom as sl
from helpers import Counting, assert_close, assert_same_bits, kind_of, mean_square, mlp

x = jax.random.normal(jax.random.key(1), (5, 8, 2))
y = jnp.sum(x, axis=2, keepdims=True)
step = sl.train_step(mean_square, donate=False)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TRANSFORMS = {
    "adamw": sl.ClipByGlobalNorm(1.0) | sl.adamw(sl.schedules.linear(0.1, 0.0, 5)),
    "every_k, average": sl.adam(0.1).every_k(2).average().record(),
    "lbfgs": sl.lbfgs(),
}


def looped(step, model, opt, *batches, **same):
    returned = []
    for i in range(len(batches[0])):
        model, opt, out = step(model, opt, *(b[i] for b in batches), **same)
        returned.append(out)
    return model, opt, jax.tree.map(lambda *a: jnp.stack(a), *returned)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_scan_takes_the_steps_of_a_loop(name):
    model = mlp()
    opt = sl.Optimizer(TRANSFORMS[name], model)
    scanned = step.scan(model, opt, x, y)
    assert_close(scanned, looped(step, model, opt, x, y), **CLOSE)
    assert scanned[0].activation is model.activation
    assert kind_of(scanned[:2]) == kind_of((model, opt))


@pytest.mark.slow
def test_a_small_network_takes_the_same_bits_and_checks_raise_as_in_a_step():
    model = mlp()
    opt = sl.Optimizer(sl.adam(0.1), model)
    scanned = step.scan(model, opt, x, y)
    assert_same_bits(scanned[2], looped(step, model, opt, x, y)[2])
    assert_close(step.scan(model, opt, x, y, unroll=2, length=5), scanned, **CLOSE)
    whole = step.scan(model, opt, x=x[0], y=y[0], length=3)
    again = looped(step, model, opt, *(jnp.stack([a[0]] * 3) for a in (x, y)))
    assert_close(whole, again, **CLOSE)

    def checked(model, x):
        return eqx.error_if(model["w"] * x, x < 0, "negative")

    model = {"w": jnp.ones(())}
    with pytest.raises(Exception, match="negative"):
        sl.train_step(checked).scan(model, sl.Optimizer(sl.sgd(0.1), model), jnp.array([1.0, -1.0]))


def test_no_steps_change_nothing_and_steps_run_under_jit_and_vmap():
    model = mlp()
    opt = sl.Optimizer(sl.adam(0.1), model)
    new, after, losses = step.scan(model, opt, x[:0], y[:0])
    assert eqx.tree_equal((new, after), (model, opt))
    assert losses.shape == (0,)

    model = {"w": jnp.ones(2)}

    def run(rate, x):
        opt = sl.Optimizer(sl.sgd(rate), model)
        linear = sl.train_step(lambda m, x: jnp.mean((x @ m["w"]) ** 2))
        return linear.scan(model, opt, x)[2]

    rates = jnp.array([0.1, 0.2])
    together = jax.jit(jax.vmap(run, in_axes=(0, None)))(rates, x)
    np.testing.assert_allclose(together[1], run(rates[1], x), rtol=1e-5)


@pytest.mark.slow
def test_a_program_serves_one_shape_and_carries_the_state_of_the_model():
    loss_fn = Counting(mean_square)
    model, counted = mlp(), sl.train_step(loss_fn)
    new, opt, _ = counted.scan(model, sl.Optimizer(sl.adam(0.1), model), x, y)
    number = loss_fn.traces
    counted.scan(new, opt, x, y)
    _, opt, _ = sl.train_step(loss_fn).scan(model, sl.Optimizer(sl.adam(0.1), model), x, y)
    assert loss_fn.traces == number
    assert int(opt.count) == 5

    net, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")
    opt = sl.Optimizer(sl.adam(0.1), net)
    stateful = sl.train_step(normed_loss, has_aux=True, donate=False)
    scanned, opt_scanned, (losses, last) = stateful.scan(net, opt, x, y, model_state=state)
    for i in range(5):
        net, opt, (loss, state) = stateful(net, opt, state, x[i], y[i])
        np.testing.assert_allclose(losses[i], loss, rtol=1e-5)
    assert_close((scanned, opt_scanned, last), (net, opt, state), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("donate", ["opt", "all"])
def test_it_donates_what_a_step_donates(donate):
    model = mlp()
    opt = sl.Optimizer(sl.adam(0.1), model)
    weight, moment = model.layers[0].weight, jax.tree.leaves(opt)[-2]
    sl.train_step(mean_square, donate=donate).scan(model, opt, x, y)
    assert weight.is_deleted() == (donate == "all")
    assert moment.is_deleted()


@pytest.mark.slow
def test_a_single_key_is_split_and_what_the_loss_returns_is_stacked():
    model, key = {"w": jnp.ones(2)}, jax.random.key(3)
    opt = sl.Optimizer(sl.sgd(0.1), model)

    def noise(model, x, key, scale=1.0):
        return jnp.sum(model["w"] * 0) + scale * jax.random.normal(key)

    noisy = sl.train_step(noise, donate=False)
    expected = 2 * jax.vmap(jax.random.normal)(jax.random.split(key, 5))
    _, _, by_keyword = noisy.scan(model, opt, x, scale=2.0, key=key)
    _, _, by_position = noisy.scan(model, opt, x, key, scale=jnp.float32(2))
    _, _, given = noisy.scan(model, opt, x, jax.random.split(key, 5))
    for losses in (by_keyword, by_position, 2 * given):
        np.testing.assert_allclose(losses, expected, rtol=1e-6)

    def loss_fn(model, batch, flag):
        loss = mean_square(model, *batch)
        return loss, jnp.float32(2), {"loss": loss, "flag": flag}

    full = sl.train_step(loss_fn, has_aux=True, has_weight=True)
    model = mlp()
    opt = sl.Optimizer(sl.adam(0.1).record(), model)
    _, opt, (losses, weights, aux), metrics = full.scan(
        model, opt, (x, y), flag="static", with_metrics=True
    )
    np.testing.assert_array_equal(aux["loss"], losses)
    assert aux["flag"] == "static"
    np.testing.assert_array_equal(weights, [2] * 5)
    assert set(metrics) == set(opt.metrics)
    assert metrics["record.grad_norm"].shape == (5,)
    assert metrics["record.grad_norm"][-1] == opt.metrics["grad_norm"]


def test_keys_are_split_and_a_limit_inside_raises_at_the_end():
    class Noise(sl.AbstractStatelessTransform):
        needs = ("key",)

        def apply(self, updates, params, context):
            return {"w": jax.random.normal(context.key, (1,))}

    model, key = {"w": jnp.zeros(1)}, jax.random.key(0)
    opt = sl.Optimizer(Noise(), model)
    quiet = sl.train_step(lambda m: jnp.sum(m["w"]))
    new, _, _ = quiet.scan(model, opt, length=3, context={"key": key})
    draws = jax.vmap(lambda k: jax.random.normal(k, (1,)))(jax.random.split(key, 3))
    np.testing.assert_allclose(new["w"], draws.sum(0), rtol=1e-5)

    tx = sl.sgd(0.1).if_finite(1, on_limit="raise")
    model = {"w": jnp.ones(())}
    linear = sl.train_step(lambda m, x: m["w"] * x)
    rows = jnp.array([1.0, jnp.nan, jnp.nan, 1.0])
    with pytest.raises(FloatingPointError, match="not finite in 2 steps in a row") as caught:
        linear.scan(model, sl.Optimizer(tx, model), rows)
    assert "error.results" in caught.value.__notes__[0]
    new, opt, losses = caught.value.results
    np.testing.assert_allclose(new["w"], 0.8, rtol=1e-6)
    assert int(opt.count) == 4
    assert losses.shape == (4,)
    linear.scan(new, opt, rows[:2])  # one in a row is allowed
