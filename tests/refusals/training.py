"""The training step, used wrongly."""

from typing import Any

import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused

HAS_AUX = (
    " To return more than the loss, write `sl.train_step(loss_fn, has_aux=True)` and return a pair "
    "(loss, aux)."
)
PAIR = "With `has_aux=True` the loss must return a pair (loss, aux), got "
NO_OPTIMIZER = "A training step is called as `step(model, opt, *args)` with an `sl.Optimizer`, got "
DONATED = """This model or optimizer was donated to an earlier call of the training step, so it \
can no longer be used ({}). Use the results of that call:
    model, opt, loss = step(model, opt, ...)
or, if Ctrl-C interrupted it,
    model, opt, loss = step.interrupted
or disable donation, which needs memory for a copy:
    step = sl.train_step(loss_fn, donate={})"""


def total(model: Any) -> jax.Array:
    return jnp.sum(model["b"]) + jnp.sum(model["w"])


def train(loss_fn: Any, **options: Any) -> Any:
    return sl.train_step(loss_fn, **options)(params(), bound())


@refused(
    ValueError,
    "The loss must be a scalar, got an array of shape (2,). Average it over the batch, for example "
    "with `jnp.mean`.",
)
def a_loss_that_is_a_vector():
    train(lambda model: model["b"])


@refused(TypeError, "The loss returned a tuple of 2." + HAS_AUX)
def a_loss_that_is_a_tuple():
    train(lambda model: (total(model), 1))


@refused(TypeError, "The loss returned None. Does the function end with `return`?")
def a_loss_that_is_none():
    train(lambda model: None)


@refused(TypeError, "The loss must be a real floating number, got dtype complex64.")
def a_complex_loss():
    train(lambda model: total(model).astype(jnp.complex64))


@refused(TypeError, "The loss must be a real floating number, got dtype int32.")
def an_integer_loss():
    train(lambda model: 3)


@refused(TypeError, PAIR + "an array of shape ().")
def no_aux():
    train(total, has_aux=True)


@refused(TypeError, PAIR + "a tuple of 3.")
def too_much_aux():
    train(lambda model: (total(model), 1, 2), has_aux=True)


@refused(TypeError, "train_step takes a loss function, got 3.", unchecked=True)
def a_loss_that_is_no_function():
    sl.train_step(3)


@refused(
    TypeError,
    "The leaf 'args.0' of type set is not an array, so it is static and must be hashable, but it "
    "is not. Pass an array instead, or mark the field that holds it as static.",
)
def an_argument_that_cannot_be_hashed():
    sl.train_step(lambda model, names: total(model))(params(), bound(), {"a"})


@refused(ValueError, DONATED.format("model.b, model.w", '"opt"'))
def a_donated_model_trained_again():
    model = params()
    step = sl.train_step(total, donate="all")
    _, opt, _ = step(model, sl.Optimizer(sl.adam(0.1), model))
    step(model, opt)


@refused(
    ValueError,
    DONATED.format("model.b, model.w, opt.arrays.scale_by_adam.age and 5 more", "False"),
)
def a_donated_model_stepped_by_hand():
    model, grads = params(), params()
    opt = sl.Optimizer(sl.adam(0.1), model)
    sl.train_step(total, donate="all")(model, opt)
    opt.step(model, grads)


@refused(
    ValueError,
    DONATED.format(
        "opt.arrays.scale_by_adam.age, opt.arrays.scale_by_adam.mu.b, "
        "opt.arrays.scale_by_adam.mu.w and 3 more",
        "False",
    ),
)
def a_donated_optimizer_used_again():
    model = params()
    opt, step = sl.Optimizer(sl.adam(0.1), model), sl.train_step(total)
    step(model, opt)
    step(model, opt)


@refused(
    TypeError,
    'train_step.donate must be "opt", "all" or False, got True. Write\n'
    '    sl.train_step(loss_fn, donate="opt")  # the optimizer\'s state; the model is kept (the '
    "default)\n"
    '    sl.train_step(loss_fn, donate="all")  # the trainable parameters too',
    unchecked=True,
)
def donate_true():
    sl.train_step(total, donate=True)


@refused(TypeError, "train_step.donate must be 'opt', 'all' or False, got 'model'.")
def donate_model():
    sl.train_step(total, donate="model")


@refused(TypeError, "train_step.has_aux must be a bool, got 'weight'.", unchecked=True)
def a_weight_as_aux():
    sl.train_step(total, has_aux="weight")


@refused(
    TypeError,
    "With `has_weight=True` and `has_aux=True` the loss must return a triple (loss, weight, aux), "
    "got a tuple of 2.",
)
def no_weight_and_aux():
    train(lambda model: (total(model), 1), has_weight=True, has_aux=True)


@refused(
    TypeError,
    "train_step.compute_dtype must be 'bfloat16', 'float16', 'float32' or 'float64', got 'fp16'.",
)
def an_unknown_compute_dtype():
    sl.train_step(total, compute_dtype="fp16")


@refused(
    TypeError,
    "train_step.compute_dtype must be 'bfloat16', 'float16', 'float32' or 'float64', got "
    "jax.numpy.int32.",
)
def an_integer_compute_dtype():
    sl.train_step(total, compute_dtype=jnp.int32)


# --- the best model ---------------------------------------------------------------------------


@refused(
    ValueError,
    "KeepBest.update takes a model like the one that it was created with: 'v' is in this model but "
    "not in the first one.",
)
def a_best_model_with_another_leaf():
    sl.KeepBest(params()).update(params() | {"v": jnp.ones(2)}, 1.0)


