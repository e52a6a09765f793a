"""Models that cannot be bound."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl

from ._table import arrays, bound, mlp, params, refused

NOTHING_TO_TRAIN = (
    "There is no parameter to train: parameters are floating or complex arrays, and the model "
    "holds none"
)


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: leaves of type int.")
def an_int_as_model():
    sl.Optimizer(sl.adam(0.1), 3)


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: leaves of type function.")
def a_function_as_model():
    sl.Optimizer(sl.adam(0.1), mlp)


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: int32 arrays, leaves of type float.")
def a_model_of_integers_and_floats():
    sl.Optimizer(sl.adam(0.1), {"n": jnp.arange(3), "x": 1.0})


@refused(ValueError, NOTHING_TO_TRAIN + ". It holds: no leaf at all.")
def an_empty_model():
    sl.Optimizer(sl.adam(0.1), {})


@refused(ValueError, NOTHING_TO_TRAIN + " that `trainable` selects. It holds: float32 arrays.")
def nothing_is_trainable():
    bound(trainable=sl.where.nothing())


@refused(
    TypeError,
    "The leaf 'w' is a NumPy array of dtype bfloat16, which Equinox does not see as a floating "
    "array: it would get no gradient and never be trained. Pass `jnp.asarray(leaf)` in its place.",
)
def numpy_bfloat16():
    sl.Optimizer(sl.adam(0.1), {"w": np.ones(2, jnp.bfloat16)})


@refused(
    ValueError,
    "This optimizer was bound to a model with other trainable parameters: 'w' is in the model at "
    "binding but not in the model given now. Bind a new one with `sl.Optimizer(tx, model)`.",
)
def a_model_with_fewer_parameters_than_bound():
    bound().step({"b": jnp.ones(2)}, {"b": jnp.ones(2)})


@refused(
    ValueError,
    "This optimizer was bound to a model with other trainable parameters: 'layers.2.weight' is in "
    "the model given now but not in the model at binding. Bind a new one with "
    "`sl.Optimizer(tx, model)`.",
)
def a_deeper_model_than_bound():
    sl.Optimizer(sl.adam(0.1), mlp()).step(mlp(depth=2), arrays(mlp(depth=2)))


@refused(
    ValueError,
    "This optimizer was bound to a model with other trainable parameters: '0.out_features' is 8 "
    "in the model given now and 4 in the model at binding. Bind a new one with "
    "`sl.Optimizer(tx, model)`.",
)
def a_wider_model_than_bound():
    narrow, wide = (eqx.nn.MLP(2, 1, n, 1, key=jax.random.key(0)).layers for n in (4, 8))
    sl.Optimizer(sl.adam(0.1), narrow).step(wide, wide)


@refused(
    ValueError,
    "The state 'scale_by_adam.mu' was made for a parameter of shape (2,) at 'b', where there is "
    "one of shape (3,) now. Bind a new optimizer with `sl.Optimizer(tx, model)`.",
)
def a_model_of_other_shapes_than_bound():
    other = params() | {"b": jnp.ones(3)}
    bound().step(other, other)
