"""The training step, used wrongly."""

from typing import Any

import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused, total

DONATED = (
    "model, opt, loss = step(model, opt, ...) … model, opt, loss = step.last … "
    "disable donation … step = sl.train_step(loss_fn, "
)
DTYPES = "'bfloat16', 'float16', 'float32' or 'float64'"


def train(loss_fn: Any, **options: Any) -> Any:
    return sl.train_step(loss_fn, **options)(params(), bound())


def test_losses_functions_and_arguments():
    with refused(ValueError, "The loss … got an array of shape (2,)", "a scalar … `jnp.mean`"):
        train(lambda model: model["b"])
    with refused(
        TypeError,
        "The loss returned a tuple of 2",
        "`sl.train_step(loss_fn, has_aux=True)` … (loss, aux) … `sl.minimize` takes the loss alone",
    ):
        train(lambda model: (total(model), 1))
    with refused(TypeError, "The loss returned None", "`return`"):
        train(lambda model: None)
    with refused(TypeError, "The loss … got dtype complex64", "a real floating number"):
        train(lambda model: total(model).astype(jnp.complex64))
    with refused(TypeError, "The loss … got dtype int32", "a real floating number"):
        train(lambda model: 3)
    pair = "a pair (loss, aux)"
    with refused(TypeError, "With `has_aux=True` the loss … got an array of shape ()", pair):
        train(total, has_aux=True)
    with refused(ValueError, "`transform_grads`", "of type tuple, the gradients of type dict"):
        train(total, transform_grads=lambda grads: (grads, 1.0))
    with refused(TypeError, "With `has_aux=True` the loss … got a tuple of 3", pair):
        train(lambda model: (total(model), 1, 2), has_aux=True)

    with refused(TypeError, "a loss function, got 3", "`step = sl.train_step(loss_fn)`"):
        sl.train_step(3)
    with refused(
        TypeError, "'args.0' of type set … hashable", "Pass an array … mark the field … static"
    ):
        sl.train_step(lambda model, names: total(model))(params(), bound(), {"a"})
    with refused(TypeError, "`context` … got int", "`context={'key': key}` … by position"):
        sl.train_step(total)(params(), bound(), context=3)


def test_donated_buffers():
    with refused(ValueError, "(model.b, model.w)", DONATED + 'donate="opt"'):
        model = params()
        step = sl.train_step(total, donate="all")
        _, opt, _ = step(model, sl.Optimizer(sl.adam(0.1), model))
        step(model, opt)
    with refused(
        ValueError, "(model.b, model.w, opt.scale_by_adam.age and 5 more)", DONATED + "donate=False"
    ):
        model, grads = params(), params()
        opt = sl.Optimizer(sl.adam(0.1), model)
        sl.train_step(total, donate="all")(model, opt)
        opt.step(model, grads)
    with refused(
        ValueError,
        "(opt.scale_by_adam.age, opt.scale_by_adam.mu.b, opt.scale_by_adam.mu.w and 3 more)",
        DONATED + "donate=False",
    ):
        model = params()
        opt, step = sl.Optimizer(sl.adam(0.1), model), sl.train_step(total)
        step(model, opt)
        step(model, opt)


def test_options_and_states_of_many_steps():
    with refused(
        TypeError,
        "train_step.donate … got True",
        'sl.train_step(loss_fn, donate="opt") … sl.train_step(loss_fn, donate="all")',
    ):
        sl.train_step(total, donate=True)
    with refused(TypeError, "train_step.donate … got 'model'", "'opt', 'all' or False"):
        sl.train_step(total, donate="model")
    with refused(TypeError, "train_step.has_aux … got 'weight'", "True or False"):
        sl.train_step(total, has_aux="weight")
    with refused(
        TypeError,
        "With `has_weight=True` and `has_aux=True` the loss … got a tuple of 2",
        "a triple (loss, weight, aux)",
    ):
        train(lambda model: (total(model), 1), has_weight=True, has_aux=True)
    with refused(TypeError, "train_step.compute_dtype … got 'fp16'", DTYPES):
        sl.train_step(total, compute_dtype="fp16")
    with refused(TypeError, "train_step.compute_dtype … got jax.numpy.int32", DTYPES):
        sl.train_step(total, compute_dtype=jnp.int32)

    with refused(
        ValueError,
        "`model_state` … `aux`",
        "`sl.train_step(loss_fn, has_aux=True)` … (loss, model_state)",
    ):
        scan(length=2, model_state=jnp.ones(2))
    with refused(ValueError, "`model_state` … `microbatches`", "Leave out one of them"):
        options = {"has_aux": True, "microbatches": 2}
        scan(jnp.ones((2, 2)), options=options, model_state=jnp.ones(2))
    like = "a state like `model_state`"
    with refused(
        ValueError, "the loss returned is of type tuple, `model_state` of type dict", like
    ):
        step = sl.train_step(lambda model, state: (total(model), ()), has_aux=True)
        step.scan(params(), bound(), length=2, model_state={"a": jnp.ones(2)})
    with refused(ValueError, "'a' was float32[2] and is now float32[3]", like):
        step = sl.train_step(lambda model, state: (total(model), {"a": jnp.ones(3)}), has_aux=True)
        step.scan(params(), bound(), length=2, model_state={"a": jnp.ones(2)})


