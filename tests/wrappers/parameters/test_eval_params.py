"""Slow weights, averages and outer optimizers, and the parameters that are evaluated."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import (
    after_steps,
    assert_close,
    assert_same_bits,
    assert_same_path,
    at,
    gradients,
    lenient,
    mlp,
    nested_dict,
    optax_trajectory,
    outside_of_conditionals,
    params_of,
    slalom_trajectory,
)
from slalom._core.protocol.bases import params_to_evaluate
from slalom._core.protocol.parts import Part

MODEL = nested_dict(jax.random.key(0))
GRADS = gradients(MODEL, 12)


@pytest.mark.slow
@pytest.mark.parametrize("reset_state", [False, True])
def test_lookahead_walks_the_path_of_optax(reset_state, x64):
    model = nested_dict(jax.random.key(0), jnp.float64)
    grads = gradients(model, 12)
    ours, opt = slalom_trajectory(
        sl.sgd(0.1, momentum=0.9).lookahead(3, 0.4, reset_state), model, grads
    )
    tx = optax.lookahead(optax.sgd(0.1, 0.9), 3, 0.4, reset_state=reset_state)
    both, _ = optax_trajectory(tx, optax.LookaheadParams.init_synced(model), grads)
    assert_same_path(ours, both.fast, model, 1e-9)
    assert_close(opt.eval_params(at(ours, -1)), at(both.slow, -1), rtol=1e-9)


def test_fast_states_keep_clocks_and_half_precision_averages_do_not_stall():
    halving = sl.schedules.exponential_decay(1.0, 1, 0.5)
    tx = sl.sgd(halving).every_k(2).lookahead(1, 1.0, reset_state=True).average()
    path, emitted = [jnp.zeros(())], []
    opt = sl.Optimizer(tx, path[0])
    for _ in range(6):
        model, opt = opt.step(path[-1], jnp.ones(()))
        path.append(model)
        emitted.append(bool(opt.has_updated))
    assert np.diff(path).tolist() == [0.0, -1.0, 0.0, -0.5, 0.0, -0.25]
    assert emitted == [False, True] * 3
    assert int(opt.metrics["gradient_step"]) == 3
    np.testing.assert_allclose(opt.eval_params(model), np.mean(path[2::2]), rtol=1e-6)

    model = jnp.zeros(4, jnp.bfloat16)
    tx = sl.sgd(1.0).average(0.999, debias=False)

    def body(carry, _):
        model, opt = carry
        return opt.step(model, jnp.zeros_like(model)), None

    opt = sl.Optimizer(tx, model)
    (model, opt), _ = jax.lax.scan(body, (jnp.ones_like(model), opt), length=3000)
    evaluated = opt.eval_params(model)
    assert evaluated.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(evaluated, np.float32), 1 - 0.999**3000, rtol=4e-3)


@pytest.mark.slow
def test_only_leaves_of_a_writer_are_replaced_and_fast_states_start_at_any_age():
    tx = sl.adam(0.1).lookahead(2, 0.5, reset_state=True)
    model, opt = MODEL, sl.Optimizer(tx, MODEL)
    model, opt = opt.step(model, at(GRADS, 0))
    opt = opt.reset(model, where=sl.where.path("scales.0"))
    model, opt = opt.step(model, at(GRADS, 1))
    np.testing.assert_array_equal(opt.state_of("scale_by_adam").age, [0, 0, 0])

    model = mlp(jax.random.key(1))
    weights = sl.where.ndim(min=2)
    for tx in (
        sl.sgd(0.1).average(0.5).only(weights),
        sl.sgd(0.1).partition({weights: sl.sgd(0.1).average(0.5)}),
        sl.sgd(0.1).average(0.5).every_k(1).partition({~weights: sl.SetToZero()}),
    ):
        after, opt = after_steps(tx, 2, model, jax.tree.map(jnp.ones_like, params_of(model)))
        evaluated = opt.eval_params(after)
        assert evaluated.activation is model.activation
        assert not jnp.array_equal(evaluated.layers[0].weight, after.layers[0].weight)
        assert_same_bits(evaluated.layers[0].bias, after.layers[0].bias)


SINCE_THE_START = 0.5 ** np.arange(12, -1, -1)
# The weights of the initial parameters and of those after each step.
AVERAGES = {
    "exponential": (sl.sgd(0.1).average(0.9), [0, *0.9 ** np.arange(11, -1, -1)]),
    "without debias": (
        sl.sgd(0.1).average(0.5, debias=False),
        SINCE_THE_START * np.where(np.arange(13) == 0, 1, 0.5),
    ),
    "of what was emitted": (sl.sgd(0.1).every_k(3).average(), [0, *[0, 0, 1] * 4]),
    # The outermost of two writers is evaluated.
    "of lookahead": (sl.sgd(0.1).lookahead(2, 0.5).average(), [0, *[1] * 12]),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_the_weighted_mean_of_the_parameters(name):
    tx, weights = AVERAGES[name]
    history, opt = slalom_trajectory(tx, MODEL, GRADS)
    evaluated = opt.eval_params(at(history, -1))
    for a, p, h in zip(*map(jax.tree.leaves, (evaluated, MODEL, history)), strict=True):
        visited = np.concatenate([p[None], h]).astype(np.float64)
        expected = np.average(visited, axis=0, weights=weights)
        np.testing.assert_allclose(a, expected, rtol=1e-5, atol=1e-7)


def test_an_average_begins_with_the_parameters_and_changes_no_step():
    plain, *averaged = jax.jit(
        lambda: [
            slalom_trajectory(tx, MODEL, GRADS)[0]
            for tx in (sl.adamw(0.1), sl.adamw(0.1).average(0.999), sl.adamw(0.1).average())
        ]
    )()
    for path in averaged:
        assert_same_bits(path, plain)

    for tx in (sl.sgd(0.1).average(0.9999), sl.Scale(2.0) | sl.sgd(0.1).average()):
        opt = sl.Optimizer(tx, MODEL)
        assert_same_bits(opt.eval_params(MODEL), MODEL)
        model, opt = opt.step(MODEL, at(GRADS, 0))
        assert_same_bits(opt.eval_params(model), model)

    model = mlp()
    for tx in (sl.adam(0.1), sl.adam(0.1).every_k(2), sl.lion(0.1)):
        evaluated = sl.Optimizer(tx, model).eval_params(model)
        for a, b in zip(jax.tree.leaves(evaluated), jax.tree.leaves(model), strict=True):
            assert a is b


FOLLOWED = "writes the parameters itself, so nothing may follow it: make it the last link of the "
RANGE = "must be in [0, 1], got 1.5. For other steps, use `.outer`."
ADAM, SLOW = sl.adam(0.1), sl.sgd(0.1).lookahead(2, 0.5)
REFUSED = [
    (lambda: SLOW | sl.Scale(2.0), f"Outer {FOLLOWED}chain."),
    (lambda: SLOW.every_k(2) | sl.Scale(2.0), f"EveryK {FOLLOWED}chain."),
    (lambda: ADAM.lookahead(0, 0.5), "Outer.every must be at least 1, got 0."),
    (lambda: ADAM.lookahead(2, 1.5), f"`slow_step_size` of `.lookahead` {RANGE}"),
    (lambda: ADAM.average(1.0), "Average.decay must be in [0, 1), got 1.0."),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_bad_input_is_refused_by_name(make, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole text is compared
        make()
    assert str(caught.value) == message


def test_evaluation_runs_a_compiled_program(monkeypatch):
    traced = []

    def counted(*args, **options):
        traced.append(args)
        return params_to_evaluate(*args, **options)

    monkeypatch.setattr("slalom._loop.programs.compiled.params_to_evaluate", counted)
    model = {"counted": jnp.ones(3)}
    opt = sl.Optimizer(sl.sgd(0.1).average(0.5), model)
    for _ in range(3):
        model, opt = opt.step(model, model)
        evaluated = opt.eval_params(model)
    here = Part.root(opt.transform, opt.state, sl.Context(step=opt.count), model)
    expected = params_to_evaluate(here)
    assert len(traced) == 1
    assert_close(evaluated, expected, rtol=1e-6)


nesterov = sl.sgd(0.7, momentum=0.9, nesterov=True)


def test_momentum_of_outer_steps_and_states_inside_have_their_names():
    params, grads = jnp.array([1.0, -2.0]), np.random.default_rng(0).normal(size=(7, 2))
    tx = sl.sgd(0.1).outer(nesterov, every=3)
    ours, opt = slalom_trajectory(tx, params, jnp.asarray(grads, jnp.float32))
    fast = slow = np.array([1.0, -2.0])
    velocity, expected = np.zeros(2), []
    for i, g in enumerate(grads):
        fast = fast - 0.1 * g
        if i % 3 == 2:
            velocity = 0.9 * velocity + slow - fast
            slow = fast = slow - 0.7 * (slow - fast + 0.9 * velocity)
        expected.append(fast)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(opt.eval_params(params), slow, rtol=1e-5)
    assert int(opt.state.syncs) == 2

    tx = sl.adam(0.1).lookahead(2, 0.5, reset_state=True)
    assert tx == sl.adam(0.1).outer(sl.sgd(0.5), 2, reset_state=True)

    tx = sl.sgd(0.1, momentum=0.9).outer(nesterov, every=2, reset_state=True)
    _, opt = after_steps(tx, 2, jnp.ones(2), jnp.ones(2))
    assert not np.any(jax.tree.leaves(opt.state_of("outer.trace").trace)[0])
    assert np.all(jax.tree.leaves(opt.state_of("optimizer.trace").trace)[0])

    # To the outer optimizer, the gradient is the way back, and mini-batches have no weight.
    tx = sl.sgd(0.1).outer(sl.Cautious() | sl.sgd(1.0).every_k(2), every=1)
    step, _ = after_steps(tx, 2, jnp.ones(2), jnp.ones(2), grad=-jnp.ones(2), weight=0.0)
    np.testing.assert_allclose(step, 0.9, rtol=1e-6)

    slow = sl.sgd(sl.schedules.linear(0.7, 0.0, 2))
    params = jnp.ones(2)
    opt = sl.Optimizer(sl.sgd(0.1).outer(slow, every=1), params)
    assert opt.hyperparams["learning_rate"] == np.float32(0.1)
    opt = opt.with_hyperparams(learning_rate=0.2)
    outer = "outer.optimizer.scale_by_learning_rate.learning_rate"
    rates = []
    for _ in range(3):
        rates.append(float(opt.hyperparams[outer]))
        params, opt = opt.step(params, jnp.ones(2))
    np.testing.assert_allclose(rates, [0.7, 0.35, 0.0], atol=1e-7)
    assert opt.hyperparams["learning_rate"] == np.float32(0.2)
    assert opt.describe(params).to_dict()[""]["learning_rate"] == np.float32(0.2)


@pytest.mark.slow
def test_replicas_meet_and_master_copies_change_no_slow_weight():
    params = {"w": jnp.linspace(-1, 1, 6).astype("bfloat16")}
    tx = sl.adam(0.1).every_k(2).outer(nesterov, every=2).write("master")
    grads = {"w": jnp.stack([jnp.cos(jnp.arange(6.0) + i) for i in range(9)]).astype("bfloat16")}
    full, opt = slalom_trajectory(tx, params, grads)
    held = opt.eval_params({"w": full["w"][-1]}, full_precision=True)["w"]
    assert held.dtype == jnp.float32
    np.testing.assert_allclose(held.astype("bfloat16"), full["w"][7], rtol=1e-2)

    diloco, carry, batch = start(len(jax.devices()))
    assert len(jax.devices()) > 1
    text = diloco.lower(jnp.array(0), *carry, *batch).compile().as_text()
    assert COLLECTIVE.search(text)
    assert not COLLECTIVE.search(outside_of_conditionals(text))

    diloco, (fast, inner, slow, outer), (x, y) = start(1)
    tx = sl.sgd(0.1).outer(nesterov, every=EVERY)
    step, model = sl.train_step(mean_square), jax.tree.map(lambda p: p[0], fast)
    opt = sl.Optimizer(tx, model)
    for n in range(2 * EVERY):
        fast, inner, slow, outer, losses = diloco(jnp.array(n), fast, inner, slow, outer, x, y)
        with lenient():
            model, opt, loss = step(model, opt, x[0], y[0])
        np.testing.assert_allclose(losses[0], loss, rtol=1e-5)
        np.testing.assert_allclose(fast["w"][0], model["w"], rtol=1e-5)


EVERY = 3


def mean_square(model, x, y):
    return jnp.mean((jnp.tanh(x @ model["w"]) - y) ** 2)


def start(replicas):
    model = {"w": jnp.linspace(-0.3, 0.3, 8).reshape(8, 1)}
    mesh = jax.make_mesh((replicas,), ("replicas",), (AxisType.Auto,))
    split = NamedSharding(mesh, P("replicas"))
    step = sl.train_step(mean_square)

    def spread(model):
        copies = jax.tree.map(lambda p: jnp.broadcast_to(p, (replicas, *p.shape)), model)
        return jax.lax.with_sharding_constraint(copies, split)

    fast = jax.jit(spread)(model)
    inner = jax.jit(jax.vmap(lambda model: sl.Optimizer(sl.sgd(0.1), model)))(fast)
    slow = jax.device_put(model, NamedSharding(mesh, P()))
    outer = sl.Optimizer(nesterov, slow)

    @jax.jit
    def diloco(n, fast, inner, slow, outer, x, y):
        fast, inner, losses = jax.vmap(step)(fast, inner, x, y)

        def meet(fast, slow, outer):
            way = jax.tree.map(lambda s, f: s - jnp.mean(f, axis=0), slow, fast)
            slow, outer = outer.step(slow, way)
            return spread(slow), slow, outer

        meets = (n + 1) % EVERY == 0
        fast, slow, outer = jax.lax.cond(meets, meet, lambda *same: same, fast, slow, outer)
        return fast, inner, slow, outer, losses

    random = np.random.default_rng(0)
    x = jax.device_put(random.standard_normal((replicas, 4, 8)).astype(np.float32), split)
    y = jax.device_put(np.tanh(np.asarray(x).sum(axis=2, keepdims=True)), split)
    return diloco, (fast, inner, slow, outer), (x, y)


COLLECTIVE = re.compile(r" (all-\w+|collective-\w+|reduce-scatter)(-start)?\(")
