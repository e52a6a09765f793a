"""Wrong inputs of `init`, `update` and `step`, which are refused before anything is computed."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import slalom as sl
from helpers import ScaleByTemperature

from .messages import ScaleByValue, arrays, bound, mlp, params, refused, total

WHOLE_MODEL = "`sl.Optimizer(tx, model)` … `eqx.filter(model, eqx.is_inexact_array)`"
REBIND = "Set `jax_enable_x64` once … `opt, _ = opt.rebind(model)`"


def test_inputs_of_init_and_update():
    adam = sl.adam(0.1)
    norms = sl.tree.global_norm, lambda x: sl.tree.inner(x, x)
    for read in (adam.init, sl.sgd(0.1).init, *norms):  # with and without state
        with refused(TypeError, "'n' is of type int", WHOLE_MODEL):
            read({"n": 3, "w": jnp.ones(2)})
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


def test_x64_switched_after_creation_and_other_structures():
    with refused(TypeError, "x64 off … x64 on … 'every_k.value' is float32 … float64 now", REBIND):
        opt = bound(sl.adam(0.1).every_k(2))
        with jax.enable_x64(True):
            opt.step(params(), params())
    with refused(TypeError, "x64 on … x64 off … 'every_k.value' is float64 … float32 now", REBIND):
        with jax.enable_x64(True):
            opt = bound(sl.adam(0.1).every_k(2))
        with warnings.catch_warnings(action="ignore"):  # JAX warns that it has no float64
            opt.step(params(), params())

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
    with refused(ValueError, "the gradients are an array of shape (4, 2), the", DIFFERENTIATE):
        bound().step(params(), jnp.ones((4, 2)))


DIFFERENTIATE = "`eqx.filter_grad(loss)(model)`"
AVERAGE = "the shapes must be equal … a batch axis, average over it"


def test_other_trees_and_leaves():
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

    with refused(ValueError, "`grad` … 'w' is in the model but not in `grad`", DIFFERENTIATE):
        bound().step(params(), params(), grad={"b": jnp.ones(2)})
    with refused(
        ValueError, "'w' is in the model but not in the updates", "the structure of the model"
    ):
        sl.apply_updates(params(), {"b": jnp.ones(2)})
    with refused(ValueError, "The update at 'b' has shape (3,) … (2,)", "Shapes must be equal"):
        sl.apply_updates(params(), {"b": jnp.ones(3), "w": None})


PASS_THE_LOSS = "`opt.step(model, grads, value=loss)` … `sl.Context(value=loss)` … `sl.train_step`"
ACCEPTED = "accepted: value, grad, value_fn, key, weight, per_param."
DECLARE = " … `context.extra` … `needs = ('temprature',)`."


def test_needs_and_names():
    with refused(TypeError, "ScaleByValue ('every_k.scale_by_value') needs 'value'", PASS_THE_LOSS):
        bound((ScaleByValue() | sl.sgd(0.1)).every_k(2)).step(params(), params())
    with refused(TypeError, "ScaleByValue needs 'value'", PASS_THE_LOSS):
        tx = ScaleByValue() | sl.sgd(0.1)
        tx.update(params(), tx.init(params()), params(), sl.Context(step=0))
    hand = "`opt.step(model, grads, grad=grads)` … `opt.step(..., value_fn=fn)` … `sl.train_step`"
    with refused(TypeError, "('scale_by_zoom_linesearch') needs 'grad', 'value_fn'", hand):
        bound(sl.lbfgs()).step(params(), params(), value=1.0)
    opt = bound(ScaleByTemperature() | sl.sgd(0.1))
    needs = "ScaleByTemperature ('scale_by_temperature') needs 'temperature'"
    with refused(TypeError, needs, "`opt.step(model, grads, temperature=...)`"):
        opt.step(params(), params())
    with refused(TypeError, needs, '`step(model, opt, ..., context={"temperature": ...})`'):
        sl.train_step(total)(params(), opt)
    with refused(TypeError, "No transform uses 'temprature'", ACCEPTED + DECLARE):
        bound().step(params(), params(), temprature=1.0)
    more = " … also accept: temperature."
    with refused(TypeError, "No transform uses 'temprature'", ACCEPTED + more + DECLARE):
        opt.step(params(), params(), temprature=1.0, temperature=1.0)


def test_optimizers_without_arrays():
    steps = [
        lambda opt: opt.step(params(), params()),
        lambda opt: opt.update(params(), params()),
        lambda opt: sl.train_step(total)(params(), opt),
        lambda opt: sl.train_step(total).scan(params(), opt, length=2),
        lambda opt: sl.minimize(total, opt, params(), max_steps=2),
    ]
    others = [
        lambda opt, name=name: getattr(opt, name)(params())
        for name in ("reset", "rebind", "eval_params")
    ]
    opt = bound(sl.adam(0.1).average())
    code = "lambda model, opt: opt.step(model, grads), model, opt"
    remedy = f"`opt = sl.Optimizer(tx, model)` … `jax.eval_shape({code})`"
    for call in steps + others:
        with refused(TypeError, "This optimizer has shapes in place of arrays", remedy):
            call(jax.eval_shape(lambda: opt))
    remedy = "the optimizer itself … `eqx.filter`, `jax.grad` or a cast of all leaves"
    for call in (*steps, *others, lambda opt: opt.hyperparams):
        with refused(TypeError, "The count … an array of ints, got None", remedy):
            call(arrays(opt))
    for call in steps:
        with refused(TypeError, "The count … got an array of dtype float32", remedy):
            call(jax.tree.map(lambda x: x.astype(float), opt))


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


def test_a_bad_step_is_refused_while_tracing():
    for error, culprit, grads, known in [
        (ValueError, "'w' is in the model but not in the gradients", {"b": jnp.ones(2)}, {}),
        (ValueError, "The gradient at 'b' has shape ()", params() | {"b": jnp.ones(())}, {}),
        (ValueError, "The gradient at 'b' is None", params() | {"b": None}, {}),
        (TypeError, "No transform uses 'temprature'", params(), {"temprature": 1.0}),
        (ValueError, "`value` must be a scalar", params(), {"value": jnp.ones(2)}),
    ]:
        with pytest.raises(error) as caught:  # under `eval_shape`, where nothing can be computed
            jax.eval_shape(lambda *args, known=known: bound().step(*args, **known), params(), grads)
        assert culprit in str(caught.value)


def test_a_refused_step_donates_nothing_and_leaves_the_optimizer_as_it_was():
    model = params()
    opt = sl.Optimizer(sl.adam(0.1), model)
    with pytest.raises(ValueError, match="must be a scalar"):
        sl.train_step(lambda model: model["b"])(model, opt)
    model, opt, loss = sl.train_step(total)(model, opt)
    assert loss == 8
    assert opt.count == 1
    # A donated optimizer can be printed.
    sl.train_step(total)(model, opt)
    assert "sl.ScaleByAdam()" in repr(opt)

    model, opt = params(), bound()
    with pytest.raises(ValueError, match="not broadcast"):
        opt.step(model, params() | {"b": jnp.ones(5)})
    _, opt = opt.step(model, params())
    assert opt.count == 1


def test_learning_rates_are_warned_of_where_both_act():
    with pytest.warns(UserWarning, match="together they ascend") as caught:
        bound((sl.adam(0.1) | sl.sgd(0.1)).every_k(2))
    assert str(caught[0].message).startswith(
        "'every_k.scale_by_learning_rate' and 'every_k.scale_by_learning_rate_2' both flip the "
    )

    rate, w = sl.ScaleByLearningRate(0.1), sl.where.path("w")
    bound(rate.mask(w) | rate.mask(~w))
    bound(sl.Scale(-1.0) | sl.adam(0.1))

    @jax.jit
    def step(b2):
        return sl.Optimizer(sl.adam(0.1, b2=b2), params()).hyperparams["b2"]

    assert step(1.5) == 1.5
