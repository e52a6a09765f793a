"""Outer optimizers against the equations of SNOO and DiLoCo, and replicas that meet."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import lenient, slalom_trajectory

nesterov = sl.sgd(0.7, momentum=0.9, nesterov=True)


def test_the_golden_slow_steps_of_diloco(x64):
    # Each fast step moves by the gradient, so that the differences are .1, .05 and .02.
    opt = sl.Optimizer(sl.sgd(1.0).outer(nesterov, every=1), jnp.ones(()))
    params, slow = jnp.ones(()), []
    for way in (0.1, 0.05, 0.02):
        params, opt = opt.step(params, jnp.asarray(way))
        slow.append(float(params))
    np.testing.assert_allclose(slow, [0.867, 0.7438, 0.63782], rtol=1e-12)


def test_every_few_steps_with_momentum():
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


def test_a_reset_inside_keeps_the_outer_state_and_bare_names_are_those_inside():
    tx = sl.adam(0.1).lookahead(2, 0.5, reset_state=True)
    assert tx == sl.adam(0.1).outer(sl.sgd(0.5), 2, reset_state=True)

    tx = sl.sgd(0.1, momentum=0.9).outer(nesterov, every=2, reset_state=True)
    params = jnp.ones(2)
    opt = sl.Optimizer(tx, params)
    for _ in range(2):
        params, opt = opt.step(params, jnp.ones(2))
    assert not np.any(jax.tree.leaves(opt.state_of("outer.trace").trace)[0])
    assert np.all(jax.tree.leaves(opt.state_of("optimizer.trace").trace)[0])

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
def test_a_master_copy_changes_no_slow_weight():
    params = {"w": jnp.linspace(-1, 1, 6).astype("bfloat16")}
    tx = sl.adam(0.1).every_k(2).outer(nesterov, every=2).write("master")
    grads = {"w": jnp.stack([jnp.cos(jnp.arange(6.0) + i) for i in range(9)]).astype("bfloat16")}
    full, opt = slalom_trajectory(tx, params, grads)
    held = opt.eval_params({"w": full["w"][-1]}, full_precision=True)["w"]
    assert held.dtype == jnp.float32
    np.testing.assert_allclose(held.astype("bfloat16"), full["w"][7], rtol=1e-2)


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


def outside_of_conditionals(text):
    """The lines of a compiled program that run in every step."""
    computations, name = {}, ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head:
            name = "ENTRY" if head[1] else head[2]
            computations[name] = []
        elif name:
            computations[name].append(line)
    waiting, seen = ["ENTRY"], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in computations:
            continue
        seen.add(name)
        for line in computations[name]:
            yield line
            if " conditional(" not in line:
                waiting += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)


COLLECTIVE = re.compile(r" (all-\w+|collective-\w+|reduce-scatter)(-start)?\(")


@pytest.mark.slow
def test_replicas_reduce_where_they_meet_and_one_is_an_outer_optimizer():
    diloco, carry, batch = start(len(jax.devices()))
    assert len(jax.devices()) > 1
    text = diloco.lower(jnp.array(0), *carry, *batch).compile().as_text()
    assert COLLECTIVE.search(text)
    assert not any(map(COLLECTIVE.search, outside_of_conditionals(text)))

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
