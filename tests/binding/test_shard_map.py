"""Inside of `jax.shard_map`: elementwise rules run, and norms that would be local are refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import slalom as sl
from helpers import assert_close
from table import GRADIENT_ROWS, rows

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
alone = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
PARAMS = {"w": jnp.linspace(-1, 1, 8).reshape(4, 2), "b": jnp.ones(2)}
PARTS = {"w": P("model"), "b": P()}
CLIP = sl.ClipByGlobalNorm(1.0) | sl.sgd(0.1)


def loss_fn(params, x=1.0):
    return x * (jnp.sum(params["w"] ** 2) + jnp.sum(params["b"]))


def stepped(tx, specs, mesh=mesh, average=None, **options):
    """A step inside of a `shard_map`, on parameters sharded by `specs`."""
    opt = sl.Optimizer(tx, PARAMS)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x[0])
        if average is not None:
            grads = jax.lax.pmean(grads, average)
        return opt.step(params, grads, value=loss, grad=grads)[0]

    rows = P("data") if "data" in mesh.axis_names else P()
    run = jax.shard_map(step, mesh=mesh, in_specs=(specs, rows), out_specs=specs, **options)
    return jax.jit(run)(PARAMS, jnp.ones(2))


def test_norms_of_sharded_parameters_are_refused_unless_a_link_averages_them():
    sharded = r"ClipByGlobalNorm needs whole .* at 'w' along 'model'"
    skipping = sl.sgd(0.1).every_k(1, skip=sl.SkipNotFinite())
    for tx, specs, options, message in (
        (CLIP, PARTS, {}, sharded),
        (sl.ClipByGlobalNorm(1.0).mask(sl.where.path("w")) | sl.sgd(0.1), PARTS, {}, sharded),
        (skipping, P(), {"check_vma": False}, r"The `skip` of `.every_k` needs"),
    ):
        with pytest.raises(ValueError, match=message):
            stepped(tx, specs, **options)

    with pytest.raises(ValueError, match=r"`check_vma=False`, it is not known .* 'data', 'model'"):
        stepped(CLIP, P(), average="data", check_vma=False)
    new = stepped(sl.sgd(0.1), PARTS, average="data", check_vma=False)
    np.testing.assert_allclose(new["w"], 0.8 * PARAMS["w"], rtol=1e-6)

    stepped(sl.Stateless(lambda u, p: jax.lax.pmean(u, ("data", "model"))) | CLIP, P())
    new = stepped(CLIP, PARTS, alone, check_vma=False)
    expected, _ = sl.Optimizer(CLIP, PARAMS).step(PARAMS, jax.grad(loss_fn)(PARAMS))
    np.testing.assert_allclose(new["w"], expected["w"], rtol=1e-6)

    # The biases are replicated.
    tx = sl.ClipByGlobalNorm(1.0).mask(sl.where.path("b")) | sl.sgd(0.1)
    new = stepped(tx, PARTS, average="data")
    np.testing.assert_allclose(new["b"], 1 - 0.1 / 2**0.5, rtol=1e-6)


@pytest.mark.parametrize("tx", [CLIP, (CLIP | sl.Trace(0.9)).flatten()], ids=["leaves", "buffers"])
def test_a_norm_of_gradients_that_are_not_averaged_is_refused(tx):
    def on_each_device(params, x):
        # Cast, so that JAX does not add up the gradients itself.
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        return sl.Optimizer(tx, PARAMS).update(params, jax.grad(loss_fn)(own, x[0]))[0]

    run = jax.shard_map(on_each_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"average them first: `jax.lax.pmean\(grads, \"data\"\)`"):
        jax.eval_shape(run, PARAMS, jnp.ones(2))


def test_gradients_of_examples_are_refused_where_devices_have_different_ones():
    step = sl.train_step(lambda params, x: loss_fn(params, jnp.mean(x)))
    opt = sl.Optimizer(sl.PerExampleGlobalNormClip(1.0) | sl.sgd(0.1), PARAMS)
    run = jax.shard_map(
        lambda x: step(PARAMS, opt, x)[0], mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"gradient of each example, .* along 'data'"):
        jax.eval_shape(run, jnp.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize("tx", [CLIP, sl.lamb(0.1).if_finite().record()])
def test_norms_of_replicated_parameters_are_those_of_one_device(tx):
    expected, _ = sl.Optimizer(tx, PARAMS).step(PARAMS, jax.grad(loss_fn)(PARAMS))
    new = stepped(tx, P(), average="data")
    assert_close(new, expected, rtol=1e-6)


@pytest.mark.parametrize("pmap", [jax.pmap, pytest.param(eqx.filter_pmap, marks=pytest.mark.slow)])
def test_under_pmap_elementwise_rules_run_and_others_name_what_replaces_it(pmap):
    def gradients(params, x):
        return jax.lax.pmean(jax.grad(loss_fn)(params, x), "i")

    x, options = jnp.ones(4), {"axis_name": "i", "in_axes": (None, 0), "out_axes": None}
    for tx, inside in ((sl.adam(0.1), True), (CLIP, False)):
        opt = sl.Optimizer(tx, PARAMS)

        def step(params, x, opt=opt):
            return opt.step(params, gradients(params, x))[0]

        expected, _ = opt.step(PARAMS, jax.grad(loss_fn)(PARAMS))
        if inside:
            new = pmap(step, **options)(PARAMS, x)
        else:
            with pytest.raises(ValueError, match=r"`jax.pmap`.*Instead of `pmap`, shard the batch"):
                pmap(step, **options)(PARAMS, x)
            new, _ = opt.step(PARAMS, pmap(gradients, **options)(PARAMS, x))
        assert_close(new, expected, rtol=1e-6)


SHARDED = {"w": jnp.linspace(-1, 1, 8).reshape(4, 2), "b": jnp.linspace(0.5, 1, 4)}


def with_all_inputs(params, opt):
    grads = jax.grad(sum_of_squares)(params)
    # A loss that is the same on all devices, as after a `pmean`.
    known = {"value": jnp.ones(()), "grad": grads, "value_fn": sum_of_squares}
    return opt.step(params, grads, **known)[0]


def sum_of_squares(params):
    return sum((jnp.sum(x**2 + x) for x in jax.tree.leaves(params)), jnp.zeros(()))


@rows(GRADIENT_ROWS, everyday=("ScaleByTrustRatio",))
def test_steps_are_those_of_one_device_or_are_refused(row):
    opt = sl.Optimizer(row.tx, SHARDED)
    parts = jax.tree.map(lambda x: P("model") if x.shape[:1] == (4,) else P(), (SHARDED, opt))
    run = jax.shard_map(with_all_inputs, mesh=mesh, in_specs=parts, out_specs=P("model"))
    refusal = ""
    try:
        new = jax.jit(run)(SHARDED, opt)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert "needs whole parameters" in refusal
        return
    expected = jax.jit(with_all_inputs)(SHARDED, opt)
    assert_close(new, expected, rtol=1e-6)
