"""State is sharded like the parameters: at binding, in every step, and inside of a `jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import slalom as sl
from helpers import known, slow_except
from slalom._core.engine.encoded import encoded_form
from slalom.codecs.names import as_codec
from table import GRADIENT_ROWS, rows

AXES = {"automatic": (AxisType.Auto,) * 2, "explicit": (AxisType.Explicit,) * 2}
RULES = {
    "adam": sl.adam(1e-3),
    "adafactor": sl.adafactor(1e-3, min_dim_size_to_factor=2),
    "sm3": sl.sm3(1e-3),
    "lbfgs": sl.ScaleByLbfgs() | sl.Scale(-0.1),
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
    }


def shardings(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


def step(params, opt):
    return opt.step(params, jax.tree.map(lambda p: 0.1 * p, params))


@pytest.mark.parametrize("axis_types", slow_except(AXES.values(), AXES["automatic"]), ids=AXES)
@pytest.mark.parametrize("tx", slow_except(RULES.values(), RULES["adafactor"]), ids=RULES)
def test_state_keeps_the_shardings_that_it_is_created_with(tx, axis_types):
    params = sharded(axis_types)
    opt = sl.Optimizer(tx, params)
    before = shardings((params, opt))
    compiled = jax.jit(lambda params, opt: step(params, opt))
    assert shardings(compiled(*compiled(params, opt))) == before
    assert compiled._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("axis_types", AXES.values(), ids=AXES)
@pytest.mark.parametrize("tx", RULES.values(), ids=RULES)
def test_an_optimizer_made_in_a_jit_is_sharded_like_the_parameters(tx, axis_types):
    params = sharded(axis_types)
    outside, inside = sl.Optimizer(tx, params), jax.jit(lambda p: sl.Optimizer(tx, p))(params)
    for a, b in zip(outside.arrays, inside.arrays, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("axis_types", AXES.values(), ids=AXES)
def test_sums_along_an_axis_keep_the_sharding_of_the_others(axis_types):
    state = sl.Optimizer(RULES["adafactor"], sharded(axis_types)).state_of("scale_by_factored_rms")
    row, column = state.nu["w"]
    assert (row.shape, tuple(row.sharding.spec)[:1]) == ((4, 1), ("data",))
    assert (column.shape, tuple(column.sharding.spec)) == ((1, 8), (None, "model"))


@pytest.mark.slow
def test_buffers_of_parameters_on_explicit_axes_are_whole():
    params = sharded(AXES["explicit"])
    alone = jax.tree.map(lambda p: jnp.asarray(np.asarray(p)), params)
    opt = sl.Optimizer(RULES["flatten"], params)
    mu = opt.state_of("scale_by_adam").mu
    assert mu.together["float32"].sharding.is_fully_replicated
    new, _ = step(params, opt)
    assert shardings(new) == shardings(params)
    expected, _ = step(alone, sl.Optimizer(RULES["flatten"], alone))
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_steps_on_a_mesh_equal_those_on_one_device():
    params = sharded(AXES["automatic"])
    alone = jax.tree.map(lambda p: jnp.asarray(np.asarray(p)), params)
    for tx in RULES.values():
        together, _ = step(params, sl.Optimizer(tx, params))
        expected, _ = step(alone, sl.Optimizer(tx, alone))
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


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


def test_a_jit_of_the_user_keeps_what_is_replicated_beside_what_is_sharded():
    params, x = in_parts(), jax.device_put(jnp.ones((8, 8)), ROWS)
    opt = sl.Optimizer(sl.adam(1e-3), params)
    before, compiled = shardings((params, opt)), own_jit()
    assert shardings(compiled(*compiled(params, opt, x), x)) == before
    assert compiled._cache_size() == 1
    # What changes an optimizer keeps what it remembers.
    for other in (opt.reset(params), opt.rebind(params)[0], opt.with_hyperparams(b1=0.8)):
        assert other.binding.sharding == opt.binding.sharding
        assert shardings(compiled(params, other, x)) == before


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("donate", [None, "opt", "all"])
def test_specs_of_one_meaning_share_a_program(donate, axis_type):
    # Those of JAX's results have no `None` at the end, or one for each axis.
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    traces = []

    def counted(updates, params):
        traces.append(None)
        return updates

    for entries in [("data", None), ("data",)]:
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P(*entries)))
        params = {"w": x}
        opt = sl.Optimizer(sl.Stateless(counted) | sl.adam(1e-3), params)
        traces.clear()
        train = sl.train_step(lambda params: jnp.sum(params["w"] ** 2), donate=donate or "opt")
        for _ in range(3):
            if donate is None:
                params, opt = opt.step(params, {"w": x})
            else:
                params, opt, _ = train(params, opt)
        assert len(traces) <= 1


@pytest.mark.slow
def test_state_that_was_moved_is_remembered_by_rebinding():
    params = jax.device_put(in_parts(), WHOLE)
    x = jax.device_put(jnp.ones((8, 8)), ROWS)
    opt = sl.Optimizer(sl.adam(1e-3), params)
    moved = jax.tree.map(lambda x: jax.device_put(x, ROWS if x.ndim else WHOLE), opt)
    opt, _ = moved.rebind(params)
    before, compiled = shardings((params, moved)), own_jit()
    assert shardings((params, opt)) == before
    assert shardings(compiled(*compiled(params, opt, x), x)) == before
    assert compiled._cache_size() == 1


@pytest.mark.slow
def test_what_was_moved_to_another_mesh_stays_there():
    params = in_parts()
    opt = sl.Optimizer(sl.adam(1e-3), params)
    other = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, opt = jax.device_put((params, opt), NamedSharding(other, P()))
    params["w"] = jax.device_put(params["w"], NamedSharding(other, P("model")))
    after, _ = jax.jit(lambda p, opt: step(p, opt))(params, opt)
    assert after["w"].sharding.mesh == other
    assert after["w"].sharding.spec == P("model")


@rows(2, GRADIENT_ROWS, everyday=("ScaleByAdam", "Graft, every_k", "Store, every_k"))
def test_every_row_steps_along_explicit_axes(row):
    params = sharded(AXES["explicit"])
    opt = sl.Optimizer(row.tx, params)
    # JAX checks explicit axes in types: nothing has to be compiled.
    new, _ = jax.eval_shape(lambda p, opt: opt.step(p, p, **known(p, p)), params, opt)
    assert [x.sharding.spec for x in jax.tree.leaves(new)] == [
        x.sharding.spec for x in jax.tree.leaves(params)
    ]


SHAPES = [(4,), (64,), (256,), (1024,), (4, 4), (8, 3), (8, 2), (3, 8), (16, 1), (4, 130), (8, 64)]
SHAPES += [(8, 128), (8, 256), (2, 4, 2), (4, 6, 8), (2, 4, 256)]
SPECS_OF_CODES = [P("a"), P(("a", "b")), P("a", "b"), P(None, "b"), P(None, ("a", "b"))]
SPECS_OF_CODES += [P(None, None, "b"), P("a", None, "b")]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4", "dynamic8"])
def test_every_shape_is_encoded_along_explicit_axes(codec):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    sizes = {None: 1, "a": 2, "b": 2, ("a", "b"): 4}
    checked = 0
    for shape in SHAPES:
        for spec in SPECS_OF_CODES:
            parts = [sizes[entry] for entry in spec]
            if len(parts) > len(shape) or any(n % k for n, k in zip(shape, parts, strict=False)):
                continue
            home = jax.NamedSharding(mesh, spec)
            x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=home)

            def there_and_back(x):
                encoded = encoded_form(x, as_codec("codec", codec), False).encode(x)
                return encoded, encoded.decode()

            with jax.set_mesh(mesh):
                encoded, decoded = jax.eval_shape(there_and_back, x)
            assert decoded.shape == shape
            assert all(
                code.sharding.mesh == mesh.abstract_mesh for code in jax.tree.leaves(encoded)
            )
            checked += 1
    assert checked == 60


@pytest.mark.slow
def test_codes_along_explicit_axes_are_those_along_automatic_ones():
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
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
