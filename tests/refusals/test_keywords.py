"""Keywords of a step."""

import equinox as eqx
import jax.numpy as jnp

import slalom as sl
from helpers import ScaleByTemperature

from .messages import ScaleByValue, bound, params, refused

PASS_THE_LOSS = "`opt.step(model, grads, value=loss)` … `sl.Context(value=loss)` … `sl.train_step`"
ACCEPTED = "accepted: value, grad, value_fn, key, weight, per_param."


def test_needs_and_names():
    with refused(TypeError, "ScaleByValue ('every_k.scale_by_value') needs 'value'", PASS_THE_LOSS):
        bound((ScaleByValue() | sl.sgd(0.1)).every_k(2)).step(params(), params())
    with refused(TypeError, "ScaleByValue needs 'value'", PASS_THE_LOSS):
        tx = ScaleByValue() | sl.sgd(0.1)
        tx.update(params(), tx.init(params()), params(), sl.Context(step=0))
    with refused(
        TypeError,
        "ScaleByTemperature ('scale_by_temperature') needs 'temperature'",
        "`opt.step(model, grads, temperature=...)`",
    ):
        bound(ScaleByTemperature() | sl.sgd(0.1)).step(params(), params())
    with refused(TypeError, "No transform uses 'temprature'", ACCEPTED):
        bound().step(params(), params(), temprature=1.0)
    with refused(
        TypeError, "No transform uses 'temprature'", ACCEPTED + " … also accept: temperature"
    ):
        tx = ScaleByTemperature() | sl.sgd(0.1)
        bound(tx).step(params(), params(), temprature=1.0, temperature=1.0)


def test_values():
    with refused(ValueError, "`value` … got an array of shape (2,)", "a scalar"):
        bound().step(params(), params(), value=jnp.ones(2))
    with refused(TypeError, "`value` … got '2' of type str", "a scalar"):
        bound().step(params(), params(), value="2")
    with refused(ValueError, "`weight` … got an array of shape (2,)", "a scalar"):
        bound().step(params(), params(), weight=jnp.ones(2))
    with refused(ValueError, "`weight` … got -1", "non-negative"):
        bound().step(params(), params(), weight=-1)
    with refused(TypeError, "`value` … got a scalar of dtype complex64", "real"):
        bound().step(params(), params(), value=jnp.complex64(1))
    with refused(TypeError, "`key` … got 3", "`jax.random.key(0)`"):
        bound().step(params(), params(), key=3)
    with refused(
        TypeError,
        "`per_param` … got a list",
        "a dict from names to trees with the structure of the parameters",
    ):
        bound().step(params(), params(), per_param=[params()])
    with refused(TypeError, "`value_fn` … got 3.0", "maps the model to the loss"):
        bound().step(params(), params(), value_fn=3.0)
    with refused(TypeError, "`grad_fn` … got 3.0", "a function that takes the model"):
        bound(sl.sgd(0.1).sam()).step(params(), params(), grad_fn=3.0)
    with refused(
        ValueError,
        "`vmap` … 3 runs",
        "`eqx.filter_vmap(lambda opt, model, ...: opt.step(model, grads))`",
    ):
        # The learning rates would be broadcast along an axis of the parameters.
        models = {"w": jnp.ones((3, 2, 3))}
        opt = eqx.filter_vmap(lambda model: sl.Optimizer(sl.sgd(0.1), model))(models)
        opt.step(models, models)
