"""The functional core, used wrongly."""

import warnings

import jax
import jax.numpy as jnp

import slalom as sl

from .messages import bound, mlp, params, refused

WHOLE_MODEL = "`sl.Optimizer(tx, model)` … `eqx.filter(model, eqx.is_inexact_array)`"
REBIND = "Set `jax_enable_x64` once … `opt, _ = opt.rebind(model)`"


def test_inputs_of_init_and_update():
    adam = sl.adam(0.1)
    for tx in (sl.adam(0.1), sl.sgd(0.1)):  # with and without state
        with refused(TypeError, "'n' is of type int", WHOLE_MODEL):
            tx.init({"n": 3, "w": jnp.ones(2)})
    with refused(TypeError, "'activation' is of type", WHOLE_MODEL):
        sl.adam(0.1).init(mlp())
    with refused(TypeError, "'n' is an array of dtype int32", WHOLE_MODEL):
        sl.adam(0.1).init({"n": jnp.arange(3), "w": jnp.ones(2)})
    with refused(
        ValueError, "'w' is in the state or parameters but not in the updates", "of the same model"
    ):
        adam.update({"b": jnp.ones(2)}, adam.init(params()), params())
    with refused(ValueError, "The update at 'b' has shape () … (2,)", "Shapes must be equal"):
        adam.update(params() | {"b": jnp.ones(())}, adam.init(params()), params())
    with refused(
        TypeError, "AddDecayedWeights needs 'params'", "`tx.update(grads, state, params)`"
    ):
        tx = sl.adamw(0.1)
        jax.eval_shape(lambda: tx.update(params(), tx.init(params())))
    with refused(
        TypeError,
        "ScaleByLearningRate.learning_rate … the step count",
        "`context=sl.Context(step=n)` … `sl.interop.to_optax(tx)`",
    ):
        tx = sl.sgd(sl.schedules.linear(0.0, 1.0, 10))
        tx.update(params(), tx.init(params()))


def test_x64_switched_after_creation():
    with refused(
        TypeError,
        "x64 off … x64 on … 'every_k.value' is float32 … float64 now",
        REBIND,
    ):
        opt = bound(sl.adam(0.1).every_k(2))
        with jax.enable_x64(True):
            opt.step(params(), params())
    with refused(
        TypeError,
        "x64 on … x64 off … 'every_k.value' is float64 … float32 now",
        REBIND,
    ):
        with jax.enable_x64(True):
            opt = bound(sl.adam(0.1).every_k(2))
        with warnings.catch_warnings(action="ignore"):  # JAX warns that it has no float64
            opt.step(params(), params())