@refused(
    ValueError,
    "KeepBest.update takes a model like the one that it was created with, but 'flag' was False and "
    "is now True. Pass the model as it was, for example before `eqx.nn.inference_mode`.",
)
def a_best_model_in_another_mode():
    sl.KeepBest(params() | {"flag": False}).update(params() | {"flag": True}, 1.0)


@refused(
    ValueError,
    "KeepBest.update takes a model like the one that it was created with, but 'w' was float32[3,2] "
    "and is now bfloat16[3,2].",
)
def a_best_model_in_another_dtype():
    sl.KeepBest(params()).update(params() | {"w": jnp.ones((3, 2), jnp.bfloat16)}, 1.0)


@refused(
    ValueError,
    "KeepBest.update takes the loss as a real scalar, got float32[2]. Average it, for example with "
    "`jnp.mean`. For several runs at once, call it under `jax.vmap`.",
)
def a_best_model_by_several_losses():
    sl.KeepBest(params()).update(params(), jnp.ones(2))


@refused(
    TypeError,
    "KeepBest.update takes a model and its loss, a real scalar, got a dict in the place of the "
    "loss.",
)
def a_best_model_in_the_place_of_its_loss():
    sl.KeepBest(jnp.ones(())).update(jnp.ones(()), params())


@refused(TypeError, "KeepBest.patience must be an int or None, got 2.5.", unchecked=True)
def a_patience_of_half_a_step():
    sl.KeepBest(params(), 2.5)


@refused(ValueError, "KeepBest.patience must be at least 1, got 0.")
def no_patience():
    sl.KeepBest(params(), 0)


@refused(TypeError, "KeepBest.min_delta must be a number, got 'small'.", unchecked=True)
def a_word_for_min_delta():
    sl.KeepBest(params(), min_delta="small")


@refused(ValueError, "KeepBest.min_delta must be in [0, inf), got -0.1.")
def a_negative_min_delta():
    sl.KeepBest(params(), min_delta=-0.1)


@refused(TypeError, "KeepBest.minimize must be a bool, got 'loss'.", unchecked=True)
def a_name_for_minimize():
    sl.KeepBest(params(), minimize="loss")


# --- many steps in one call -------------------------------------------------------------------


def scan(*batches: Any, tx: Any = None, options: Any = (), **scanned: Any) -> Any:
    step = sl.train_step(lambda model, *args: total(model), **dict(options))
    return step.scan(params(), bound(tx), *batches, **scanned)


@refused(
    TypeError,
    "`step.scan` does not know the number of steps. Pass arrays with an axis of steps by position, "
    "or `length=`.",
)
def a_scan_of_unknown_length():
    scan()


@refused(
    ValueError,
    "The arguments of `step.scan` have different numbers of steps: the positional argument 0 has "
    "3, and the positional argument 1.x has 4.",
)
def a_scan_of_two_lengths():
    scan(jnp.ones(3), {"x": jnp.ones((4, 2))})


@refused(
    ValueError,
    "The arguments of `step.scan` have different numbers of steps: the keyword `length` has 2, and "
    "the positional argument 0 has 3.",
)
def a_scan_of_another_length():
    scan(jnp.ones(3), length=2)


@refused(
    ValueError,
    "The positional argument 0 of `step.scan` is a scalar, so it has no axis of steps. Pass by "
    "keyword what is the same in every step.",
)
def a_scan_over_a_scalar():
    scan(jnp.ones(()), length=2)


@refused(ValueError, "`unroll` of `step.scan` must be at least 1, got 0.")
def a_scan_that_is_not_unrolled():
    scan(length=2, unroll=0)


@refused(TypeError, "`length` of `step.scan` must be an int, got 2.0.", unchecked=True)
def a_scan_of_a_fractional_length():
    scan(length=2.0)


@refused(TypeError, "`with_metrics` of `step.scan` must be a bool, got 'all'.", unchecked=True)
def a_scan_with_named_metrics():
    scan(length=2, with_metrics="all")


@refused(
    ValueError,
    "`model_state` is what the loss returns as its `aux`. Write `sl.train_step(loss_fn, "
    "has_aux=True)`, and return (loss, model_state).",
)
def a_scan_with_a_state_that_is_not_returned():
    scan(length=2, model_state=jnp.ones(2))


@refused(
    ValueError,
    "`model_state` cannot be combined with `microbatches`: every microbatch would start from the "
    "same state. Leave out one of them.",
)
def a_scan_with_a_state_in_microbatches():
    options = {"has_aux": True, "microbatches": 2}
    scan(jnp.ones((2, 2)), options=options, model_state=jnp.ones(2))


@refused(
    ValueError,
    "The loss must return a state like `model_state`: the state that the loss returned is of type "
    "tuple, `model_state` of type dict.",
)
def a_scan_with_another_state():
    step = sl.train_step(lambda model, state: (total(model), ()), has_aux=True)
    step.scan(params(), bound(), length=2, model_state={"a": jnp.ones(2)})


@refused(
    ValueError,
    "The loss must return a state like `model_state`, but 'a' was float32[2] and is now "
    "float32[3].",
)
def a_scan_with_a_state_of_another_shape():
    step = sl.train_step(lambda model, state: (total(model), {"a": jnp.ones(3)}), has_aux=True)
    step.scan(params(), bound(), length=2, model_state={"a": jnp.ones(2)})
