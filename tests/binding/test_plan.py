"""`sl.plan` says how many bytes there will be on each device, from abstract shapes."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import sampled
from table import rows

SPECS = {
    "replicated": (P(), P()),
    "fsdp": (P("data"), P("data")),
    "tensor": (P(None, "model"), P("model")),
    "both": (P("data", "model"), P(("data", "model"))),
}
RULES = {
    "adamw": sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3),
    "adafactor": sl.adafactor(1e-3),
    "sm3": sl.sm3(1e-3),
    "lbfgs": sl.ScaleByLbfgs() | sl.Scale(-0.1),
}
ADAM = sl.adam(1e-3)


def abstract(mesh, specs, shape=(256, 512)):
    def leaf(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    return {"w": leaf(shape, specs[0]), "b": leaf(shape[1:], specs[1]), "s": leaf((), P())}


def all_devices(kind=AxisType.Auto):
    """A mesh of two axes: of four devices, or of eight where `test_shard_state.py` starts this."""
    shape = (jax.device_count() // 2, 2)
    kinds = kind if isinstance(kind, tuple) else (kind,) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=kinds)


def concrete(shapes):
    return jax.tree.map(lambda s: jax.device_put(jnp.ones(s.shape), s.sharding), shapes)


def on_one_device(arrays):
    """The bytes of arrays on the first device."""
    shards = (math.prod(x.sharding.shard_shape(x.shape)) for x in arrays)
    return sum(n * x.dtype.itemsize for n, x in zip(shards, arrays, strict=True))


def compiled_step(params, opt):
    """The compiler's own figures for a step that donates parameters and state."""
    step = jax.jit(lambda p, opt, grads: opt.step(p, grads), donate_argnums=(0, 1))
    return step.lower(params, opt, params).compile().memory_analysis()


def check_against_the_program(tx, specs, mesh, rtol=0.05, axis=None):
    shapes = abstract(mesh, specs)
    plan = sl.plan(tx, shapes, mesh, shard_state=axis)
    params = concrete(shapes)
    opt = sl.Optimizer(tx, params)
    if axis is not None:
        opt, report = opt.shard_state(mesh, axis)
        assert plan.state == report.bytes_after
    usage = compiled_step(params, opt)
    arguments = plan.params + plan.grads + plan.state
    assert arguments == pytest.approx(usage.argument_size_in_bytes, rel=rtol)
    assert plan.scratch == pytest.approx(usage.temp_size_in_bytes, rel=rtol)
    assert plan.total == arguments + plan.scratch


COMBINATIONS = [(rule, spec) for rule in RULES for spec in SPECS]


@pytest.mark.parametrize("combination", sampled(COMBINATIONS, ("adafactor", "both")), ids="-".join)
def test_plan_equals_the_figures_of_the_compiled_program(combination):
    rule, spec = combination
    check_against_the_program(RULES[rule], SPECS[spec], all_devices())


@pytest.mark.parametrize("spec", sampled(SPECS))
def test_plan_on_explicit_axes_equals_the_figures_of_the_compiled_program(spec):
    check_against_the_program(RULES["adafactor"], SPECS[spec], all_devices(AxisType.Explicit))


@pytest.mark.slow
def test_partitioned_state_and_joined_axes_are_planned_as_they_are_stored():
    mesh, shapes = all_devices(), {"conv": (16, 8, 3, 3), "short": (8, 16), "cube": (8, 8, 8)}
    home = NamedSharding(mesh, P("data"))
    shapes = {k: jax.ShapeDtypeStruct(n, jnp.float32, sharding=home) for k, n in shapes.items()}
    shapes |= abstract(mesh, SPECS["tensor"], (8, 4))
    for codec in ("int8", "int4", "dynamic8"):
        tx = sl.Trace(0.9).store(codec, min_size=1) | sl.Ema(0.9) | sl.Scale(-0.1)
        opt = sl.Optimizer(tx, concrete(shapes))
        plan = sl.plan(tx, shapes, mesh.abstract_mesh)
        assert plan.state == on_one_device(jax.tree.leaves(opt)), codec
        plan = sl.plan(tx, shapes, mesh.abstract_mesh, shard_state="data")
        assert plan.state == opt.shard_state(mesh)[1].bytes_after, codec

    check_against_the_program(RULES["adamw"], SPECS["replicated"], all_devices(), axis="data")


