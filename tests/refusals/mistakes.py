"""What people write who come from another library, or in a hurry."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import slalom as sl

from ._table import bound, params, refused
from .training import total

BIND = (
    "`opt = sl.Optimizer(tx, model)` … `model, opt = opt.step(model, grads)` … `updates, "
    "state = tx.update(grads, state, params)`"
)
JOIN = "`|`, or write `sl.chain(*transforms)`"
GRADIENTS = "`grads = eqx.filter_grad(loss_fn)(model, x, y)` … `sl.train_step(loss_fn)`"
TRACED = (
    "`float(x)` or `x.item()`, return the array along with the loss, with `has_aux=True` … "
    "`if x > 0`, write `jnp.where(x > 0, a, b)` … those of `jax.numpy` … `jax.debug.print`"
)


# --- calls ------------------------------------------------------------------------------------


@refused(TypeError, "Chain is a transform", BIND)
def a_chain_that_is_called():
    tx: Any = sl.adam(0.1)
    tx(params())


@refused(TypeError, "ScaleByAdam is a transform", BIND)
def a_transform_that_is_called():
    tx: Any = sl.ScaleByAdam()
    tx()


@refused(
    TypeError,
    "An optimizer is not a function",
    "`model, opt = opt.step(model, grads)` … `step = sl.train_step(loss_fn)` … `model, opt, "
    "loss = step(model, opt, x, y)`",
)
def an_optimizer_that_is_called():
    opt: Any = bound()
    opt(params(), params())


@refused(TypeError, "train_step … got sl.Clip(1.0)", "a loss function", unchecked=True)
def a_transform_as_loss():
    sl.train_step(sl.Clip(1.0))


@refused(
    TypeError,
    "ScaleByLearningRate.learning_rate … got sl.Clip(1.0) of type Clip",
    "a real number, a 0-d array or a schedule",
)
def a_transform_as_schedule():
    sl.sgd(sl.Clip(1.0))  # pyright: ignore[reportArgumentType]


@refused(
    TypeError, "An optimizer is bound to a model", "`sl.Optimizer(tx, model)`. It creates the state"
)
def an_optimizer_without_a_model():
    sl.Optimizer(sl.adam(0.1))


@refused(
    TypeError,
    "train_step() … got 2",
    "`step = sl.train_step(loss_fn)` … `model, opt, loss = step(model, opt, x, y)`",
)
def a_training_step_of_model_and_optimizer():
    sl.train_step(params(), bound())  # pyright: ignore[reportCallIssue]


@refused(TypeError, "save() … got 3", "`sl.checkpoint.save(path, model=model, opt=opt)`")
def a_save_by_position():
    sl.checkpoint.save("run", params(), bound())  # pyright: ignore[reportCallIssue]


@refused(TypeError, "load() … got 3", "`sl.checkpoint.load(path, model=model, opt=opt)`")
def a_load_by_position():
    sl.checkpoint.load("run", params(), bound())  # pyright: ignore[reportCallIssue]


@refused(TypeError, "update() … got 3", "`model, opt = opt.step(model, grads)` … `value=loss`")
def an_update_as_in_optax():
    opt: Any = bound()
    opt.update(params(), opt.state, params())


@refused(TypeError, "step() … got 3", "`model, opt = opt.step(model, grads)` … `value=loss`")
def a_step_with_the_state():
    opt: Any = bound()
    opt.step(params(), params(), opt.state)


@refused(
    TypeError,
    "A transform does not hold its state",
    "`params, state = tx.step(grads, state, params)` … `model, opt = opt.step(model, grads)`",
)
def a_step_of_a_transform_as_of_an_optimizer():
    tx: Any = sl.adam(0.1)
    tx.step(params(), params())


@refused(
    TypeError,
    "`tx.update` got the keyword 'value'",
    "`tx.update(grads, state, params, sl.Context(value=...))`",
)
def a_value_as_in_optax():
    tx: Any = sl.polyak_sgd()
    tx.update(params(), tx.init(params()), params(), value=1.0)


@refused(
    TypeError,
    "`tx.update` got 3 as the context",
    "`tx.update(grads, state, params, sl.Context(step=...))`",
)
def a_step_count_as_context():
    tx: Any = sl.ScaleByAdam()
    tx.update(params(), tx.init(params()), params(), 3)


@refused(
    TypeError,
    "The state of this chain is a tuple of 2, which `init` or the last `update` … of type dict",
    "`tx.update(grads, state, params)`",
    unchecked=True,
)
def a_state_and_parameters_swapped():
    tx: Any = sl.adam(0.1)
    tx.update(params(), params(), tx.init(params()))


@refused(TypeError, "train_step() … 'optimizer'", "It takes loss_fn, has_aux")
def a_training_step_with_an_optimizer():
    sl.train_step(total, optimizer=sl.adam(0.1))  # pyright: ignore[reportArgumentType,reportCallIssue]


@refused(TypeError, "minimize() … 'steps'", "max_steps")
def a_minimization_of_some_steps():
    sl.minimize(total, sl.lbfgs(), params(), steps=10)  # pyright: ignore[reportCallIssue]


@refused(TypeError, "muon() … 'muon_weight_dimension_numbers'", "Write layout")
def dimension_numbers_as_in_optax():
    sl.muon(0.1, muon_weight_dimension_numbers=None)  # pyright: ignore[reportCallIssue]


@refused(TypeError, "rebind() … got 2", "`opt, report = opt.rebind(model, tx=tx)`")
def a_transform_to_rebind_by_position():
    bound().rebind(params(), sl.sgd(0.1))  # pyright: ignore[reportCallIssue]


@refused(
    TypeError,
    "The model and the optimizer are swapped",
    "`model, opt, loss = step(model, opt, ...)`",
    unchecked=True,
)
def a_step_of_optimizer_and_model():
    step: Any = sl.train_step(total)
    step(bound(), params())


@refused(
    TypeError,
    "`sl.Optimizer`, got Chain in its place",
    "`opt = sl.Optimizer(tx, model)`",
    unchecked=True,
)
def a_step_with_a_transform():
    step: Any = sl.train_step(total)
    step(params(), sl.adam(0.1))


@refused(
    TypeError,
    "got an array in its place",
    "`step(model, opt, *args)` … `sl.Optimizer`",
    unchecked=True,
)
def a_step_without_an_optimizer():
    step: Any = sl.train_step(total)
    step(params(), jnp.ones(2))


@refused(
    TypeError, "train_step … got a Linear", "`loss_fn(model, x, y)` … `step(model, opt, x, y)`"
)
def a_model_as_loss():
    sl.train_step(eqx.nn.Linear(2, 2, key=jax.random.key(0)))


@refused(
    TypeError, "A Linear is a model, not a schedule", "`opt = sl.Optimizer(sl.adam(1e-3), model)`"
)
def an_optimizer_of_a_model_as_in_torch():
    sl.adam(eqx.nn.Linear(2, 2, key=jax.random.key(0)), 0.1)


@refused(ValueError, "`nesterov=True`", "`momentum=0.9`")
def nesterov_without_momentum():
    sl.sgd(0.1, nesterov=True)


# --- keywords of other libraries --------------------------------------------------------------


@refused(TypeError, "adam() … 'clipnorm'", "sl.ClipByGlobalNorm(1.0) | tx")
def a_clip_as_in_keras():
    sl.adam(0.1, clipnorm=1.0)  # pyright: ignore[reportCallIssue]


@refused(
    TypeError,
    "sgd() … 'weight_decay'",
    "sl.adamw(learning_rate, weight_decay=0.1), or sl.AddDecayedWeights(0.1) | tx",
)
def a_weight_decay_as_in_torch():
    sl.sgd(0.1, weight_decay=0.1)  # pyright: ignore[reportCallIssue]


# --- chains -----------------------------------------------------------------------------------

CLIPPED = (sl.Clip(1.0), sl.sgd(0.1))


@refused(TypeError, "got (sl.Clip(1.0), sl.ScaleByLearningRate(0.1))", JOIN, unchecked=True)
def a_tuple_as_optimizer():
    bound(CLIPPED)


@refused(
    TypeError,
    "Link 0 … got [sl.Clip(1.0), sl.ScaleByLearningRate(0.1)] of type list",
    JOIN,
    unchecked=True,
)
def a_chain_of_a_list():
    links: Any = [*CLIPPED]
    sl.chain(links)


@refused(
    TypeError,
    "Link 1 … got None of type NoneType",
    "Leave it out, or write `sl.Identity()`",
    unchecked=True,
)
def a_chain_with_nothing():
    nothing: Any = None
    sl.chain(sl.Clip(1.0), nothing)


@refused(
    TypeError,
    "Link 1 … got … of type Optimizer",
    "before you bind them: `sl.Optimizer(tx | other, model)`",
    unchecked=True,
)
def a_chain_with_an_optimizer():
    opt: Any = bound()
    sl.chain(sl.Clip(1.0), opt)


# --- attributes -------------------------------------------------------------------------------


def missing(name: str) -> str:
    return f"'Chain' object has no attribute '{name}'."


@refused(AttributeError, "'Chain' object … 'every'", "tx.every_k(k)")
def a_method_named_every():
    sl.adam(0.1).every(4)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, "'Chain' object … 'accumulate'", "tx.every_k(k)")
def a_method_named_accumulate():
    sl.adam(0.1).accumulate(4)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, "'Chain' object … 'ema'", "tx.average(decay)")
def a_method_named_ema():
    sl.adam(0.1).ema(0.9)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, "'Chain' object … 'clip'", "sl.ClipByGlobalNorm(1.0) | tx")
def a_method_named_clip():
    sl.adam(0.1).clip(1.0)  # pyright: ignore[reportAttributeAccessIssue]


@refused(AttributeError, "'Chain' object … 'averge'", "tx.average(...)")
def a_method_misspelt():
    sl.adam(0.1).averge(0.9)  # pyright: ignore[reportAttributeAccessIssue]


@refused(
    AttributeError, "'Chain' object … 'b1'", "`tx['scale_by_adam'].b1` … `opt.hyperparams[\"b1\"]`"
)
def a_hyperparameter_of_a_chain():
    sl.adam(0.1).b1  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@refused(
    dataclasses.FrozenInstanceError,
    "ScaleByAdam is immutable, so 'b1'",
    "`sl.ScaleByAdam(b1=...)` … `opt = opt.with_hyperparams(b1=...)`",
)
def a_hyperparameter_that_is_set():
    tx: Any = sl.ScaleByAdam()
    tx.b1 = 0.5


@refused(
    AttributeError,
    "'Optimizer' object … 'state_dict'",
    "`sl.checkpoint.save(path, model=model, opt=opt)` … `opt.state`",
)
def a_state_dict():
    bound().state_dict  # noqa: B018


@refused(AttributeError, "'Optimizer' object … 'zero_grad'", "Write nothing")
def gradients_set_to_zero():
    bound().zero_grad()


# --- steps ------------------------------------------------------------------------------------


@refused(TypeError, "`opt.step` … got a scalar, such as a loss", GRADIENTS)
def a_step_with_the_loss():
    bound().step(params(), total(params()))


@refused(TypeError, "`opt.step` … got a function", GRADIENTS)
def a_step_with_the_loss_function():
    bound().step(params(), total)


@refused(TypeError, "mistakes.py, `return float(total(model))`", TRACED)
def a_loss_as_float():
    def loss_fn(model):
        return float(total(model))

    sl.train_step(loss_fn)(params(), bound())


@refused(TypeError, "mistakes.py, `return total(model) if total(model) > 0 else 0.0`", TRACED)
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
    "In step 0 the gradient was not finite at 'w'",
    "a derivative that is infinite … `jnp.sqrt` or `jnp.linalg.norm` at 0, or that overflows",
)
def a_gradient_that_is_nan():
    steps_of(lambda model: jnp.sqrt(jnp.sum(model["w"] ** 2)), sl.sgd(0.1))


@refused(
    FloatingPointError,
    "In step 0 the loss was not finite, the gradient was not finite at 'w'",
    "look at the loss and at this batch",
)
def a_loss_that_is_nan():
    steps_of(lambda model: jnp.sum(model["w"] * jnp.nan), sl.sgd(0.1))


@refused(
    FloatingPointError,
    "In step 1 the parameters were not finite at 'w', the loss was not finite",
    "look at the learning rate and the transforms",
)
def an_update_that_is_nan():
    steps_of(lambda model: 100 * jnp.sum(model["w"]), sl.sgd(1e38))
