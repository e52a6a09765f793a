"""`opt.shard_state`: moments are partitioned over the axis that the batch is partitioned over."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import slow_except
from table import EVERYTHING

DEVICES = 4
mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def put(tree, *spec):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec))), tree)


def make_params():
    return {
        "w": jnp.linspace(-1, 1, 32).reshape(4, 8),
        "b": jnp.linspace(0.5, 1, 8),
        "odd": jnp.ones(3),
        "s": jnp.asarray(0.25, jnp.float32),
    }


def loss_fn(params):
    leaves = jax.tree.leaves(params)
    return sum((jnp.sum(0.5 * x + 0.05 * x**2) for x in leaves), jnp.ones(()))


def step(params, opt):
    grads = jax.grad(loss_fn)(params)
    known = {"value": loss_fn(params), "grad": grads, "value_fn": loss_fn}
    return opt.step(params, grads, **known)


def sharded(tx):
    params = put(make_params())
    opt, report = sl.Optimizer(tx, params).shard_state(mesh)
    return params, opt, report


def test_the_largest_dimension_that_divides_is_partitioned():
    _, opt, report = sharded(sl.adam(1e-3))
    adam = opt.state_of("scale_by_adam")
    assert adam.mu["w"].sharding.spec == P(None, "data")
    assert adam.nu["b"].sharding.spec == P("data")
    assert adam.nu["odd"].sharding.is_fully_replicated
    assert report.partitioned["scale_by_adam.mu.w"] == (None, "data")
    assert set(report.whole) == {
        f"scale_by_adam.{m}.{p}" for m in ("mu", "nu") for p in ("odd", "s")
    }
    saved = 2 * 4 * (32 + 8) * (DEVICES - 1) // DEVICES
    assert report.bytes_before - report.bytes_after == saved
    held = sum(x.addressable_shards[0].data.nbytes for x in opt.arrays)
    assert held == report.bytes_after


def test_dimensions_that_are_partitioned_already_stay_so():
    both = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    home = NamedSharding(both, P(None, "model"))
    params = {"w": jax.device_put(jnp.ones((4, 8)), home)}
    opt, _ = sl.Optimizer(sl.adam(1e-3), params).shard_state(both)
    assert opt.state_of("scale_by_adam").mu["w"].sharding.spec == P("data", "model")
    after, opt = jax.jit(lambda p, o: step(p, o))(params, opt)
    assert after["w"].sharding == home
    assert opt.state_of("scale_by_adam").mu["w"].sharding.spec == P("data", "model")


ROWS = slow_except(EVERYTHING, "adamw", "lamb")


@pytest.mark.parametrize("name", ROWS)
def test_steps_are_those_of_one_device_and_keep_the_shardings(name):
    params, opt, _ = sharded(EVERYTHING[name])
    before = [x.sharding for x in jax.tree.leaves((params, opt))]
    compiled = jax.jit(lambda params, opt: step(params, opt))
    once = compiled(params, opt)
    twice = compiled(*once)
    assert [x.sharding for x in jax.tree.leaves(twice)] == before
    assert compiled._cache_size() == 1
    alone, own = make_params(), sl.Optimizer(EVERYTHING[name], make_params())
    single = jax.jit(lambda params, opt: step(params, opt))
    expected, _ = single(*single(alone, own))
    for a, b in zip(jax.tree.leaves(twice[0]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("tx", [sl.adamw(1e-3), sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)])
def test_each_parameter_is_gathered_once_and_moments_never(tx):
    params = put({"w": jnp.ones((64, 128)), "b": jnp.ones(128)})
    opt, _ = sl.Optimizer(tx, params).shard_state(mesh)
    batch = put(jnp.ones((8, 64)), "data")

    def train(params, opt, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"][None]) ** 2))(params)
        return opt.step(params, grads)

    program = jax.jit(train, donate_argnums=(0, 1)).lower(params, opt, batch).compile()
    text = program.as_text()
    gathered = re.findall(r"= (\S+) all-gather", text)
    assert len(gathered) == len(params)
    # The state takes a quarter of the memory, which the program's arguments show.
    moments = 2 * 4 * (64 * 128 + 128)
    whole = jax.jit(train, donate_argnums=(0, 1))
    whole = whole.lower(params, sl.Optimizer(tx, params), batch).compile()
    size = [p.memory_analysis().argument_size_in_bytes for p in (whole, program)]
    assert size[0] - size[1] == moments * (DEVICES - 1) // DEVICES


@pytest.mark.slow
def test_train_step_and_eager_steps_keep_the_shardings():
    params, opt, _ = sharded(sl.adam(1e-3))
    before = [x.sharding for x in jax.tree.leaves((params, opt))]
    by_hand = step(params, opt)
    trained = sl.train_step(loss_fn, donate=False)(params, opt)[:2]
    for after in (by_hand, trained):
        assert [x.sharding for x in jax.tree.leaves(after)] == before


@pytest.mark.slow
def test_what_changes_an_optimizer_keeps_its_state_partitioned():
    params, opt, _ = sharded(sl.adam(1e-3))
    params, opt = step(params, opt)
    spec = opt.state_of("scale_by_adam").mu["w"].sharding.spec
    others = [
        opt.with_hyperparams(learning_rate=0.1),
        opt.reset(params),
        opt.rebind(params)[0],
    ]
    for other in others:
        assert other.binding.sharding == opt.binding.sharding
        assert other.state_of("scale_by_adam").mu["w"].sharding.spec == spec
    # A pickled optimizer knows no devices.
    assert pickle.loads(pickle.dumps(opt)).binding.sharding is None


@pytest.mark.parametrize("name", ["model", "dat"])
def test_an_axis_that_the_mesh_has_not_is_refused(name):
    opt = sl.Optimizer(sl.adam(1e-3), make_params())
    with pytest.raises(ValueError, match=f"The mesh has no axis '{name}'. Its axes: 'data'"):
        opt.shard_state(mesh, axis=name)


def test_explicit_axes_are_refused():
    explicit = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="needs a mesh with automatic axes"):
        sl.Optimizer(sl.adam(1e-3), make_params()).shard_state(explicit)