def test_matrices_of_p_by_p_and_partitioned_state_on_an_abstract_mesh():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shapes = abstract(mesh, SPECS["replicated"])
    whole, parts = sl.plan(ADAM, shapes, mesh), sl.plan(ADAM, shapes, mesh, shard_state="data")
    assert whole.state - parts.state == 2 * 4 * (256 * 512 + 512) * 3 // 4
    assert (whole.params, whole.grads) == (parts.params, parts.grads)
    with pytest.raises(ValueError, match=r"The mesh has no axis 'model'\. Its axes: 'data'"):
        sl.plan(ADAM, shapes, mesh, shard_state="model")
    shapes = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "z": jnp.zeros(2, jnp.complex64)}
    square = 4 * (8 * 4 + 2 * 2) ** 2
    for rule in (sl.gauss_newton(), sl.levenberg_marquardt(form="parameters")):
        plan = sl.plan(rule, shapes, mesh)
        assert plan.system == square
        assert plan.total == plan.params + plan.grads + plan.state + square
        assert "system" in repr(plan)
    assert sl.plan(sl.gauss_newton(form="residuals"), shapes, mesh).system == 0
    in_a_part = sl.sgd(0.1).partition({sl.where.path("w"): sl.levenberg_marquardt()})
    assert sl.plan(in_a_part, shapes, mesh).system == 4 * 32**2
    broyden = sl.contrib.ScaleBySelfScaledBroyden() | sl.Scale(-0.1)
    # Both have two more copies of the parameters, and some numbers.
    matrix = sl.plan(broyden, shapes, mesh).state - sl.plan(ADAM, shapes, mesh).state
    assert matrix == pytest.approx(square, abs=50)


# The factors of each of them have this many times the entries of a square matrix.
FACTORED = {"soap": (sl.soap(0.1), 4), "shampoo": (sl.shampoo(0.1), 4), "kron": (sl.kron(0.1), 2)}


def shardings(opt):
    return [x.sharding for x in jax.tree.leaves(opt)]


@pytest.mark.slow
@pytest.mark.parametrize(("tx", "times"), FACTORED.values(), ids=FACTORED)
def test_factors_are_divided_among_the_devices_of_their_matrix(tx, times):
    mesh, matrix = all_devices(), jnp.ones((32, 32))
    w = {"w": jax.device_put(matrix, NamedSharding(mesh, P("data", "model")))}
    opt = sl.Optimizer(tx, w)
    own, whole = map(on_one_device, map(jax.tree.leaves, (opt, sl.Optimizer(tx, {"w": matrix}))))
    assert sl.plan(tx, w, mesh.abstract_mesh).state == own
    assert whole - own >= times * 4 * 32**2 * 3 / 4
    for changed in (opt.reset(w), opt.rebind(w)[0], opt.step(w, w)[1]):
        assert shardings(changed) == shardings(opt)


ON_MATRICES = [tx for tx, _ in FACTORED.values()] + [sl.muon(0.1), sl.contrib.dion(0.1)]
# Their rank is at most that of the matrix, so that the moments have its shape.
ON_MATRICES += [sl.contrib.apollo(0.1), sl.contrib.galore(0.1)]
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
KINDS["mixed"] = (AxisType.Explicit, AxisType.Auto)
PLACES = [(kind, spec) for kind in KINDS for spec in SPECS]


@pytest.mark.parametrize("place", sampled(PLACES, turn=1), ids="-".join)
def test_state_of_matrix_rules_is_planned_as_it_is_created(place):
    mesh = all_devices(KINDS[place[0]])
    shapes = abstract(mesh, SPECS[place[1]], (16, 32))
    for tx in ON_MATRICES:
        opt = sl.Optimizer(tx, concrete(shapes))
        assert sl.plan(tx, shapes, mesh.abstract_mesh).state == on_one_device(jax.tree.leaves(opt))


