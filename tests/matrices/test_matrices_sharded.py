"""Matrices on several devices: each device gets whole ones, and exchanges nothing in between."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import sampled
from slalom.rules.matrices._stacks import Placement, distribution

COLLECTIVES = r"(?<= )(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?=\()"
SHAPE = (2, jax.device_count() // 2)
AXES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
SPECS = {
    "replicated": P(),
    "fsdp": P("data", None),
    "tensor": P(None, "model"),
    "both": P("data", "model"),
    "one axis": P(("data", "model"), None),
}


def make(spec, kind):
    mesh = jax.make_mesh(SHAPE, ("data", "model"), axis_types=(kind,) * 2)
    random = np.random.default_rng(0)
    host = {name: random.normal(size=(8, 16)).astype(np.float32) for name in "abc"}
    host["turned"] = random.normal(size=(16, 8)).astype(np.float32)
    sides = (*spec, *(None,) * (2 - len(spec)))

    def put(name, x):
        own = sides[::-1] if name == "turned" else sides
        return jax.device_put(x, NamedSharding(mesh, P(*own)))

    return host, {name: put(name, x) for name, x in host.items()}


def compiled(tx, params):
    step = jax.jit(lambda params, opt: opt.step(params, params))
    return step, step.lower(params, sl.Optimizer(tx, params)).compile()


def exchanges(program):
    return sorted(re.findall(COLLECTIVES, program.as_text()))


PLACES = [(spec, axes) for spec in SPECS for axes in AXES]


@pytest.mark.parametrize("case", sampled(PLACES), ids="-".join)
def test_the_number_of_exchanges_does_not_depend_on_the_steps(case):
    host, params = make(SPECS[case[0]], AXES[case[1]])
    _, once = compiled(sl.muon(0.1, ns_steps=1), params)
    step, program = compiled(sl.muon(0.1), params)
    assert exchanges(program) == exchanges(once)
    assert 1 <= len(exchanges(program)) <= 4
    got, _ = step(params, sl.Optimizer(sl.muon(0.1), params))
    want, _ = sl.Optimizer(sl.muon(0.1), host).step(host, host)
    for name in host:
        np.testing.assert_allclose(got[name], want[name], atol=2e-6)
        assert got[name].sharding.is_equivalent_to(params[name].sharding, 2)


SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}


def exchanged_bytes(program):
    """The bytes that each device gets from others, up to the share that it has already."""
    total = 0
    for line in program.as_text().splitlines():
        if found := re.search(rf"= (.*?) {COLLECTIVES}", line):
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
            size = sum(
                SIZES[t] * math.prod(map(int, filter(None, n.split(",")))) for t, n in arrays
            )
            # A sum is scattered, and then gathered.
            total += size * (2 if found[2] == "all-reduce" else 1)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("number", "most", "axes"), [(1, 0.1, "explicit"), (16, 0.9, "automatic")])
def test_dion_exchanges_less_than_muon(number, most, axes):
    mesh = jax.make_mesh(SHAPE, ("data", "model"), axis_types=(AXES[axes],) * 2)
    place = NamedSharding(mesh, P(None, "data", "model"))
    layout = {sl.where.everything(): "soi"}
    host = np.random.default_rng(0).normal(size=(number, 128, 128)).astype(np.float32)
    params = {"w": jax.device_put(host, place)}
    tx = sl.contrib.dion(0.1, 1 / 8, layout=layout)
    step, dion = compiled(tx, params)
    _, muon = compiled(sl.muon(0.1, layout=layout), params)
    assert exchanged_bytes(dion) < most * exchanged_bytes(muon)
    # No exchange is of whole matrices.
    assert not re.search(rf"\[{number},128,128\][^=]* {COLLECTIVES}", dion.as_text())
    got, _ = step(params, sl.Optimizer(tx, params))
    want, _ = sl.Optimizer(tx, {"w": host}).step({"w": host}, {"w": host})
    np.testing.assert_allclose(got["w"], want["w"], atol=1e-5)
    assert got["w"].sharding.is_equivalent_to(place, 3)


@pytest.mark.slow
def test_the_mesh_may_come_from_set_mesh():
    host, params = make(P(), AxisType.Auto)
    momentum = sl.Orthogonalize()
    update = jax.jit(lambda grads: momentum.update(grads, None)[0])
    with jax.set_mesh(params["a"].sharding.mesh):
        program = update.lower(params).compile()
        got = update(params)
    assert exchanges(program)
    want, _ = jax.jit(momentum.update)(host, None)
    for name in host:
        np.testing.assert_allclose(got[name], want[name], atol=2e-6)


def test_no_more_devices_take_part_than_finish_earlier_and_the_idle_are_told():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    place = Placement(mesh, ())
    free = {n: distribution(place, (None, None), n) for n in (1, 2, 4, 8, 12, 16)}
    one, both = ("model",), ("data", "model")
    sizes = {1: ((), 1), 2: (one, 4), 4: (one, 4), 8: (both, 8), 12: (both, 16), 16: (both, 16)}
    assert {n: (d.over, d.size) for n, d in free.items()} == sizes
    assert free[12].busy == 0.75
    assert distribution(place, ("model", None), 3) == (("data",), 8, 3 / 8)

    _, params = make(P("data", None), AxisType.Auto)
    opt = sl.Optimizer(sl.muon(0.1), params)
    devices = jax.device_count()
    idle = 0 if devices == 4 else 50
    notes = {path: row["notes"] for path, row in opt.describe(params).to_dict().items()}
    assert notes["a"] == f"16 × 8 on {devices} devices ({idle}% idle)"
    assert notes["turned"] == f"8 × 16 on {devices} devices ({idle}% idle)"
