"""Parameters and state in the memory of the host stay there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import slalom as sl
from helpers import slow_except, unoptimized
from table import GRADIENT_ROWS, rows

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
HOMES = {
    "mesh": NamedSharding(mesh, P("data"), memory_kind="pinned_host"),
    "device": SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"),
}
compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
)
ADAM = sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)


def make_params():
    return {"w": jnp.linspace(-1, 1, 32).reshape(4, 8), "b": jnp.linspace(0.5, 1, 4)}


def put(tree, home):
    return jax.tree.map(lambda x: jax.device_put(x, home), tree)


def loss_fn(params):
    return sum((jnp.sum(0.5 * x + 0.05 * x**2) for x in jax.tree.leaves(params)), jnp.ones(()))


def on_device(tree):
    return put(tree, jax.tree.leaves(tree)[0].sharding.with_memory_kind("device"))


def homes(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


def on_host(tree):
    return [x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(tree)]


def train(params, opt):
    return sl.train_step(loss_fn, donate=False)(params, opt)[:2]


def by_hand(params, opt):
    grads = put(jax.grad(loss_fn)(on_device(params)), homes(params)[0])
    return opt.step(params, grads)


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_state_is_where_its_parameters_are(home):
    opt = sl.Optimizer(ADAM, put(make_params(), home))
    adam = opt.state_of("scale_by_adam")
    for x in jax.tree.leaves((adam.mu, adam.nu)):
        assert x.sharding == home
    assert sum(on_host(opt)) == 4  # not the numbers


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("step", slow_except([train, by_hand, jax.jit(train)], train))
def test_steps_keep_memory_and_sharding_and_compile_once(step, home):
    params = put(make_params(), home)
    opt = sl.Optimizer(ADAM, params)
    before = homes((params, opt))
    once = step(params, opt)
    known = len(compilations)
    twice = step(*once)
    assert len(compilations) == known
    assert homes(twice) == before
    assert compilations  # or the number above would say nothing
    expected = train(*train(make_params(), sl.Optimizer(ADAM, make_params())))
    for a, b in zip(jax.tree.leaves(twice), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@rows(0, GRADIENT_ROWS, everyday=())
@unoptimized()
def test_every_rule_keeps_the_memory_of_its_state(row):
    params = put(make_params(), HOMES["mesh"])
    opt = sl.Optimizer(row.tx, params)
    before = on_host((params, opt))
    after = train(*train(params, opt))
    assert on_host(after) == before
    params = on_device(params)
    expected = train(*train(params, sl.Optimizer(row.tx, params)))
    for a, b in zip(jax.tree.leaves(after[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_state_alone_may_be_on_the_host():
    params = on_device(put(make_params(), HOMES["mesh"]))
    opt = sl.Optimizer(ADAM, params)
    offloaded = jax.tree.map(lambda x: jax.device_put(x, HOMES["mesh"]) if x.ndim else x, opt)
    for step in (train, jax.jit(train)):
        new, after = step(params, offloaded)
        assert not any(on_host(new))
        assert on_host(after) == on_host(offloaded)
        np.testing.assert_allclose(new["w"], train(params, opt)[0]["w"], rtol=1e-6)


@pytest.mark.slow
def test_what_else_takes_a_model_takes_it_from_the_host():
    params = put(make_params(), HOMES["mesh"])
    opt = sl.Optimizer(ADAM.average(0.9), params)
    params, opt = train(params, opt)
    grads = jax.grad(loss_fn)(on_device(params))
    updates, _ = opt.update(params, grads)
    new = sl.apply_updates(params, updates)
    assert all(on_host(new))
    np.testing.assert_allclose(new["w"], opt.step(params, grads)[0]["w"], rtol=1e-6)
    for other in (opt.reset(params), opt.rebind(params)[0]):
        assert on_host(other) == on_host(opt)
    mean = opt.eval_params(params)
    np.testing.assert_allclose(mean["w"], params["w"], rtol=1e-6)
    assert all(on_host(mean))
    opt.describe(params)
