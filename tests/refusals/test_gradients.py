"""Gradients that do not fit the model."""

import jax
import jax.numpy as jnp

import slalom as sl

from .messages import arrays, bound, mlp, params, refused

DIFFERENTIATE = "`eqx.filter_grad(loss)(model)`"
AVERAGE = "the shapes must be equal … a batch axis, average over it"


def test_structures():
    with refused(ValueError, "'v' is in the gradients but not in the model", DIFFERENTIATE):
        bound().step(params(), {"b": jnp.ones(2), "v": jnp.ones((3, 2))})
    with refused(ValueError, "'w' is in the model but not in the gradients", DIFFERENTIATE):
        bound().step(params(), {"b": jnp.ones(2)})
    with refused(
        ValueError, "'layers.2.weight' is in the gradients but not in the model", DIFFERENTIATE
    ):
        sl.Optimizer(sl.adam(0.1), mlp()).step(mlp(), arrays(mlp(depth=2)))
    with refused(
        ValueError,
        "The gradients must be a tree like the model, got a tuple",
        "`loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)`",
    ):
        bound().step(params(), (jnp.ones(()), params()))
    with refused(
        ValueError, "the gradients are of type list, the model of type dict", DIFFERENTIATE
    ):
        bound().step(params(), jax.tree.leaves(params()))


def test_leaves():
    for shape in ((5,), ()):  # the second would broadcast
        with refused(ValueError, f"The gradient at 'b' has shape {shape} … (2,)", AVERAGE):
            bound().step(params(), params() | {"b": jnp.ones(shape)})
    with refused(
        ValueError,
        "The gradient at 'b' is None",
        "`sl.Optimizer(tx, model, trainable=~sl.where.path('b'))` … differentiate with "
        "respect to it",
    ):
        bound().step(params(), params() | {"b": None})
    with refused(
        TypeError,
        "The gradient at 'b' … got an array of dtype int32",
        "a floating or complex array",
    ):
        bound().step(params(), params() | {"b": jnp.arange(2)})
    with refused(TypeError, "The gradient at 'b' has dtype complex64 … float32", "the real part"):
        bound().step(params(), params() | {"b": jnp.ones(2, jnp.complex64)})


def test_other_trees():
    with refused(ValueError, "`grad` … 'w' is in the model but not in `grad`", DIFFERENTIATE):
        bound().step(params(), params(), grad={"b": jnp.ones(2)})
    with refused(
        ValueError, "'w' is in the model but not in the updates", "the structure of the model"
    ):
        sl.apply_updates(params(), {"b": jnp.ones(2)})
    with refused(ValueError, "The update at 'b' has shape (3,) … (2,)", "Shapes must be equal"):
        sl.apply_updates(params(), {"b": jnp.ones(3), "w": None})