# Reference that the rules of `plan` are checked against: what binding creates.
@rows(everyday=("ScaleByAdam", "ScaleByFactoredRms", "Flatten"))
def test_state_is_planned_as_it_is_created(row):
    mesh = all_devices()
    shapes = abstract(mesh, SPECS["both"], (64, 128))
    opt = sl.Optimizer(row.tx, concrete(shapes))
    assert sl.plan(row.tx, shapes, mesh.abstract_mesh).state == on_one_device(jax.tree.leaves(opt))


def test_bytes_follow_the_formulas():
    n, m = 4096, 1024

    def plan(tx, devices):
        mesh = AbstractMesh((devices,), ("data",))
        home = NamedSharding(mesh, P("data"))
        w = jax.ShapeDtypeStruct((n, m), jnp.bfloat16, sharding=home)
        return sl.plan(tx, {"w": w}, mesh)

    for devices in (1, 8, 512):
        adam, adafactor = plan(ADAM, devices), plan(sl.adafactor(1e-3), devices)
        assert adam.params == adam.grads == 2 * n * m // devices
        # The first moment is bfloat16, the second float32; 5 hyperparameters and 2 counts.
        assert adam.state == (2 + 4) * n * m // devices + 7 * 4
        # The row sums are sharded like the rows, the column sums are replicated.
        assert adafactor.state - (4 * n // devices + 4 * m) < 40
        assert adam.scratch is None
        assert adam.frozen == 0


def test_a_plan_is_a_table_that_counts_frozen_arrays_apart():
    model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    model = (model, jax.random.key(0), np.arange(3), "name")
    plan = sl.plan(ADAM, model, mesh, trainable=sl.where.path("**.weight"))
    weights, biases = 4 * (2 * 8 + 8), 4 * (8 + 1)
    assert (plan.params, plan.grads, plan.frozen) == (weights, weights, biases + 8 + 3 * 4)
    assert plan.state == 2 * weights + 7 * 4
    assert plan.scratch is not None
    assert "frozen" in repr(plan)

    mesh = AbstractMesh((2, 2), ("data", "model"))
    lines = repr(sl.plan(ADAM, abstract(mesh, SPECS["both"]), mesh)).splitlines()
    assert lines[0] == "per device of a mesh with data=2, model=2:"
    assert [line.split()[0] for line in lines[1:]] == [
        *("parameters", "gradients", "state", "scratch", "total")
    ]
    assert lines[1].endswith("132 kB")
    assert lines[4].endswith("not compiled")

    small, large = AbstractMesh((2, 2), ("data", "model")), AbstractMesh((64, 8), ("model", "data"))
    shapes = abstract(small, SPECS["both"])
    assert sl.plan(ADAM, shapes, large).params == 4 * (256 * 512 + 512) // 512 + 4


def test_scratch_is_not_compiled_for_what_needs_the_loss_and_bad_shardings_are_named():
    mesh = all_devices()
    shapes = abstract(mesh, SPECS["both"], (4, 8))
    assert sl.plan(sl.lbfgs(), shapes, mesh).scratch is None
    per_example = sl.PerExampleGlobalNormClip(1.0) | sl.sgd(0.1)
    assert sl.plan(per_example, shapes, mesh).scratch is None
    assert sl.plan(sl.polyak_sgd(), shapes, mesh).scratch is not None

    mesh, line = (AbstractMesh((2, 2), ("data", "model")), AbstractMesh((2,), ("model",)))
    with pytest.raises(ValueError, match=r"'b' is sharded over the mesh axis 'data', but the mesh"):
        sl.plan(ADAM, abstract(mesh, SPECS["both"]), line)
    long, shapes = AbstractMesh((4, 2), mesh.axis_names), abstract(mesh, (P("data"), P()), (6, 8))
    with pytest.raises(ValueError, match=r"'w' has shape \(6, 8\), and its axis 0 cannot be"):
        sl.plan(ADAM, shapes, long)
    home = GSPMDSharding.get_replicated(tuple(jax.devices()[:2]))
    with pytest.raises(TypeError, match="The sharding of 'w' is a GSPMDSharding"):
        sl.plan(ADAM, {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=home)}, line)
