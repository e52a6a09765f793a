"""Models that cannot be bound."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import slalom as sl

from ._table import arrays, bound, mlp, params, refused

NOTHING_TO_TRAIN = "There is nothing to train: the model has no floating or complex arrays"

OTHER_PARAMETERS = (
    "The trainable parameters of this model differ from those that the optimizer was created with: "
)
CREATE = (
    " Create a new optimizer with `sl.Optimizer(tx, model)`, or transfer the state with "
    "`opt.rebind(model)`."
)


@refused(ValueError, NOTHING_TO_TRAIN + ". It contains leaves of type int.")
def an_int_as_model():
    sl.Optimizer(sl.adam(0.1), 3)


@refused(ValueError, NOTHING_TO_TRAIN + ". It contains leaves of type function.")
def a_function_as_model():
    sl.Optimizer(sl.adam(0.1), mlp)


@refused(ValueError, NOTHING_TO_TRAIN + ". It contains int32 arrays, leaves of type float.")
def a_model_of_integers_and_floats():
    sl.Optimizer(sl.adam(0.1), {"n": jnp.arange(3), "x": 1.0})


@refused(ValueError, NOTHING_TO_TRAIN + ". It contains no leaves.")
def an_empty_model():
    sl.Optimizer(sl.adam(0.1), {})


@refused(ValueError, NOTHING_TO_TRAIN + " that `trainable` selects. It contains float32 arrays.")
def nothing_is_trainable():
    bound(trainable=sl.where.nothing())


@refused(
    TypeError,
    "The leaf 'w' is a NumPy array of dtype bfloat16, which Equinox does not treat as a floating "
    "array, so it would never be trained. Replace it with `jnp.asarray(leaf)`.",
)
def numpy_bfloat16():
    sl.Optimizer(sl.adam(0.1), {"w": np.ones(2, jnp.bfloat16)})


@refused(
    ValueError,
    OTHER_PARAMETERS + "'w' is in the original model but not in this model." + CREATE,
)
def a_model_with_fewer_parameters_than_bound():
    bound().step({"b": jnp.ones(2)}, {"b": jnp.ones(2)})


@refused(
    ValueError,
    OTHER_PARAMETERS + "'layers.2.weight' is in this model but not in the original model." + CREATE,
)
def a_deeper_model_than_bound():
    sl.Optimizer(sl.adam(0.1), mlp()).step(mlp(depth=2), arrays(mlp(depth=2)))


@refused(
    ValueError,
    OTHER_PARAMETERS + "'0.out_features' is 8 in this model and 4 in the original model." + CREATE,
)
def a_wider_model_than_bound():
    narrow, wide = (eqx.nn.MLP(2, 1, n, 1, key=jax.random.key(0)).layers for n in (4, 8))
    sl.Optimizer(sl.adam(0.1), narrow).step(wide, wide)


@refused(
    ValueError,
    "The parameter at 'b' has shape (3,), but the state 'scale_by_adam.mu' was created for shape "
    "(2,)." + CREATE,
)
def a_model_of_other_shapes_than_bound():
    other = params() | {"b": jnp.ones(3)}
    bound().step(other, other)


# --- what a model marks as frozen -------------------------------------------------------------


class Frozen(eqx.Module):
    weight: Any = None
    bias: Any = None


class FrozenByName(Frozen):
    __frozen__ = ("wieght",)


class FrozenByString(Frozen):
    __frozen__ = "weight"


class FrozenWhole(Frozen):
    __frozen__ = ("**",)


@refused(
    ValueError,
    "FrozenByName.__frozen__ names 'wieght', but FrozenByName has no 'wieght'. Fields: 'weight', "
    "'bias'.",
)
def a_frozen_field_that_does_not_exist():
    sl.Optimizer(sl.sgd(0.1), FrozenByName(jnp.ones(2)))


@refused(
    TypeError,
    "FrozenByString.__frozen__ must be a tuple of paths of what is not trained, such as ('mean', "
    "'encoder.**'), got 'weight'.",
)
def a_string_of_frozen_fields():
    sl.Optimizer(sl.sgd(0.1), FrozenByString(jnp.ones(2)))


@refused(
    ValueError,
    f"{NOTHING_TO_TRAIN} that it does not mark. It contains float32 arrays.",
)
def a_model_that_is_frozen_as_a_whole():
    sl.Optimizer(sl.sgd(0.1), FrozenWhole(jnp.ones(2)))
