"""The functional core, used wrongly."""

import warnings

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import NOT_BROADCAST, bound, mlp, params, refused

PARAMETERS_ARE = (
    "; parameters and gradients must be trees of floating or complex arrays. Create the optimizer "
    "with the whole model, `sl.Optimizer(tx, model)`, which skips everything else, or pass "
    "`eqx.filter(model, eqx.is_inexact_array)`."
)


@refused(TypeError, "The leaf 'n' is of type int" + PARAMETERS_ARE, unchecked=True)
def init_with_an_int():
    sl.adam(0.1).init({"n": 3, "w": jnp.ones(2)})


@refused(TypeError, "The leaf 'n' is of type int" + PARAMETERS_ARE, unchecked=True)
def init_of_a_stateless_transform_with_an_int():
    sl.sgd(0.1).init({"n": 3, "w": jnp.ones(2)})


@refused(TypeError, "The leaf 'activation' is of type <…>" + PARAMETERS_ARE, unchecked=True)
def init_with_a_whole_model():
    sl.adam(0.1).init(mlp())


@refused(TypeError, "The leaf 'n' is an array of dtype int32" + PARAMETERS_ARE, unchecked=True)
def init_with_integers():
    sl.adam(0.1).init({"n": jnp.arange(3), "w": jnp.ones(2)})


@refused(
    ValueError,
    "The updates differ in structure from the state or parameters: 'w' is in the state or "
    "parameters but not in the updates. Pass gradients, state and parameters of the same "
    "model.",
    unchecked=True,
)
def update_without_a_leaf():
    tx = sl.adam(0.1)
    tx.update({"b": jnp.ones(2)}, tx.init(params()), params())


@refused(
    ValueError,
    "The update at 'b' has shape (), but the state or parameter there has shape (2,). "
    + NOT_BROADCAST,
    unchecked=True,
)
def update_of_another_shape():
    tx = sl.adam(0.1)
    tx.update(params() | {"b": jnp.ones(())}, tx.init(params()), params())


@refused(
    TypeError,
    "AddDecayedWeights needs 'params': pass the parameters: `tx.update(grads, state, params)`.",
)
def decay_without_parameters():
    tx = sl.adamw(0.1)
    tx.update(params(), tx.init(params()))


@refused(
    TypeError,
    "ScaleByLearningRate.learning_rate is a schedule and needs the step count: pass "
    "`context=sl.Context(step=n)` with the number of updates so far.",
)
def a_schedule_without_a_clock():
    tx = sl.sgd(sl.schedules.linear(0.0, 1.0, 10))
    tx.update(params(), tx.init(params()))


SWITCHED = (
    "This optimizer was created with x64 {}, and this step runs with x64 {}: the state at '{}' is "
    "{}, and would be {} now. Set `jax_enable_x64` once, before anything is created, or convert "
    "the state with `opt, _ = opt.rebind(model)`."
)


@refused(TypeError, SWITCHED.format("off", "on", "every_k.value", "float32", "float64"))
def x64_switched_on_after_creation():
    opt = bound(sl.adam(0.1).every_k(2))
    with jax.enable_x64(True):
        opt.step(params(), params())


@refused(TypeError, SWITCHED.format("on", "off", "every_k.value", "float64", "float32"))
def x64_switched_off_after_creation():
    with jax.enable_x64(True):
        opt = bound(sl.adam(0.1).every_k(2))
    with warnings.catch_warnings(action="ignore"):  # JAX warns that it has no float64
        opt.step(params(), params())
