"""`sl.train_step(..., compute_dtype=...)`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import Counting, after_training, assert_same_bits, mlp

x = jax.random.normal(jax.random.key(1), (8, 2))
y = jnp.sin(x.sum(axis=1, keepdims=True))


def loss_fn(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y).astype(jnp.float32) ** 2)


def by_hand(dtype):
    """The cast written into the loss, as jmp's users do."""

    def loss_of(model, x, y):
        model = jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, model)
        return loss_fn(model, x.astype(dtype), y.astype(dtype))

    return loss_of


def run(step, model=None, steps=2, **known):
    model = mlp() if model is None else model
    model, _, loss = after_training(step, sl.adamw(0.1), steps, model, x, y, **known)
    return eqx.filter(model, eqx.is_array), loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss is computed in float16")
@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_is_the_cast_in_the_loss(dtype, microbatches):
    seen = set()

    def note(grads):
        seen.update(g.dtype for g in jax.tree.leaves(grads))
        return grads

    options = {"microbatches": microbatches}
    own = run(sl.train_step(loss_fn, compute_dtype=dtype, transform_grads=note, **options))
    assert_same_bits(own, run(sl.train_step(by_hand(dtype), **options)))
    # Gradients are added up in float32, and the model stays in it.
    assert seen == {a.dtype for a in jax.tree.leaves(own)} == {np.dtype("float32")}
    full = run(sl.train_step(loss_fn, **options))
    np.testing.assert_allclose(own[1], full[1], rtol=0.05)
    assert float(own[1]) != float(full[1])


def dtypes_of(**trees):
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    return {jax.tree_util.keystr(at): x.dtype for at, x in leaves if hasattr(x, "dtype")}


def test_what_is_cast_and_what_is_not():
    seen = []

    class Loss(eqx.Module):
        carried: jax.Array

        def __call__(self, model, state, batch, *, scale):
            own = self.carried
            seen.append(dtypes_of(model=model, state=state, batch=batch, scale=scale, own=own))
            return model["w"].sum().astype(jnp.float32) + batch["z"].real.sum(), state

    class Counter(eqx.Module):
        index: eqx.nn.StateIndex

    model = {"w": jnp.ones(2), "frozen": jnp.ones(2), "n": jnp.ones(2, int), "name": "net"}
    _, state = eqx.nn.make_with_state(lambda: Counter(eqx.nn.StateIndex(jnp.ones(2))))()
    batch = {
        "x": jnp.ones(2),
        "host": np.ones(2, np.float32),
        "label": jnp.ones(2, int),
        "mask": jnp.ones(2, bool),
        "z": jnp.ones(2, complex),
        "key": jax.random.key(0),
    }
    loss, scale = Loss(jnp.ones(2)), jnp.ones(())
    given = dtypes_of(model=model, state=state, batch=batch, scale=scale, own=loss.carried)
    opt = sl.Optimizer(sl.sgd(0.1), model, trainable=sl.where.path("w"))
    step = sl.train_step(loss, has_aux=True, compute_dtype="bfloat16")
    for _ in range(2):  # the state that comes out goes in again
        model, opt, (_, state) = step(model, opt, state, batch, scale=scale)
    (dtypes,) = seen
    cast = {at for at in given if dtypes[at] == jnp.bfloat16}
    assert cast == {
        *("['model']['w']", "['model']['frozen']", "['batch']['x']", "['batch']['host']"),
        "['scale']",
    }
    assert {at: dtypes[at] for at in given.keys() - cast} == {
        at: given[at] for at in given.keys() - cast
    }
    assert model["w"].dtype == jnp.float32


def test_the_model_state_of_a_scan_is_not_cast():
    @sl.train_step(has_aux=True, compute_dtype="bfloat16")
    def step(model, state, x):
        return jnp.sum(model["w"] * x).astype(jnp.float32), {"n": state["n"] + 1e-3, "x": x}

    model, state = {"w": jnp.ones(2)}, {"n": jnp.ones(()), "x": jnp.ones(2, jnp.bfloat16)}
    opt = sl.Optimizer(sl.sgd(0.1), model)
    _, _, (_, state) = step.scan(model, opt, jnp.ones((3, 2)), model_state=state)
    np.testing.assert_allclose(state["n"], 1.003, rtol=1e-6)


@pytest.mark.slow
def test_wider_arrays_losses_of_rules_and_examples_are_cast_too():
    model = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    opt = sl.Optimizer(sl.sgd(0.5), model)

    @sl.train_step(compute_dtype="float32")
    def step(model):
        return (model["a"] * model["b"]).sum()

    model, opt, loss = step(model, opt)
    assert loss.dtype == jnp.float32
    assert (model["a"].dtype, model["b"].dtype) == (jnp.bfloat16, jnp.float32)
    with jax.enable_x64(True):
        wide = {"a": jnp.ones(2, jnp.float64)}
        new, _, loss = sl.train_step(lambda m: m["a"].sum(), compute_dtype="float32")(
            wide, sl.Optimizer(sl.sgd(0.5), wide)
        )
        assert (new["a"].dtype, loss.dtype) == (jnp.float64, jnp.float32)

    seen = set()

    @sl.train_step(compute_dtype="bfloat16")
    def step(model):
        seen.add(model["w"].dtype)
        return (model["w"].astype(jnp.float32) ** 2).sum()

    model = {"w": jnp.ones(2)}
    step(model, sl.Optimizer(sl.lbfgs(), model))
    assert seen == {np.dtype(jnp.bfloat16)}

    tx = sl.DifferentiallyPrivateAggregate(1e3, 0.0, key=0) | sl.sgd(0.1)
    models = []
    for fn, dtype in ((loss_fn, "bfloat16"), (by_hand("bfloat16"), None)):
        model = jax.tree.map(lambda a: jnp.copy(a) if eqx.is_array(a) else a, mlp())
        step = sl.train_step(fn, compute_dtype=dtype, donate="all")
        model, _, _ = step(model, sl.Optimizer(tx, model), x, y)
        models.append(eqx.filter(model, eqx.is_array))
    assert_same_bits(*models)


def test_equal_dtypes_share_one_program_and_float16_without_a_scale_warns():
    counting = Counting(loss_fn)
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)):
        step = sl.train_step(counting, compute_dtype=dtype)
        run(step, steps=1)
        assert repr(step) == "sl.train_step(loss_fn, compute_dtype='bfloat16')"
    assert counting.traces == 1

    step = sl.train_step(lambda m: jnp.sum(m["a"] ** 2), compute_dtype="float16")
    model = {"a": jnp.ones(3)}
    with pytest.warns(UserWarning, match=r"gradients below 6e-8 become 0. Write `tx.scale_loss"):
        step(model, sl.Optimizer(sl.sgd(0.1), model))
    step(model, sl.Optimizer(sl.sgd(0.1).scale_loss(), model))
