"""`opt.shard_state`: moments are partitioned over the axis that the batch is partitioned over."""

import copy
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import assert_close, known
from table import BUT_RECIPES, rows

DEVICES = jax.device_count()
mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def put(tree, *spec):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec))), tree)


def make_params():
    return {
        "w": jnp.linspace(-1, 1, 32).reshape(4, 8),
        "b": jnp.linspace(0.5, 1, 8),
        "odd": jnp.ones(3),
        "none": jnp.ones((0, 8)),
        "s": jnp.asarray(0.25, jnp.float32),
    }


def loss_fn(params):
    leaves = jax.tree.leaves(params)
    return sum((jnp.sum(0.5 * x + 0.05 * x**2) for x in leaves), jnp.ones(()))


def step(params, opt, loss_fn=loss_fn):
    grads = jax.grad(loss_fn)(params)
    given = known(params, grads) | {"value": loss_fn(params), "value_fn": loss_fn}
    return opt.step(params, grads, **given)


def noisy_step(params, opt, noise):
    """A step whose gradient has blocks of full rank, and other singular vectors than before.

    SOAP and Shampoo amplify the directions in which all gradients so far vanish. These would hold
    nothing but rounding errors, which depend on how the program was compiled.
    """
    return step(params, opt, lambda params: loss_fn(params) + jnp.vdot(noise, params["w"]))


def hadamard(size):
    """An orthogonal matrix whose square blocks are orthogonal, up to a factor, too."""
    corner = np.sqrt(0.5) * np.array([[1, 1], [1, -1]])
    return np.kron(corner, hadamard(size // 2)) if size > 1 else np.ones((1, 1), np.float32)


def gathers(program):
    """The shapes of what a compiled program gathers from all devices."""
    return re.findall(r"= (\S+) all-gather", program.as_text())


def sharded(tx, params=None):
    params = put(make_params() if params is None else params)
    opt, report = sl.Optimizer(tx, params).shard_state(mesh)
    return params, opt, report


def test_the_largest_free_dimension_is_partitioned_if_the_mesh_can_hold_it():
    _, opt, report = sharded(sl.adam(1e-3))
    adam = opt.state_of("scale_by_adam")
    assert adam.mu["w"].sharding.spec == P(None, "data")
    assert adam.nu["b"].sharding.spec == P("data")
    assert adam.nu["odd"].sharding.is_fully_replicated
    assert report.partitioned["scale_by_adam.mu.w"] == (None, "data")
    assert set(report.whole) == {
        f"scale_by_adam.{m}.{p}" for m in ("mu", "nu") for p in ("none", "odd", "s")
    }
    saved = 2 * 4 * (32 + 8) * (DEVICES - 1) // DEVICES
    assert report.bytes_before - report.bytes_after == saved
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(opt))
    assert held == report.bytes_after

    both = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    home = NamedSharding(both, P(None, "model"))
    params = {"w": jax.device_put(jnp.ones((4, 8)), home)}
    opt, _ = sl.Optimizer(sl.adam(1e-3), params).shard_state(both)
    assert opt.state_of("scale_by_adam").mu["w"].sharding.spec == P("data", "model")
    after, opt = jax.jit(lambda p, o: step(p, o))(params, opt)
    assert after["w"].sharding == home
    assert opt.state_of("scale_by_adam").mu["w"].sharding.spec == P("data", "model")

    opt = sl.Optimizer(sl.adam(1e-3), make_params())
    for name in ("model", "dat"):
        with pytest.raises(ValueError, match=f"The mesh has no axis '{name}'. Its axes: 'data'"):
            opt.shard_state(mesh, axis=name)
    explicit = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="needs a mesh with automatic axes"):
        opt.shard_state(explicit)


@rows(BUT_RECIPES, everyday=())
def test_steps_are_those_of_one_device_and_keep_the_shardings(row):
    noise = 0.1 * jax.random.normal(jax.random.key(0), (2, 8, 8)) + hadamard(8)[None]
    start = {"b": jnp.ones(8), "odd": jnp.ones(3), "none": jnp.ones((0, 8))}
    start["w"] = jnp.linspace(-1, 1, 64).reshape(8, 8)
    params, opt, _ = sharded(row.tx, start)
    before = [x.sharding for x in jax.tree.leaves((params, opt))]
    compiled = jax.jit(lambda params, opt, noise: noisy_step(params, opt, noise))
    once = compiled(params, opt, noise[0])
    twice = compiled(*once, noise[1])
    assert [x.sharding for x in jax.tree.leaves(twice)] == before
    assert compiled._cache_size() == 1
    single = jax.jit(lambda params, opt, noise: noisy_step(params, opt, noise))
    first = single(start, sl.Optimizer(row.tx, start), noise[0])
    second = single(*first, noise[1])
    # Its solve multiplies rounding errors, as under `vmap` in `test_table.py`, and the second step
    # follows them. In float64 both steps agree.
    is_rounded = row.name == "ScaleByLevenbergMarquardt, columns"
    found, expected, rtol = (once, first, 1e-3) if is_rounded else (twice, second, 2e-5)
    assert_close(found[0], expected[0], rtol=rtol, atol=1e-6)


