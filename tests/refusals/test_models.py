"""Models that cannot be bound."""

import functools
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

import slalom as sl

from .messages import arrays, bound, mlp, params, refused

CREATE = "`sl.Optimizer(tx, model)` … `opt.rebind(model)`"
ARRAYS = "floating or complex arrays"
OPTAX_INIT = sl.interop.to_optax(sl.adam(0.1)).init


Tensor = type("Tensor", (), {"__module__": "torch"})


def test_models_that_cannot_be_bound_or_are_other_than_the_one_bound():
    with refused(ValueError, "nothing to train … leaves of type int", ARRAYS):
        sl.Optimizer(sl.adam(0.1), 3)
    with refused(ValueError, "nothing to train … leaves of type function", ARRAYS):
        sl.Optimizer(sl.adam(0.1), mlp)
    with refused(ValueError, "nothing to train … int32 arrays, leaves of type float", ARRAYS):
        sl.Optimizer(sl.adam(0.1), {"n": jnp.arange(3), "x": 1.0})
    with refused(ValueError, "nothing to train … no leaves", ARRAYS):
        sl.Optimizer(sl.adam(0.1), {})
    with refused(ValueError, "nothing to train … float32 arrays", "that `trainable` selects"):
        bound(trainable=sl.where.nothing())
    with refused(TypeError, "contains at 'w' a Tensor of PyTorch", "`jnp.asarray(tensor.numpy())`"):
        sl.Optimizer(sl.adam(0.1), {"b": jnp.ones(2), "w": Tensor()})
    with refused(TypeError, "gradient at 'w' … got Tensor", "`jnp.asarray(tensor.numpy())`"):
        bound().step(params(), params() | {"w": Tensor()})
    with refused(TypeError, "'w' is a NumPy array of dtype bfloat16", "`jnp.asarray(leaf)`"):
        sl.Optimizer(sl.adam(0.1), {"w": np.ones(2, jnp.bfloat16)})
    numbers = (2.0, {"a": (2.0, mlp())}, [mlp(), {"b": 2.0}])
    for number, path in zip(numbers, ("x", "x.a.0", "x.1.b"), strict=True):
        model = {"w": jnp.ones(2), "x": number}
        bind = functools.partial(sl.Optimizer, sl.adam(0.1))
        for init, given in ((bind, model), (bind, {"x": number}), (OPTAX_INIT, model)):
            with refused(
                TypeError,
                f"'{path}' is the Python number 2.0",
                "`jnp.asarray(2.0)` … `trainable=sl.where.everything()`, which trains all arrays",
            ):
                init(given)
        sl.Optimizer(sl.adam(0.1), model, trainable=sl.where.everything())
    # Of a module it may be a rate.
    sl.Optimizer(sl.adam(0.1), {"w": jnp.ones(2), "x": eqx.nn.Dropout(0.5), "y": np.float64(1)})
    with refused(ValueError, "Two arrays … the path 'a.b'", "Rename one of them"):
        sl.Optimizer(sl.adam(0.1), {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}})

    with refused(ValueError, "'w' is in the original model but not in this model", CREATE):
        bound().step({"b": jnp.ones(2)}, {"b": jnp.ones(2)})
    with refused(
        ValueError, "'layers.2.weight' is in this model but not in the original model", CREATE
    ):
        sl.Optimizer(sl.adam(0.1), mlp()).step(mlp(depth=2), arrays(mlp(depth=2)))
    with refused(
        ValueError, "'0.out_features' is 8 in this model and 4 in the original model", CREATE
    ):
        narrow, wide = mlp().layers, mlp(width=8).layers
        sl.Optimizer(sl.adam(0.1), narrow).step(wide, wide)
    with refused(ValueError, "'b' has shape (3,) … 'scale_by_adam.mu' … (2,)", CREATE):
        other = params() | {"b": jnp.ones(3)}
        bound().step(other, other)


def test_rows_that_do_not_fit_and_frozen_fields():
    both, w = sl.where.everything(), sl.where.path("w")
    with refused(TypeError, "`rows` … a list", "{sl.where.path("):
        bound().rebind(params(), rows=[0, 1])
    with refused(ValueError, "`rows` for 'b' has 3 … has 2 along axis 0", "for each of these"):
        bound().rebind(params(), rows={both: [0, 1, 2]})
    with refused(
        ValueError, "`rows` takes entry 3 of 'scale_by_adam.mu.w', which has 3", "-1 makes"
    ):
        bound().rebind(params(), rows={w: [0, 1, 3]})
    with refused(ValueError, "`rows` for 'w' has a negative entry other than -1", "count from 0"):
        bound().rebind(params(), rows={w: [0, 1, -2]})
    with refused(
        TypeError,
        "`rows` for 'w' … got an array of shape (3,) and dtype float32",
        "vector of integers … -1",
    ):
        bound().rebind(params(), rows={w: [0.0, 1.0, 2.0]})
    with refused(ValueError, "`rows` moves axis 2 of 'w'", "shape (3, 2)"):
        bound().rebind(params(), rows={w: {2: [0, 1]}})
    with refused(ValueError, "`rows` selects 'c', which is a new parameter", "no old rows"):
        bound().rebind(params() | {"c": jnp.ones(1)}, rows={sl.where.path("c"): [0]})

    with refused(ValueError, "FrozenByName.__frozen__ names 'wieght'", "Fields: 'weight', 'bias'"):
        sl.Optimizer(sl.sgd(0.1), FrozenByName(jnp.ones(2)))
    with refused(TypeError, "FrozenByString.__frozen__ … got 'weight'", "('mean', 'encoder.**')"):
        sl.Optimizer(sl.sgd(0.1), FrozenByString(jnp.ones(2)))
    with refused(ValueError, "nothing to train … float32 arrays", "that it does not mark"):
        sl.Optimizer(sl.sgd(0.1), FrozenWhole(jnp.ones(2)))


class Frozen(eqx.Module):
    weight: Any = None
    bias: Any = None


class FrozenByName(Frozen):
    __frozen__ = ("wieght",)


class FrozenByString(Frozen):
    __frozen__ = "weight"


class FrozenWhole(Frozen):
    __frozen__ = ("**",)
