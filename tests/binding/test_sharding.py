"""State is where the parameters are: at binding, in every step, in a `jit` and on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import slalom as sl
from helpers import Counting, assert_close, assert_same_bits, known, sampled, slow_except
from table import GRADIENT_ROWS, rows

AXES = {
    "automatic": (AxisType.Auto,) * 2,
    "explicit": (AxisType.Explicit,) * 2,
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
EMPTY = {AXES["automatic"]: (), AXES["explicit"]: (None, "model"), AXES["mixed"]: (None, None)}
RULES = {
    "adam": sl.adam(1e-3),
    "adafactor": sl.adafactor(1e-3, min_dim_size_to_factor=2),
    "sm3": sl.sm3(1e-3),
    "apollo": sl.contrib.apollo(1e-3, rank=2),
    "lbfgs": sl.ScaleByLbfgs() | sl.Scale(-0.1),
    "broyden": sl.contrib.ScaleBySelfScaledBroyden() | sl.Scale(-0.1),
    "novograd": sl.novograd(1e-3),
    "every_k": sl.adam(1e-3).every_k(2),
    "average": sl.adam(1e-3).average(0.9),
    "flatten": (sl.ClipByGlobalNorm(0.01) | sl.adamw(1e-3)).flatten(),
}


def sharded(axis_types):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axis_types)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    return {
        "w": put(jnp.ones((4, 8)), "data", "model"),
        "b": put(jnp.ones(8), "model"),
        "s": put(jnp.ones(())),
        "none": put(jnp.ones((0, 8)), *EMPTY[axis_types]),
    }


def shardings(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


def step(params, opt):
    return opt.step(params, jax.tree.map(lambda p: 0.1 * p, params))


PRODUCT = [(rule, axes) for axes in AXES for rule in RULES]
EVERYDAY = ("adafactor", "automatic"), ("adam", "explicit")


@pytest.mark.parametrize("case", sampled(PRODUCT, *EVERYDAY, turn=2), ids="-".join)
def test_state_is_sharded_like_parameters_and_steps_are_those_of_one_device(case):
    tx, params = RULES[case[0]], sharded(AXES[case[1]])
    opt = sl.Optimizer(tx, params)
    inside = jax.jit(lambda p: sl.Optimizer(tx, p))(params)
    for a, b in zip(jax.tree.leaves(opt), jax.tree.leaves(inside), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)

    before = shardings((params, opt))
    compiled = jax.jit(lambda params, opt: step(params, opt))
    twice = compiled(*compiled(params, opt))
    assert shardings(twice) == before
    assert compiled._cache_size() == 1

    alone = jax.tree.map(lambda p: jnp.asarray(np.asarray(p)), params)
    single = jax.jit(lambda params, opt: step(params, opt))
    expected, _ = single(*single(alone, sl.Optimizer(tx, alone)))
    assert_close(twice[0], expected, rtol=1e-6)


@pytest.mark.slow
def test_explicit_axes_and_a_jit_of_the_user_keep_the_sharding():
    for name in ("automatic", "explicit"):
        opt = sl.Optimizer(RULES["adafactor"], sharded(AXES[name]))
        row, column = opt.state_of("scale_by_factored_rms").nu["w"]
        assert (row.shape, tuple(row.sharding.spec)[:1]) == ((4, 1), ("data",))
        assert (column.shape, tuple(column.sharding.spec)) == ((1, 8), (None, "model"))

    opt = sl.Optimizer(RULES["flatten"], sharded(AXES["explicit"]))
    mu = opt.state_of("scale_by_adam").mu
    assert mu.together["float32"].sharding.is_fully_replicated

    params, x = in_parts(), jax.device_put(jnp.ones((8, 8)), ROWS)
    opt = sl.Optimizer(sl.adam(1e-3), params)
    before, compiled = shardings((params, opt)), own_jit()
    assert shardings(compiled(*compiled(params, opt, x), x)) == before
    assert compiled._cache_size() == 1
    # What changes an optimizer keeps what it remembers.
    for other in (opt.reset(params), opt.rebind(params)[0], opt.with_hyperparams(b1=0.8)):
        assert other.binding.sharding == opt.binding.sharding
        assert shardings(compiled(params, other, x)) == before


MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
WHOLE, ROWS = NamedSharding(MESH, P()), NamedSharding(MESH, P("data"))


def in_parts():
    """Only the matrix is sharded, as in most programs with FSDP."""
    return {
        "w": jax.device_put(jnp.ones((8, 4)), ROWS),
        "out": jax.device_put(jnp.ones((4, 8)), WHOLE),
        "b": jax.device_put(jnp.ones(8), WHOLE),
    }


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] @ params["out"] + params["b"][None]) ** 2)


def own_jit():
    return jax.jit(lambda p, opt, x: opt.step(p, jax.grad(loss_fn)(p, x)))


WAYS = [(way, axes) for way in ("opt.step", "opt", "all") for axes in ("automatic", "explicit")]


@pytest.mark.parametrize(
    "case", sampled(WAYS, ("opt.step", "explicit"), ("opt", "automatic")), ids="-".join
)
def test_specs_of_one_meaning_share_a_program(case):
    way, axes = case
    # Those of JAX's results have no `None` at the end, or one for each axis.
    mesh = jax.make_mesh((4,), ("data",), axis_types=AXES[axes][:1])
    counted = Counting(lambda updates, params: updates)
    for entries in [("data", None), ("data",)]:
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P(*entries)))
        params = {"w": x}
        opt = sl.Optimizer(sl.Stateless(counted) | sl.adam(1e-3), params)
        before = counted.traces
        donate = "opt" if way == "opt.step" else way
        train = sl.train_step(lambda params: jnp.sum(params["w"] ** 2), donate=donate)
        for _ in range(3):
            if way == "opt.step":
                params, opt = opt.step(params, {"w": x})
            else:
                params, opt, _ = train(params, opt)
        assert counted.traces <= before + 1


@pytest.mark.slow
def test_state_that_was_moved_stays_there_and_rebinding_remembers():
    params = jax.device_put(in_parts(), WHOLE)
    x = jax.device_put(jnp.ones((8, 8)), ROWS)
    opt = sl.Optimizer(sl.adam(1e-3), params)
    moved = jax.tree.map(lambda x: jax.device_put(x, ROWS if x.ndim else WHOLE), opt)
    opt, _ = moved.rebind(params)
    before, compiled = shardings((params, moved)), own_jit()
    assert shardings((params, opt)) == before
    assert shardings(compiled(*compiled(params, opt, x), x)) == before
    assert compiled._cache_size() == 1

    params = in_parts()
    opt = sl.Optimizer(sl.adam(1e-3), params)
    other = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, opt = jax.device_put((params, opt), NamedSharding(other, P()))
    params["w"] = jax.device_put(params["w"], NamedSharding(other, P("model")))
    after, _ = jax.jit(lambda p, opt: step(p, opt))(params, opt)
    assert after["w"].sharding.mesh == other
    assert after["w"].sharding.spec == P("model")


def specs(tree):
    """Those of arrays with axes: `jax.eval_shape` shows none for some scalars and empty arrays."""
    return [x.sharding.spec for x in jax.tree.leaves(tree) if x.ndim and x.size]


@rows(
    GRADIENT_ROWS,
    everyday=("ScaleByAdam", "Graft, every_k", "Store, every_k"),
    ci=("ScaleBySm3", "ScaleByFactoredRms, factored", "Snapshot", "EveryK, skip"),
)
def test_every_row_steps_along_explicit_axes(row):
    params = sharded(AXES["explicit"])
    opt = sl.Optimizer(row.tx, params)
    # JAX checks explicit axes in types: nothing has to be compiled.
    after = jax.eval_shape(lambda p, opt: opt.step(p, p, **known(p, p)), params, opt)
    assert specs(after) == specs((params, opt))


SHAPES = [(4,), (64,), (256,), (1024,), (4, 4), (8, 3), (8, 2), (3, 8), (16, 1), (4, 130), (8, 64)]
SHAPES += [(8, 128), (8, 256), (2, 4, 2), (4, 6, 8), (2, 4, 256)]
SPECS_OF_CODES = [P("a"), P(("a", "b")), P("a", "b"), P(None, "b"), P(None, ("a", "b"))]
SPECS_OF_CODES += [P(None, None, "b"), P("a", None, "b")]


@pytest.mark.exhaustive
def test_every_shape_is_encoded_along_explicit_axes_as_along_automatic_ones():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    sizes = {None: 1, "a": 2, "b": 2, ("a", "b"): 4}
    params = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape in SHAPES
        for spec in SPECS_OF_CODES
        if len(spec) <= len(shape)
        and not any(n % sizes[entry] for n, entry in zip(shape, spec, strict=False))
    ]
    assert len(params) == 60

    for codec in ("int8", "int4", "dynamic8"):
        tx = sl.Trace(0.9).store(codec, min_size=1)

        def update(params, tx=tx):
            updates, state = tx.update(params, tx.init(params), params)
            return updates, [x for x in jax.tree.leaves(state) if x.ndim]

        with jax.set_mesh(mesh):
            decoded, encoded = jax.eval_shape(update, params)
        assert [x.shape for x in decoded] == [x.shape for x in params]
        assert all(code.sharding.mesh == mesh.abstract_mesh for code in encoded)

    grads = jnp.linspace(-1, 1, 32).reshape(4, 8)
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
        params = {"w": jax.device_put(grads, jax.NamedSharding(mesh, P("a", "b")))}
        tx = sl.adam(0.1).store("int4", min_size=1)
        opt = sl.Optimizer(tx, params)
        assert sl.plan(tx, params, mesh).state > 0
        for _ in range(2):
            new, opt = opt.step(params, params)
        found.append(jax.tree.map(np.asarray, (new, jax.tree.leaves(opt.state))))
    assert_same_bits(*found)


HOMES = {
    "mesh": NamedSharding(MESH, P("data"), memory_kind="pinned_host"),
    "device": SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"),
}
compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
)
ADAM = sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)


creates_on_host = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="XLA on a CPU could not create arrays on the host"
)


def make_params():
    return {"w": jnp.linspace(-1, 1, 32).reshape(4, 8), "b": jnp.linspace(0.5, 1, 4)}


def put(tree, home):
    return jax.tree.map(lambda x: jax.device_put(x, home), tree)


def square_loss(params):
    return sum((jnp.sum(0.5 * x + 0.05 * x**2) for x in jax.tree.leaves(params)), jnp.ones(()))


def on_device(tree):
    return put(tree, jax.tree.leaves(tree)[0].sharding.with_memory_kind("device"))


def homes(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


def on_host(tree):
    return [x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(tree)]


def train(params, opt):
    return sl.train_step(square_loss, donate=False)(params, opt)[:2]


def by_hand(params, opt):
    grads = put(jax.grad(square_loss)(on_device(params)), homes(params)[0])
    return opt.step(params, grads)


@creates_on_host
@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("step", slow_except([train, by_hand, jax.jit(train)], train))
def test_steps_keep_memory_and_sharding_and_compile_once(step, home):
    params = put(make_params(), home)
    opt = sl.Optimizer(ADAM, params)
    adam = opt.state_of("scale_by_adam")
    assert all(x.sharding == home for x in jax.tree.leaves((adam.mu, adam.nu)))
    assert sum(on_host(opt)) == 4  # not the numbers
    before = homes((params, opt))
    once = step(params, opt)
    known = len(compilations)
    twice = step(*once)
    assert len(compilations) == known
    assert homes(twice) == before
    assert compilations  # or the number above would say nothing
    expected = train(*train(make_params(), sl.Optimizer(ADAM, make_params())))
    assert_close(*map(jax.tree.leaves, (twice, expected)), rtol=1e-6)


@creates_on_host
@rows(GRADIENT_ROWS, everyday=())
def test_every_rule_keeps_the_memory_of_its_state(row):
    params = put(make_params(), HOMES["mesh"])
    opt = sl.Optimizer(row.tx, params)
    before = on_host((params, opt))
    after = train(*train(params, opt))
    assert on_host(after) == before
    params = on_device(params)
    expected = train(*train(params, sl.Optimizer(row.tx, params)))
    assert_close(after[0], expected[0], rtol=1e-6)


@pytest.mark.slow
def test_models_and_state_alone_may_be_on_the_host():
    params = on_device(put(make_params(), HOMES["mesh"]))
    opt = sl.Optimizer(ADAM, params)
    offloaded = jax.tree.map(lambda x: jax.device_put(x, HOMES["mesh"]) if x.ndim else x, opt)
    for step in (train, jax.jit(train)):
        new, after = step(params, offloaded)
        assert not any(on_host(new))
        assert on_host(after) == on_host(offloaded)
        np.testing.assert_allclose(new["w"], train(params, opt)[0]["w"], rtol=1e-6)

    params = put(make_params(), HOMES["mesh"])
    opt = sl.Optimizer(ADAM.average(0.9), params)
    params, opt = train(params, opt)
    grads = jax.grad(square_loss)(on_device(params))
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
