"""Dynamic scaling of the loss."""

import copy
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import (
    Counting,
    after_training,
    assert_close,
    assert_same_bits,
    compiled_step,
    slalom_trajectory,
    slow_except,
)

START = 2.0**15
params = {"w": jnp.array([1.0, -2.0]), "b": jnp.ones(())}
GOOD = {"w": jnp.array([0.5, 0.25]), "b": jnp.ones(())}
BAD = {"w": jnp.array([jnp.inf, 0.25]), "b": jnp.ones(())}


def scaled(grads, opt):
    return jax.tree.map(lambda g: g * opt.loss_scale, grads)


step = jax.jit(lambda params, opt, grads: opt.step(params, scaled(grads, opt)))


@functools.cache
def program(initial, interval):
    tx = sl.sgd(0.125).scale_loss(initial, growth_interval=interval)

    def body(carry, is_finite):
        weight, opt = carry
        grad = jnp.where(is_finite, opt.loss_scale, jnp.inf)
        weight, opt = opt.step(weight, grad)
        return (weight, opt), (opt.loss_scale, weight)

    carry = jnp.ones(()), sl.Optimizer(tx, jnp.ones(()))
    return jax.jit(lambda finite: jax.lax.scan(body, carry, finite))


def own_scales(initial, interval, finite):
    (_, opt), (scales, weights) = program(initial, interval)(jnp.asarray(finite))
    return scales.tolist(), weights.tolist(), opt


def by_the_rule(scale, interval, finite):
    """The scale after each step, written out."""
    scales, in_a_row = [], 0
    for is_finite in finite:
        in_a_row = in_a_row + 1 if is_finite else 0
        if not is_finite:
            scale = scale / 2
        elif in_a_row == interval:
            scale, in_a_row = scale * 2, 0
        scales.append(scale)
    return scales


FINITE = np.random.default_rng(0).uniform(size=200) < 0.7