CLIPPED = sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3)


def large_params():
    return put({"w": jnp.ones((64, 128)), "b": jnp.ones(128)})


@pytest.mark.slow
def test_each_parameter_is_gathered_once_and_moments_never():
    tx, params = CLIPPED, large_params()
    opt, report = sl.Optimizer(tx, params).shard_state(mesh)
    planned = sl.plan(tx, params, mesh.abstract_mesh, shard_state="data")
    assert planned.state == report.bytes_after
    batch = put(jnp.ones((8, 64)), "data")

    def train(params, opt, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"][None]) ** 2))(params)
        return opt.step(params, grads)

    program = jax.jit(train, donate_argnums=(0, 1)).lower(params, opt, batch).compile()
    assert len(gathers(program)) == len(params)
    # The state takes a quarter of the memory, which the program's arguments show.
    moments = 2 * 4 * (64 * 128 + 128)
    whole = jax.jit(train, donate_argnums=(0, 1))
    whole = whole.lower(params, sl.Optimizer(tx, params), batch).compile()
    size = [p.memory_analysis().argument_size_in_bytes for p in (whole, program)]
    assert size[0] - size[1] == moments * (DEVICES - 1) // DEVICES


NORMS = {
    "lamb": sl.lamb(1e-3),
    "if_finite": sl.adamw(1e-3).if_finite(),
    "every_k": CLIPPED.every_k(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("tx", NORMS.values(), ids=NORMS)
def test_nothing_but_parameters_is_gathered(tx):
    params = large_params()
    opt, _ = sl.Optimizer(tx, params).shard_state(mesh)
    run = jax.jit(lambda p, opt, g: opt.step(p, g), donate_argnums=(0, 1))
    program = run.lower(params, opt, params).compile()
    assert len(gathers(program)) <= len(params)


ON_EIGHT_DEVICES = {
    "binding/test_shard_state.py": (
        "test_the_largest_free_dimension_is_partitioned_if_the_mesh_can_hold_it",
        "test_steps_are_those_of_one_device_and_keep_the_shardings[ScaleByTrustRatio]",
        "test_each_parameter_is_gathered_once_and_moments_never",
        "test_one_number_in_any_shard_makes_a_tree_not_finite",
    ),
    "binding/test_plan.py": (
        "test_plan_equals_the_figures_of_the_compiled_program[adafactor-both]",
        "test_partitioned_state_and_joined_axes_are_planned_as_they_are_stored",
    ),
    "matrices/test_matrices_sharded.py": (
        "test_the_number_of_exchanges_does_not_depend_on_the_steps[fsdp-explicit]",
        "test_dion_exchanges_less_than_muon[1-0.1-explicit]",
        "test_no_more_devices_take_part_than_finish_earlier_and_the_idle_are_told",
    ),
    "matrices/test_every_matrix_rule.py": ("test_sharded_matrices_take_the_same_path[soap-auto]",),
}
"""A test of each kind whose result depends on the number of devices."""


@pytest.mark.slow
@pytest.mark.skipif(DEVICES == 8, reason="this is the run on eight devices")
def test_all_of_this_holds_on_eight_devices():
    tests = Path(__file__).parents[1]
    chosen = [
        f"{tests / file}::{name}" for file, names in ON_EIGHT_DEVICES.items() for name in names
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen, "-n", "0", "-q", "-m", ""],
        env={**os.environ, "SLALOM_TEST_DEVICES": "8", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_steps_and_changes_of_an_optimizer_keep_its_state_partitioned():
    params, opt, _ = sharded(sl.adam(1e-3))
    before = [x.sharding for x in jax.tree.leaves((params, opt))]
    by_hand = step(params, opt)
    trained = sl.train_step(loss_fn, donate=False)(params, opt)[:2]
    for after in (by_hand, trained):
        assert [x.sharding for x in jax.tree.leaves(after)] == before
    params, opt = by_hand
    spec = opt.state_of("scale_by_adam").mu["w"].sharding.spec
    others = opt.with_hyperparams(learning_rate=0.1), opt.reset(params), opt.rebind(params)[0]
    for other in (*others, copy.deepcopy(opt)):
        assert other.binding.sharding == opt.binding.sharding
        assert other.state_of("scale_by_adam").mu["w"].sharding.spec == spec
    # A pickled optimizer knows no devices.
    assert pickle.loads(pickle.dumps(opt)).binding.sharding is None


def test_one_number_in_any_shard_makes_a_tree_not_finite():
    find = jax.jit(sl.tree.all_finite)
    x = np.ones(2 * DEVICES, np.float32)
    assert find(put(jnp.asarray(x), "data"))
    for value in (np.nan, np.inf, -np.inf):
        for at in range(2 * DEVICES):
            bad = x.copy()
            bad[at] = value
            assert not find(put(jnp.asarray(bad), "data")), (value, at)
        # Large arrays are divided among threads, even on one device.
        assert not find(jnp.ones((2000, 2000)).at[7, 3].set(value)), value
