"""What people write who come from another library, or in a hurry."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused
from .training import total

JOIN = "Join transforms with `|`, or write `sl.chain(*transforms)`."
NOT_CALLED = (
    " is a transform, which is not called. Bind it to a model, `opt = sl.Optimizer(tx, model)`, "
    "and write `model, opt = opt.step(model, grads)`. Without an optimizer, write `updates, "
    "state = tx.update(grads, state, params)`."
)
GRADIENTS = (
    ". Write `grads = eqx.filter_grad(loss_fn)(model, x, y)`, or let `sl.train_step(loss_fn)` "
    "differentiate."
)


# --- calls ------------------------------------------------------------------------------------


@refused(TypeError, "Chain" + NOT_CALLED)
def a_chain_that_is_called():
    tx: Any = sl.adam(0.1)
    tx(params())


@refused(TypeError, "ScaleByAdam" + NOT_CALLED)
def a_transform_that_is_called():
    tx: Any = sl.ScaleByAdam()
    tx()


@refused(
    TypeError,
    "An optimizer is not called. Write `model, opt = opt.step(model, grads)`, or make a training "
    "step, `step = sl.train_step(loss_fn)`, and call that: `model, opt, loss = step(model, opt, x, "
    "y)`.",
)
def an_optimizer_that_is_called():
    opt: Any = bound()
    opt(params(), params())


@refused(TypeError, "train_step takes a loss function, got sl.Clip(1.0).", unchecked=True)
def a_transform_as_loss():
    sl.train_step(sl.Clip(1.0))


@refused(
    TypeError,
    "ScaleByLearningRate.learning_rate must be a real number, a 0-d array or a schedule, got "
    "sl.Clip(1.0) of type Clip.",
)
def a_transform_as_schedule():
    sl.sgd(sl.Clip(1.0))  # pyright: ignore[reportArgumentType]


@refused(
    TypeError,
    "An optimizer is bound to a model: write `sl.Optimizer(tx, model)`. It creates the state for "
    "the arrays of the model.",
)
def an_optimizer_without_a_model():
    sl.Optimizer(sl.adam(0.1))


ONE = "() takes 1 argument by position, got "
MAKE = (
    ". Make the step of the loss, `step = sl.train_step(loss_fn)`, and then call it: `model, opt, "
    "loss = step(model, opt, x, y)`."
)


@refused(TypeError, "train_step" + ONE + "2" + MAKE)
def a_training_step_of_model_and_optimizer():
    sl.train_step(params(), bound())  # pyright: ignore[reportCallIssue]


@refused(
    TypeError,
    "save" + ONE + "3. Name the others: `sl.checkpoint.save(path, model=model, opt=opt)`.",
)
def a_save_by_position():
    sl.checkpoint.save("run", params(), bound())  # pyright: ignore[reportCallIssue]


@refused(
    TypeError,
    "load" + ONE + "3. Name the others: `sl.checkpoint.load(path, model=model, opt=opt)`.",
)
def a_load_by_position():
    sl.checkpoint.load("run", params(), bound())  # pyright: ignore[reportCallIssue]


@refused(
    TypeError,
    "update() takes 2 arguments by position, got 3. An optimizer holds its state: write `model, "
    "opt = opt.step(model, grads)`.",
)
def an_update_as_in_optax():
    opt: Any = bound()
    opt.update(params(), opt.state, params())


@refused(
    TypeError,
    "rebind() takes 1 argument by position, got 2. Name the others: `opt, report = "
    "opt.rebind(model, tx=tx)`.",
)
def a_transform_to_rebind_by_position():
    bound().rebind(params(), sl.sgd(0.1))  # pyright: ignore[reportCallIssue]


STEP = "A training step is called as `step(model, opt, *args)` with an `sl.Optimizer`, got "


@refused(
    TypeError,
    "The model and the optimizer are swapped: write `model, opt, loss = step(model, opt, ...)`.",
    unchecked=True,
)
def a_step_of_optimizer_and_model():
    step: Any = sl.train_step(total)
    step(bound(), params())


@refused(
    TypeError,
    STEP + "Chain in its place. Bind it to the model first: `opt = sl.Optimizer(tx, model)`.",
    unchecked=True,
)
def a_step_with_a_transform():
    step: Any = sl.train_step(total)
    step(params(), sl.adam(0.1))


@refused(TypeError, STEP + "an array in its place.", unchecked=True)
def a_step_without_an_optimizer():
    step: Any = sl.train_step(total)
    step(params(), jnp.ones(2))


@refused(
    TypeError,
    "train_step takes a loss function, got a Linear. Write a function `loss_fn(model, x, y)` that "
    "returns a scalar; the step gets the model: `step(model, opt, x, y)`.",
)
def a_model_as_loss():
    sl.train_step(eqx.nn.Linear(2, 2, key=jax.random.key(0)))


@refused(
    TypeError,
    "A Linear is a model, not a schedule. Bind it to the optimizer: `opt = "
    "sl.Optimizer(sl.adam(1e-3), model)`.",
)
def an_optimizer_of_a_model_as_in_torch():
    sl.adam(eqx.nn.Linear(2, 2, key=jax.random.key(0)), 0.1)


@refused(
    ValueError,
    "`nesterov=True` has no effect without momentum. Pass `momentum=0.9` too, or leave it out.",
)
def nesterov_without_momentum():
    sl.sgd(0.1, nesterov=True)


# --- keywords of other libraries --------------------------------------------------------------


@refused(
    TypeError,
    "adam() got an unexpected keyword 'clipnorm'. Write sl.ClipByGlobalNorm(1.0) | tx.",
)
def a_clip_as_in_keras():
    sl.adam(0.1, clipnorm=1.0)  # pyright: ignore[reportCallIssue]


@refused(
    TypeError,
    "sgd() got an unexpected keyword 'weight_decay'. Write sl.adamw(learning_rate, "
    "weight_decay=0.1), or sl.AddDecayedWeights(0.1) | tx.",
)
def a_weight_decay_as_in_torch():
    sl.sgd(0.1, weight_decay=0.1)  # pyright: ignore[reportCallIssue]


# --- chains -----------------------------------------------------------------------------------

CLIPPED = (sl.Clip(1.0), sl.sgd(0.1))


@refused(
    TypeError,
    "The first argument of an optimizer must be a transform such as `sl.adam(1e-3)`, got "
    f"(sl.Clip(1.0), sl.ScaleByLearningRate(0.1)). {JOIN}",
    unchecked=True,
)
def a_tuple_as_optimizer():
    bound(CLIPPED)


@refused(
    TypeError,
    "Link 0 is not a transform: got [sl.Clip(1.0), sl.ScaleByLearningRate(0.1)] of type list. "
    + JOIN,
    unchecked=True,
)
def a_chain_of_a_list():
    links: Any = [*CLIPPED]
    sl.chain(links)


@refused(
    TypeError,
    "Link 1 is not a transform: got None of type NoneType. Leave it out, or write `sl.Identity()`.",
    unchecked=True,
)
def a_chain_with_nothing():
    nothing: Any = None
    sl.chain(sl.Clip(1.0), nothing)


@refused(
    TypeError,
    "Link 1 is not a transform: got <…> of type Optimizer. Join transforms before you bind them: "
    "`sl.Optimizer(tx | other, model)`.",
    unchecked=True,
)
def a_chain_with_an_optimizer():
    opt: Any = bound()
    sl.chain(sl.Clip(1.0), opt)


# --- attributes -------------------------------------------------------------------------------


def missing(name: str) -> str:
    return f"'Chain' object has no attribute '{name}'."


@refused(AttributeError, missing("every") + " Write tx.every_k(k).")
def a_method_named_every():
    sl.adam(0.1).every(4)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, missing("accumulate") + " Write tx.every_k(k).")
def a_method_named_accumulate():
    sl.adam(0.1).accumulate(4)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, missing("ema") + " Write tx.average(decay).")
def a_method_named_ema():
    sl.adam(0.1).ema(0.9)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, missing("clip") + " Write sl.ClipByGlobalNorm(1.0) | tx.")
def a_method_named_clip():
    sl.adam(0.1).clip(1.0)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, missing("averge") + " Did you mean tx.average(...)?")
def a_method_misspelt():
    sl.adam(0.1).averge(0.9)  # pyright: ignore[reportAttributeAccessIssue]


@refused(
    AttributeError,
    missing("b1") + " Its part 'scale_by_adam' has: write `tx['scale_by_adam'].b1`, or read "
    '`opt.hyperparams["b1"]` of an optimizer.',
)
def a_hyperparameter_of_a_chain():
    sl.adam(0.1).b1  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@refused(
    dataclasses.FrozenInstanceError,
    "ScaleByAdam is immutable, so 'b1' cannot be set. Make another one, `sl.ScaleByAdam(b1=...)`, "
    "or change the hyperparameter of an optimizer: `opt = opt.with_hyperparams(b1=...)`.",
)
def a_hyperparameter_that_is_set():
    tx: Any = sl.ScaleByAdam()
    tx.b1 = 0.5


@refused(
    AttributeError,
    "'Optimizer' object has no attribute 'state_dict'. Write `sl.checkpoint.save(path, "
    "model=model, opt=opt)` to save a run, or `opt.state` to look at the state.",
)
def a_state_dict():
    bound().state_dict  # noqa: B018


@refused(
    AttributeError,
    "'Optimizer' object has no attribute 'zero_grad'. Write nothing: JAX does not accumulate "
    "gradients.",
)
def gradients_set_to_zero():
    bound().zero_grad()


# --- steps ------------------------------------------------------------------------------------


@refused(
    TypeError,
    "`opt.step` takes the gradients of the loss, got a scalar, such as a loss" + GRADIENTS,
)
def a_step_with_the_loss():
    bound().step(params(), total(params()))


@refused(TypeError, "`opt.step` takes the gradients of the loss, got a function" + GRADIENTS)
def a_step_with_the_loss_function():
    bound().step(params(), total)


NO_VALUE = (
    "`. It is compiled, so its arrays have no values while Python runs it. Instead of `float(x)` "
    "or `x.item()`, return the array, with `has_aux=True` beside the loss, and convert what the "
    "step returns. Instead of `if x > 0`, write `jnp.where(x > 0, a, b)`, and instead of NumPy's "
    "functions those of `jax.numpy`. To print a value, use `jax.debug.print`."
)
NEEDS = "The loss needs the value of an array, in line <…> of <…>mistakes.py, `"


@refused(TypeError, NEEDS + "return float(total(model))" + NO_VALUE)
def a_loss_as_float():
    def loss_fn(model):
        return float(total(model))

    sl.train_step(loss_fn)(params(), bound())


@refused(TypeError, NEEDS + "return total(model) if total(model) > 0 else 0.0" + NO_VALUE)
def a_loss_that_branches():
    def loss_fn(model):
        return total(model) if total(model) > 0 else 0.0

    sl.train_step(loss_fn)(params(), bound())


def steps_of(loss_fn: Any, tx: Any) -> None:
    model = {"w": jnp.zeros(2)}
    opt = sl.Optimizer(sl.CheckFinite() | tx, model)
    for _ in range(3):
        model, opt, _ = sl.train_step(loss_fn)(model, opt)


@refused(
    FloatingPointError,
    "In step 0 the gradient was not finite at 'w'. Look for a derivative that is infinite, as of "
    "`jnp.sqrt` or `jnp.linalg.norm` at 0, or that overflows.",
)
def a_gradient_that_is_nan():
    steps_of(lambda model: jnp.sqrt(jnp.sum(model["w"] ** 2)), sl.sgd(0.1))


@refused(
    FloatingPointError,
    "In step 0 the loss was not finite, the gradient was not finite at 'w'. The parameters were "
    "finite, so look at the loss and at this batch.",
)
def a_loss_that_is_nan():
    steps_of(lambda model: jnp.sum(model["w"] * jnp.nan), sl.sgd(0.1))


@refused(
    FloatingPointError,
    "In step 1 the parameters were not finite at 'w', the loss was not finite. The update of the "
    "step before made the parameters so: look at the learning rate and the transforms.",
)
def an_update_that_is_nan():
    steps_of(lambda model: 100 * jnp.sum(model["w"]), sl.sgd(1e38))