def test_the_scale_follows_the_rule_is_1_without_it_and_prints_as_given():
    for interval in (1, 2, 3):
        scales, weights, opt = own_scales(8.0, interval, FINITE)
        assert scales == by_the_rule(8.0, interval, FINITE)
        assert weights == (1 - 0.125 * np.cumsum(FINITE)).tolist()
    assert {name: x.item() for name, x in opt.metrics.items()} == {
        "scale_loss.loss_scale": scales[-1],
        "scale_loss.last_finite": FINITE[-1],
        "scale_loss.total_notfinite": np.sum(~FINITE),
    }
    assert int(opt.state.count) == np.sum(FINITE)

    opts = eqx.filter_vmap(lambda rate: sl.Optimizer(sl.sgd(rate), params))(jnp.ones(2))
    for opt, ones in ((sl.Optimizer(sl.adam(0.1), params), 1), (opts, [1, 1])):
        assert opt.loss_scale.dtype == jnp.float32
        np.testing.assert_array_equal(opt.loss_scale, ones)

    tx = sl.wrappers.ScaleLoss(sl.sgd(0.1), np.float32(8), 5)
    assert repr(tx) == "sl.ScaleByLearningRate(0.1).scale_loss(8.0, growth_interval=5)"
    assert tx == copy.deepcopy(tx) == sl.sgd(0.1).scale_loss(8, 5)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_the_scale_follows_grad_scaler(interval):
    torch = pytest.importorskip("torch", reason="the reference is torch.amp.GradScaler")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scales = []
    for is_finite in FINITE:
        optimizer.zero_grad()
        scaler.scale(weight * (1.0 if is_finite else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    own, weights, _ = own_scales(8.0, interval, FINITE)
    assert (own, weights[-1]) == (scales, weight.item())


@pytest.mark.slow
def test_the_scale_stays_within_normal_numbers_and_state_is_stored():
    scales, _, _ = own_scales(2.0**-125, 1, [False] * 3)
    assert scales == [2.0**-126] * 3
    scales, weights, _ = own_scales(2.0**125, 1, [True] * 3)
    assert scales == [2.0**126] * 3
    assert weights == [0.875, 0.75, 0.625]

    inside = params, sl.Optimizer(sl.adam(0.1).store("int8", min_size=1).scale_loss(), params)
    outside = params, sl.Optimizer(sl.adam(0.1).scale_loss().store("int8", min_size=1), params)
    for grads in (GOOD, BAD, GOOD):
        inside, outside = step(*inside, grads), step(*outside, grads)
    assert int(outside[1].metrics["total_notfinite"]) == 1
    assert_close(inside[0], outside[0], rtol=1e-3)


INSIDE = {
    "clipped": lambda tx: sl.ClipByGlobalNorm(0.1) | tx,
    "stored": lambda tx: tx.store("int8", min_size=1),
    "clipped and stored": lambda tx: (sl.ClipByGlobalNorm(0.1) | tx).store("int8", min_size=1),
    "clipped and written": lambda tx: (sl.ClipByGlobalNorm(0.1) | tx).write("kahan"),
    "clipped in a mask": lambda tx: sl.ClipByGlobalNorm(0.1).mask(sl.where.path("w")) | tx,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_what_is_inside_sees_gradients_that_are_not_scaled(name):
    tx = INSIDE[name](sl.adamw(0.1))
    grads = jax.tree.map(lambda g: jnp.stack([g, -0.5 * g]), GOOD)
    expected, plain = slalom_trajectory(tx, params, grads)
    seen, opt = slalom_trajectory(tx.scale_loss(), params, jax.tree.map(lambda g: g * START, grads))
    assert_same_bits((seen, opt.state.inner), (expected, plain.state))


CLIPPED = sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)
SCRATCH = {
    "plain": (sl.adamw(1e-3).scale_loss(), 0.01),
    "every_k": (sl.adamw(1e-3).scale_loss().every_k(2), 0.01),
    "clipped": (CLIPPED.scale_loss(), 0.01),
    # The codes are decoded leaf by leaf: at most 3.5 bytes per parameter, of 4.
    "clipped and stored": (CLIPPED.store("int8").scale_loss(), 0.875),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRATCH)
def test_no_gradient_is_written_to_memory_to_divide_it(name):
    tx, most = SCRATCH[name]
    model = {f"w{i}": jax.ShapeDtypeStruct((1536, 1024), jnp.float32) for i in range(8)}
    memory = compiled_step(tx, model).memory_analysis()
    assert memory.temp_size_in_bytes <= most * 8 * 1536 * 1024 * 4


class Uses(sl.AbstractTransform):
    """Records what the context holds."""

    needs = ("value", "grad", "value_fn")

    def init(self, params):
        return jnp.zeros(3)

    def update(self, updates, state, params=None, context=None):
        total = sum(map(jnp.sum, jax.tree.leaves(context.grad)))
        return updates, jnp.stack([context.value, total, context.value_fn(params)])


def quadratic(model, x):
    return x * (model["w"] ** 2).sum(), {"seen": x}


@pytest.mark.parametrize("microbatches", slow_except([None, 2], None))
def test_a_training_step_returns_and_passes_on_what_is_not_scaled(microbatches):
    def loss_fn(model, x):
        loss, aux = quadratic(model, x.mean())
        return loss, x.size * 1.0, aux

    options = {"has_aux": True, "has_weight": True, "microbatches": microbatches}
    x, model = jnp.array([1.0, 3.0]), {"w": params["w"]}
    opt = sl.Optimizer((Uses() | sl.sgd(0.125)).scale_loss(), model)
    new, after, (loss, weight, aux) = sl.train_step(loss_fn, **options)(model, opt, x)
    assert (float(loss), float(weight), float(aux["seen"].mean())) == (10, 2, 2)
    np.testing.assert_array_equal(after.state_of(Uses), [10, -4, 10])
    np.testing.assert_array_equal(new["w"], model["w"] * 0.5)


def tiny_gradients(model, x, y):
    """A loss whose gradients float16 cannot hold."""
    prediction = (x @ model["w"] + model["b"]).astype(jnp.float32)
    return 1e-3 * jnp.mean((1e-2 * (prediction - y.astype(jnp.float32))) ** 2)


def trained(tx, compute_dtype, steps=60):
    x = jax.random.normal(jax.random.key(0), (64, 3))
    y = x @ jnp.array([1.0, -0.5, 0.25]) + 0.5
    step = sl.train_step(tiny_gradients, compute_dtype=compute_dtype)
    model = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    _, opt, loss = after_training(step, tx, steps, model, x, y)
    return float(loss / tiny_gradients(model, x, y)), opt


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss is computed in float16")
def test_a_model_in_float16_trains_with_it_and_not_without():
    tx = sl.adam(0.1)
    without, _ = trained(tx, "float16")
    scaled, opt = trained(tx.scale_loss(2.0**40, growth_interval=30), "float16")
    exact, _ = trained(tx, None)
    assert without > 0.5
    assert scaled < 2e-3
    assert exact < 2e-3
    assert int(opt.metrics["total_notfinite"]) > 0
    assert float(opt.loss_scale) < 2.0**40


def test_calls_of_a_training_step_compile_once():
    loss_fn = Counting(lambda model, x: (model["w"] * x).astype(jnp.float32).sum())
    step = sl.train_step(loss_fn, compute_dtype="float16", donate="all")
    model = jax.tree.map(jnp.copy, params)
    opt = sl.Optimizer(sl.adam(0.1).scale_loss(growth_interval=2), model)
    # The second one overflows.
    for x in (1.0, 60000.0, 1.0, 1.0):
        model, opt, loss = step(model, opt, jnp.array(x))
    assert loss_fn.traces == 1
    assert opt.metrics.to_dict()["scale_loss.total_notfinite"] == 1
    assert loss.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False])
