"""Gradients that do not fit the model."""

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import arrays, bound, mlp, params, refused

DIFFERENTIATE = "`eqx.filter_grad(loss)(model)`"
AVERAGE = "the shapes must be equal … a batch axis, average over it"


@refused(ValueError, "'v' is in the gradients but not in the model", DIFFERENTIATE)
def gradients_under_another_name():
    bound().step(params(), {"b": jnp.ones(2), "v": jnp.ones((3, 2))})


@refused(ValueError, "'w' is in the model but not in the gradients", DIFFERENTIATE)
def gradients_without_a_leaf():
    bound().step(params(), {"b": jnp.ones(2)})


@refused(ValueError, "'layers.2.weight' is in the gradients but not in the model", DIFFERENTIATE)
def gradients_of_a_deeper_model():
    sl.Optimizer(sl.adam(0.1), mlp()).step(mlp(), arrays(mlp(depth=2)))


@refused(
    ValueError,
    "The gradients must be a tree like the model, got a tuple",
    "`loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)`",
)
def the_loss_with_the_gradients():
    bound().step(params(), (jnp.ones(()), params()))


@refused(ValueError, "the gradients are of type list, the model of type dict", DIFFERENTIATE)
def gradients_in_a_list():
    bound().step(params(), jax.tree.leaves(params()))


@refused(ValueError, "The gradient at 'b' has shape (5,) … (2,)", AVERAGE)
def a_gradient_of_another_shape():
    bound().step(params(), params() | {"b": jnp.ones(5)})


@refused(ValueError, "The gradient at 'b' has shape () … (2,)", AVERAGE)
def a_gradient_that_would_broadcast():
    bound().step(params(), params() | {"b": jnp.ones(())})


@refused(
    ValueError,
    "The gradient at 'b' is None",
    "`sl.Optimizer(tx, model, trainable=~sl.where.path('b'))` … differentiate with respect to it",
)
def no_gradient_at_a_trainable_leaf():
    bound().step(params(), params() | {"b": None})


@refused(
    TypeError, "The gradient at 'b' … got an array of dtype int32", "a floating or complex array"
)
def a_gradient_of_integers():
    bound().step(params(), params() | {"b": jnp.arange(2)})


@refused(TypeError, "The gradient at 'b' has dtype complex64 … float32", "the real part")
def a_complex_gradient_of_a_real_parameter():
    bound().step(params(), params() | {"b": jnp.ones(2, jnp.complex64)})


@refused(ValueError, "`grad` … 'w' is in the model but not in `grad`", DIFFERENTIATE)
def another_structure_passed_as_grad():
    bound().step(params(), params(), grad={"b": jnp.ones(2)})


@refused(ValueError, "'w' is in the model but not in the updates", "the structure of the model")
def updates_of_another_structure():
    sl.apply_updates(params(), {"b": jnp.ones(2)})


@refused(ValueError, "The update at 'b' has shape (3,) … (2,)", "Shapes must be equal")
def an_update_of_another_shape():
    sl.apply_updates(params(), {"b": jnp.ones(3), "w": None})
