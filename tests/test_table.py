"""Every row of the table has every property that an optimizer promises."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slalom as sl
from table import EVERYTHING, PER_EXAMPLE

ROWS = pytest.mark.parametrize("tx", EVERYTHING.values(), ids=EVERYTHING.keys())
FLOAT32 = (jnp.float32,) * 3
# Float32 alone is what the other properties are tested with.
DTYPES = [
    pytest.param((jnp.bfloat16, jnp.float32, jnp.float16), id="mixed"),
    pytest.param((jnp.bfloat16,) * 3, id="bfloat16", marks=pytest.mark.slow),
]


def make_params(dtypes=FLOAT32):
    a, b, c = dtypes
    return {
        "w": jnp.linspace(-1, 1, 6).reshape(2, 3).astype(a),
        "b": (jnp.linspace(0.5, 1, 3).astype(b), jnp.asarray(0.25, c)),
        "empty": jnp.zeros((0, 2), a),
        "hole": None,
    }


def make_grads(params):
    return jax.tree.map(lambda p: (p * 0 + 0.5).astype(p.dtype), params)


def loss_fn(params):
    """A loss of any tree of arrays, with gradients near 0.5."""
    leaves = [x.real.astype(float) for x in jax.tree.leaves(params) if eqx.is_inexact_array(x)]
    return sum((jnp.sum(0.5 * x + 0.05 * x**2) for x in leaves), jnp.ones(()))


def known(params, grads):
    """What every step may be given beside the gradients; few rules look at it."""
    return {"value": loss_fn(params), "grad": grads, "value_fn": loss_fn}


def kind_of(tree):
    """Structure, shapes, dtypes, weak types and shardings."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type, x.sharding) for x in leaves]


def test_no_public_transform_is_missing_from_the_table():
    public = {
        name
        for name, value in vars(sl).items()
        if isinstance(value, type)
        and issubclass(value, sl.AbstractTransform)
        and not name.startswith("Abstract")
    }
    rows = {name.split(",")[0].split(" ")[0] for name in EVERYTHING | PER_EXAMPLE}
    assert public - rows == set()


@ROWS
@pytest.mark.parametrize("dtypes", DTYPES)
def test_step_returns_what_it_was_given(tx, dtypes):
    params = make_params(dtypes)
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)
    before = kind_of((params, opt))

    step = jax.jit(lambda params, opt: opt.step(params, grads, **known(params, grads)))
    after = step(*step(params, opt))

    assert kind_of(after) == before
    assert step._cache_size() == 1
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(after[0]))


@ROWS
def test_step_returns_what_it_was_given_in_double_precision(tx, x64):
    params = make_params((jnp.float64, jnp.float32, jnp.bfloat16))
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)

    # Tracing tells all but where the arrays lie, which is no matter of their dtypes.
    traced = jax.eval_shape(lambda p, o: o.step(p, grads, **known(p, grads)), params, opt)
    assert jax.tree.structure(traced) == jax.tree.structure((params, opt))
    pairs = zip(jax.tree.leaves(traced), jax.tree.leaves((params, opt)), strict=True)
    for after, before in pairs:
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert after.weak_type == before.weak_type


mesh = Mesh(np.array(jax.devices()), ("data",))


@pytest.mark.slow
@ROWS
def test_step_leaves_everything_where_it_lies_on_a_mesh(tx):
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda p: jax.device_put(np.asarray(p), everywhere), make_params())
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)
    assert all(leaf.sharding == everywhere for leaf in opt.arrays)
    assert kind_of(opt.step(params, grads, **known(params, grads))) == kind_of((params, opt))


