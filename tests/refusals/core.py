"""The functional core, used wrongly."""

import warnings

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, mlp, params, refused

WHOLE_MODEL = "`sl.Optimizer(tx, model)` … `eqx.filter(model, eqx.is_inexact_array)`"


@refused(TypeError, "'n' is of type int", WHOLE_MODEL, unchecked=True)
def init_with_an_int():
    sl.adam(0.1).init({"n": 3, "w": jnp.ones(2)})


@refused(TypeError, "'n' is of type int", WHOLE_MODEL, unchecked=True)
def init_of_a_stateless_transform_with_an_int():
    sl.sgd(0.1).init({"n": 3, "w": jnp.ones(2)})


@refused(TypeError, "'activation' is of type", WHOLE_MODEL, unchecked=True)
def init_with_a_whole_model():
    sl.adam(0.1).init(mlp())


@refused(TypeError, "'n' is an array of dtype int32", WHOLE_MODEL, unchecked=True)
def init_with_integers():
    sl.adam(0.1).init({"n": jnp.arange(3), "w": jnp.ones(2)})


@refused(
    ValueError,
    "'w' is in the state or parameters but not in the updates",
    "of the same model",
    unchecked=True,
)
def update_without_a_leaf():
    tx = sl.adam(0.1)
    tx.update({"b": jnp.ones(2)}, tx.init(params()), params())


@refused(
    ValueError, "The update at 'b' has shape () … (2,)", "Shapes must be equal", unchecked=True
)
def update_of_another_shape():
    tx = sl.adam(0.1)
    tx.update(params() | {"b": jnp.ones(())}, tx.init(params()), params())


@refused(TypeError, "AddDecayedWeights needs 'params'", "`tx.update(grads, state, params)`")
def decay_without_parameters():
    tx = sl.adamw(0.1)
    tx.update(params(), tx.init(params()))


@refused(
    TypeError,
    "ScaleByLearningRate.learning_rate … the step count",
    "`context=sl.Context(step=n)` … `sl.interop.to_optax(tx)`",
)
def a_schedule_without_a_clock():
    tx = sl.sgd(sl.schedules.linear(0.0, 1.0, 10))
    tx.update(params(), tx.init(params()))


@refused(
    TypeError,
    "x64 off … x64 on … 'every_k.value' is float32 … float64 now",
    "Set `jax_enable_x64` once … `opt, _ = opt.rebind(model)`",
)
def x64_switched_on_after_creation():
    opt = bound(sl.adam(0.1).every_k(2))
    with jax.enable_x64(True):
        opt.step(params(), params())


@refused(
    TypeError,
    "x64 on … x64 off … 'every_k.value' is float64 … float32 now",
    "Set `jax_enable_x64` once … `opt, _ = opt.rebind(model)`",
)
def x64_switched_off_after_creation():
    with jax.enable_x64(True):
        opt = bound(sl.adam(0.1).every_k(2))
    with warnings.catch_warnings(action="ignore"):  # JAX warns that it has no float64
        opt.step(params(), params())