def test_the_best_model_and_its_options():
    like = "a model like the one that it was created with"
    as_was = "Pass the model as it was, for example before `eqx.nn.inference_mode`"
    half = jnp.ones((3, 2), jnp.bfloat16)
    for old, new, culprit, remedy in [
        ({}, {"v": half}, "'v' is in this model but not in the first one", like),
        ({"flag": False}, {"flag": True}, "'flag' was False and is now True", as_was),
        ({}, {"w": 3}, "'w' was an array and is now 3", as_was),
        ({}, {"w": half}, "'w' was float32[3,2] and is now bfloat16[3,2]", like),
    ]:
        with refused(ValueError, f"KeepBest.update … {culprit}", remedy):
            sl.KeepBest(params() | old).update(params() | new, 1.0)
    with refused(ValueError, "KeepBest.update … got float32[2]", "`jnp.mean` … `jax.vmap`"):
        sl.KeepBest(params()).update(params(), jnp.ones(2))
    with refused(TypeError, "KeepBest.update … got a dict", "a model and its loss, a real scalar"):
        sl.KeepBest(jnp.ones(())).update(jnp.ones(()), params())

    with refused(TypeError, "KeepBest.patience … got 2.5", "an int or None"):
        sl.KeepBest(params(), 2.5)
    with refused(ValueError, "KeepBest.patience … got 0", "at least 1"):
        sl.KeepBest(params(), 0)
    with refused(TypeError, "KeepBest.min_delta … got 'small'", "a number"):
        sl.KeepBest(params(), min_delta="small")
    with refused(ValueError, "KeepBest.min_delta … got -0.1", "in [0, inf)"):
        sl.KeepBest(params(), min_delta=-0.1)
    with refused(TypeError, "KeepBest.minimize … got 'loss'", "True or False"):
        sl.KeepBest(params(), minimize="loss")


def scan(*batches: Any, tx: Any = None, options: Any = (), **scanned: Any) -> Any:
    step = sl.train_step(lambda model, *args: total(model), **dict(options))
    return step.scan(params(), bound(tx), *batches, **scanned)


def test_many_steps_in_one_call():
    with refused(
        TypeError, "`step.scan` … number of steps", "an axis of steps by position, or `length=`"
    ):
        scan()
    same = "Pass by keyword what is the same … `step.scan(model, opt, length=10, x=x, y=y)`"
    with refused(ValueError, "`step.scan` … argument 0 has 3 … argument 1.x has 4", same):
        scan(jnp.ones(3), {"x": jnp.ones((4, 2))})
    with refused(ValueError, "`step.scan` … `length` has 2 … argument 0 has 3", same):
        scan(jnp.ones(3), length=2)
    with refused(
        ValueError,
        "argument 0 of `step.scan` is a scalar",
        "by keyword what is the same in every step",
    ):
        scan(jnp.ones(()), length=2)
    for batches in ([(jnp.ones(3), jnp.ones(3))] * 2, [jnp.ones(3)]):
        with refused(
            TypeError,
            f"positional argument 0 of `step.scan` is a list of {len(batches)} alike",
            "`step.scan(model, opt, *jax.tree.map(lambda *x: jnp.stack(x), *batches))` … a tuple",
        ):
            scan(batches)
    with refused(ValueError, "`unroll` of `step.scan` … got 0", "at least 1"):
        scan(length=2, unroll=0)
    with refused(TypeError, "`length` of `step.scan` … got 2.0", "an int"):
        scan(length=2.0)
    with refused(TypeError, "`with_metrics` of `step.scan` … got 'all'", "True or False"):
        scan(length=2, with_metrics="all")