@ROWS
def test_update_then_add_is_step(tx):
    params = make_params()
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)

    updates, by_update = opt.update(params, grads, **known(params, grads))
    stepped, by_step = opt.step(params, grads, **known(params, grads))

    for added, p in zip(
        jax.tree.leaves(sl.apply_updates(params, updates)), jax.tree.leaves(stepped), strict=True
    ):
        np.testing.assert_allclose(added, p, rtol=1e-6)
    for a, b in zip(by_update.arrays, by_step.arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@ROWS
def test_scan_and_cond_carry_an_optimizer(tx):
    params = make_params()
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)

    def body(carry, _):
        params, opt = carry
        carry = jax.lax.cond(
            opt.count < 2,
            lambda: opt.step(params, grads, **known(params, grads)),
            lambda: (params, opt),
        )
        return carry, opt.has_updated

    (scanned, last), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=4))((params, opt))
    assert int(last.count) == 2

    step = eqx.filter_jit(lambda params, opt: opt.step(params, grads, **known(params, grads)))
    twice, _ = step(*step(params, opt))
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(twice), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@ROWS
def test_no_buffer_stands_twice_so_everything_can_be_donated(tx):
    params = make_params()
    grads = make_grads(params)
    opt = sl.Optimizer(tx, params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, opt)) if x.size]
    assert len(set(pointers)) == len(pointers)

    step = jax.jit(
        lambda params, opt: opt.step(params, grads, **known(params, grads)), donate_argnums=(0, 1)
    )
    params, opt = step(*step(params, opt))
    assert jnp.all(jnp.isfinite(params["w"]))


@pytest.mark.slow
@ROWS
def test_vmap_over_runs_equals_the_runs(tx):
    grads = make_grads(make_params())
    scales = jnp.array([1.0, 2.0])

    def run(scale):
        params = jax.tree.map(lambda p: p * scale, make_params())
        opt = sl.Optimizer(tx, params)
        for _ in range(2):
            params, opt = opt.step(params, grads, **known(params, grads))
        return params

    together = jax.jit(jax.vmap(run))(scales)
    alone = jax.jit(lambda: run(scales[1]))()
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[1], b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@ROWS
def test_a_whole_model_gives_what_its_arrays_give(tx):
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    arrays = eqx.filter(model, eqx.is_inexact_array)
    grads = jax.tree.map(jnp.ones_like, arrays)

    stepped, opt = sl.Optimizer(tx, model).step(model, grads, **known(model, grads))
    expected, filtered = sl.Optimizer(tx, arrays).step(arrays, grads, **known(arrays, grads))

    assert stepped.activation is model.activation
    assert eqx.tree_equal(eqx.filter(stepped, eqx.is_inexact_array), expected)
    assert eqx.tree_equal(opt.state, filtered.state)


@ROWS
def test_copied_and_pickled_optimizers_are_the_same(tx):
    params = make_params()
    opt = sl.Optimizer(tx, params)
    copies = [copy.deepcopy(opt)]
    if "lambda" not in repr(tx):  # Python pickles no lambda
        copies.append(pickle.loads(pickle.dumps(opt)))
    for again in copies:
        assert again.binding == opt.binding
        assert hash(again.binding) == hash(opt.binding)
        assert eqx.tree_equal(again.arrays, opt.arrays)


@ROWS
def test_shapes_alone_are_enough_to_plan(tx):
    params = make_params()
    shapes = jax.eval_shape(lambda: sl.Optimizer(tx, params))
    assert jax.tree.structure(shapes) == jax.tree.structure(sl.Optimizer(tx, params))


@ROWS
def test_a_tree_without_any_leaf_is_stepped_over(tx):
    nothing = {"hole": None}
    state = tx.init(nothing)
    context = sl.Context(step=0, **known(nothing, nothing))
    updates, _ = tx.update(nothing, state, nothing, context)
    assert updates == nothing


@ROWS
def test_the_code_it_prints_makes_it_again(tx):
    if "lambda" in repr(tx):
        pytest.skip("a function has no code to print")
    assert eval(repr(tx), {"sl": sl}) == tx


COMPLEX = {
    name: tx
    for name, tx in EVERYTHING.items()
    # bfloat16 moments cannot hold a complex mean of squares' mean: the twin of bfloat16 is wider.
    if "dtypes" not in name
    # Complex numbers are neither above nor below zero.
    and "Nonnegative" not in name
    # Rprop compares signs, which complex numbers have no two of: `test_adaptive.py` has its error.
    and "rprop" not in name.lower()
}


@pytest.mark.parametrize("tx", COMPLEX.values(), ids=COMPLEX.keys())
def test_complex_parameters_stay_complex_and_finite(tx):
    params = {"w": jnp.array([[1 + 2j, 3 - 1j]], jnp.complex64), "b": jnp.ones(2)}
    grads = jax.tree.map(lambda p: p * 0.5, params)
    opt = sl.Optimizer(tx, params)
    stepped, after = opt.step(params, grads, **known(params, grads))
    assert kind_of((stepped, after)) == kind_of((params, opt))
    assert all(jnp.all(jnp.isfinite(p)) for p in jax.tree.leaves(stepped))