def test_a_window_outside_is_skipped_as_a_whole_and_one_inside_without_single_batches(outside):
    # Outside, one scale is kept for each window.
    if outside:
        tx = sl.sgd(0.125).scale_loss(growth_interval=1).every_k(2)
        expected = [(1, 1), (0.5, 0), (0.5, 1), (1, 0)]
    else:
        tx = sl.sgd(0.125).every_k(2).scale_loss(growth_interval=2)
        expected = [(1, 1), (0.5, 1), (0.5, 0)]
    model, opt, seen = params, sl.Optimizer(tx, params), []
    for grads in (GOOD, BAD, GOOD, GOOD)[: len(expected)]:
        model, opt = step(model, opt, grads)
        seen.append((float(opt.loss_scale) / START, int(opt.metrics["mini_step"])))
    assert seen == expected
    assert_same_bits(model, jax.tree.map(lambda p, g: p - 0.125 * g, params, GOOD))


AROUND = {
    "only": lambda tx: tx.only(sl.where.path("w")),
    "average": lambda tx: tx.average(),
    "lookahead": lambda tx: tx.lookahead(2, 0.5),
    "schedule_free": lambda tx: tx.schedule_free(),
    "write": lambda tx: tx.write("master"),
    "project": lambda tx: tx.project(sl.projections.l2_ball(2.0)),
    "drive": lambda tx: tx.drive({"learning_rate": sl.schedules.ReduceOnPlateau(0.1)}),
    "split_complex": lambda tx: tx.split_complex(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_what_may_be_outside_may_as_well_be_inside(name):
    steps = (GOOD, BAD if name != "only" else GOOD, GOOD)

    def body(carry, grads):
        model, opt = carry
        model, opt = opt.step(model, scaled(grads, opt), value=jnp.ones(()))
        return (model, opt), (model, opt.eval_params(model), opt.loss_scale)

    def run(tx):
        grads = jax.tree.map(lambda *g: jnp.stack(g), *steps)
        return jax.lax.scan(body, (params, sl.Optimizer(tx, params)), grads)[1]

    tx, around = sl.rmsprop(0.1), AROUND[name]
    assert_same_bits(run(around(tx.scale_loss())), run(around(tx).scale_loss()))


@pytest.mark.slow
def test_frozen_parameters_do_not_count_and_reset_and_rebind_keep_the_scale():
    tx = sl.sgd(0.125).scale_loss().only(sl.where.path("b"))
    model, opt = step(params, sl.Optimizer(tx, params), BAD)
    assert float(model["b"]) == 0.875
    assert float(opt.loss_scale) == START

    opt = sl.Optimizer(sl.adam(0.1).scale_loss(), params)
    model, opt = step(params, opt, BAD)
    assert float(opt.reset(model).loss_scale) == START / 2
    assert float(opt.reset(model, where=sl.where.path("w")).loss_scale) == START / 2
    again, report = opt.rebind(model, tx=sl.adam(0.1).scale_loss(growth_interval=3))
    assert float(again.loss_scale) == START / 2
    assert not report.dropped
    begun, _ = sl.Optimizer(sl.adam(0.1), params).rebind(model, tx=sl.adam(0.1).scale_loss())
    assert float(begun.loss_scale) == START
