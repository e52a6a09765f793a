"""What people write who come from another library, or in a hurry."""

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import slalom as sl

from .messages import bound, params, refused, total

BIND = (
    "`opt = sl.Optimizer(tx, model)` … `model, opt = opt.step(model, grads)` … `updates, "
    "state = tx.update(grads, state, params)`"
)
CREATES = "`sl.Optimizer(tx, model)`. It creates the state"
HAND = "`model, opt = opt.step(model, grads)` … `value=loss`"
JOIN = "`|`, or write `sl.chain(*transforms)`"
GRADIENTS = "`grads = eqx.filter_grad(loss_fn)(model, x, y)` … `sl.train_step(loss_fn)`"
TRACED = (
    "`float(x)` or `x.item()`, return the array along with the loss, with `has_aux=True` … "
    "`if x > 0`, write `jnp.where(x > 0, a, b)` … those of `jax.numpy` … `jax.debug.print`"
)


def test_calls():
    with refused(TypeError, "Chain is a transform", BIND):
        sl.adam(0.1)(params())
    with refused(TypeError, "ScaleByAdam is a transform", BIND):
        sl.ScaleByAdam()()
    with refused(
        TypeError,
        "An optimizer is not a function",
        "`model, opt = opt.step(model, grads)` … `step = sl.train_step(loss_fn)` … `model, opt, "
        "loss = step(model, opt, x, y)`",
    ):
        bound()(params(), params())
    with refused(TypeError, "a loss function, got sl.Clip(1.0)", "`step = sl.train_step("):
        sl.train_step(sl.Clip(1.0))
    with refused(
        TypeError,
        "ScaleByLearningRate.learning_rate … got sl.Clip(1.0) of type Clip",
        "a real number, a 0-d array or a schedule",
    ):
        sl.sgd(sl.Clip(1.0))
    with refused(TypeError, "Optimizer() … missing 'model'", CREATES):
        sl.Optimizer(sl.adam(0.1))
    with refused(TypeError, "An optimizer is bound to a model", CREATES):
        sl.Optimizer(sl.adam(0.1), None)
    with refused(
        TypeError,
        "train_step() … got 2",
        "`step = sl.train_step(loss_fn)` … `model, opt, loss = step(model, opt, x, y)`",
    ):
        sl.train_step(params(), bound())
    with refused(TypeError, "save() … got 3", "`sl.checkpoint.save(path, model=model, opt=opt)`"):
        sl.checkpoint.save("run", params(), bound())
    with refused(TypeError, "load() … got 3", "`sl.checkpoint.load(path, model=model, opt=opt)`"):
        sl.checkpoint.load("run", params(), bound())
    for method in ("update", "step"):
        with refused(TypeError, f"{method}() … got 3", HAND):
            getattr(bound(), method)(params(), bound().state, params())
    for own, made, n in [("step", "params", 2), ("step", "params", 1), ("update", "updates", 1)]:
        with refused(
            TypeError,
            "A transform does not hold its state",
            f"`{made}, state = tx.{own}(grads, state, params)` … `model, opt = ",
        ):
            getattr(sl.adam(0.1), own)(*[params()] * n)
    with refused(
        TypeError,
        "`tx.update` got the keyword 'value'",
        "`tx.update(grads, state, params, sl.Context(value=...))`",
    ):
        tx = sl.polyak_sgd()
        tx.update(params(), tx.init(params()), params(), value=1.0)
    with refused(
        TypeError,
        "`tx.update` got 3 as the context",
        "`tx.update(grads, state, params, sl.Context(step=...))`",
    ):
        sl.ScaleByAdam().update(params(), None, params(), 3)
    with refused(
        TypeError,
        "The state of this chain is a tuple of 2, which `init` or the last `update` … of type dict",
        "`tx.update(grads, state, params)`",
    ):
        tx = sl.adam(0.1)
        tx.update(params(), params(), tx.init(params()))


def test_calls_of_steps():
    model = params()
    step = sl.train_step(lambda model, x, y: total(model) + x + y)
    tx, method, minimize = sl.lbfgs(), sl.KeepBest.update, partial(sl.minimize, max_steps=10)
    for call, culprit, remedy in [
        (lambda: step(model, bound(), (1.0, 2.0)), "argument: 'y'", "`step(model, opt, *batch)`"),
        (lambda: step(model, bound(), 1.0), "argument: 'y'", "`step(model, opt, x, y)`"),
        (
            lambda: step(model, bound(), 1.0, 2.0, weight=3),
            "argument 'weight'",
            "`context={'weight': weight}`",
        ),
        (lambda: step(model, bound(), 1.0, 2.0, value=3), "argument 'value'", "leave `value` out"),
        (lambda: minimize(jnp.dot, tx, model), "'b'", "`sl.minimize(loss_fn, tx, model, b"),
        (lambda: minimize(method, tx, model, 1.0), "'value'", "`self.loss_fn` to `sl.minimize`"),
        (lambda: sl.train_step(method)(model, bound(), 1.0), "'value'", "to `sl.train_step`"),
    ]:
        with refused(TypeError, f"The loss does not take these arguments … {culprit}", remedy):
            call()

    call_step = "`model, opt, loss = step(model, opt, x, y)`"
    with refused(TypeError, "step() is missing 'model' and 'opt'", call_step):
        step(model=model, opt=bound(), x=1.0, y=2.0)
    with refused(TypeError, "step() is missing 'grads'", HAND):
        bound().step(params())
    for name in ("eval_params", "describe", "reset"):
        with refused(TypeError, f"{name}() is missing 'model'", f"`opt.{name}(model)`"):
            getattr(bound(), name)()
    with refused(TypeError, "plot_schedules() is missing 'steps'", "`opt.plot_schedules(1000)`"):
        bound().plot_schedules()
    with refused(TypeError, "shard_state() is missing 'mesh'", "`opt, report = opt.shard_state(m"):
        bound().shard_state()
    with refused(
        TypeError,
        "sweep() is missing 'model', 'batches', 'grid' and 'steps'",
        "`sl.sweep(loss_fn, tx, model, batches, grid",
    ):
        sl.sweep(step, {"learning_rate": [0.1]})
    with refused(
        TypeError, "Got sl.train_step(<lambda>)", "the function that `sl.train_step` was called"
    ):
        sl.train_step(step)
    rebound = "`opt, report = opt.rebind(model)`"
    with refused(AttributeError, "a pair, which has no attribute 'step'", rebound):
        bound().rebind(model).step(model, model)
    with refused(TypeError, "got Rebound in its place", rebound):
        step(model, bound().rebind(model))
    with refused(
        TypeError, "got str in its place", '`model, opt = loaded["model"], loaded["opt"]`'
    ):
        step("model", "opt")


def test_calls_of_functions():
    with refused(TypeError, "partition() is missing 'labels'", "`other.partition({where: tx})`"):
        sl.partition({sl.where.path("w"): sl.sgd(0.1)})
    with refused(TypeError, "missing 'model' and 'max_steps'", "`found = sl.minimize(loss"):
        sl.minimize(total, sl.lbfgs())
    with refused(TypeError, "second argument … of type dict", "`sl.minimize(loss_fn, tx, model, "):
        sl.minimize(total, params(), sl.lbfgs(), max_steps=10)
    with refused(TypeError, "minimize() … 'args'", "`minimize(loss_fn, tx, model, *args, ...)`"):
        sl.minimize(total, sl.lbfgs(), params(), args=(1.0,), max_steps=10)
    with refused(TypeError, "rebind() … got 2", "`opt, report = opt.rebind(model, tx=tx)`"):
        bound().rebind(params(), sl.sgd(0.1))
    with refused(
        TypeError,
        "The model and the optimizer are swapped",
        "`model, opt, loss = step(model, opt, ...)`",
    ):
        sl.train_step(total)(bound(), params())
    with refused(
        TypeError, "`sl.Optimizer`, got Chain in its place", "`opt = sl.Optimizer(tx, model)`"
    ):
        sl.train_step(total)(params(), sl.adam(0.1))
    with refused(TypeError, "got an array in its place", "`opt = sl.Optimizer(tx, model)`"):
        sl.train_step(total)(params(), jnp.ones(2))
    with refused(
        TypeError, "train_step … got a Linear", "`loss_fn(model, x, y)` … `step(model, opt, x, y)`"
    ):
        sl.train_step(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    with refused(
        TypeError,
        "A Linear is a model, not a schedule",
        "`opt = sl.Optimizer(sl.adam(1e-3), model)`",
    ):
        sl.adam(eqx.nn.Linear(2, 2, key=jax.random.key(0)), 0.1)
    with refused(ValueError, "`nesterov=True`", "`momentum=0.9`"):
        sl.sgd(0.1, nesterov=True)


def test_keywords_operators_and_links():
    with refused(
        TypeError,
        "sgd() … 'weight_decay'",
        "`sl.adamw(learning_rate, weight_decay=0.1)`, or `sl.AddDecayedWeights(0.1) | tx`",
    ):
        sl.sgd(0.1, weight_decay=0.1)

    with refused(TypeError, "got (sl.Clip(1.0), sl.ScaleByLearningRate(0.1))", JOIN):
        bound(CLIPPED)
    with refused(
        TypeError, "Link 0 … got [sl.Clip(1.0), sl.ScaleByLearningRate(0.1)] of type list", JOIN
    ):
        sl.chain([*CLIPPED])
    with refused(
        TypeError, "Link 1 … got None of type NoneType", "Leave it out, or write `sl.Identity()`"
    ):
        sl.chain(sl.Clip(1.0), None)
    with refused(
        TypeError,
        "Link 1 … got … of type Optimizer",
        "before you bind them: `sl.Optimizer(tx | other, model)`",
    ):
        sl.chain(sl.Clip(1.0), bound())

    with refused(TypeError, "Transforms are not added", "`|`: `sl.Clip(1.0) | tx`"):
        sl.Clip(1.0) + sl.adam(0.1)
    with refused(TypeError, "Transforms are not multiplied", "`tx | sl.Scale(0.5)`"):
        0.5 * sl.adam(0.1)
    with refused(TypeError, "Transforms are not negated", "`tx.maximize()`"):
        -sl.adam(0.1)


OTHERS = [
    (sl, "clip_by_global_norm", "sl.ClipByGlobalNorm"),
    (sl, "cosine_decay_schedule", "sl.schedules.cosine_decay"),
    (sl, "huber_loss", "`optax.huber_loss`"),
    (sl, "losses", "`optax.losses`"),
    (sl, "polyak_averaging", "`tx.average()`, or `sl.incremental_update(new, old, step_size)`"),
    (sl, "apply_every", "sl.ApplyEvery"),
    (sl, "skip_not_finite", "tx.every_k(k, skip=sl.SkipNotFinite())"),
    (sl, "train", "step = sl.train_step(loss_fn)"),
    (sl, "value_and_grad", "eqx.filter_value_and_grad(loss_fn)"),
    (sl, "MultiSteps", "tx.every_k(k)"),
    (sl, "from_optax", "sl.interop.from_optax"),
    (sl, "UPGrad", "sl.combine.UPGrad"),
    (sl, "metrics", "opt.metrics"),
    (sl, "clip_grad_norm_", "sl.ClipByGlobalNorm(1.0) | tx"),
    (sl.projections, "projection_simplex", "sl.projections.simplex"),
    (sl.schedules, "CosineAnnealingLR", "sl.adam(sl.schedules.cosine_decay(1e-3, steps))"),
    (sl.checkpoint, "restore", "sl.checkpoint.load(path, model=model, opt=opt)"),
    (sl.where, "name", "dtype … ndim … path … regex … type"),
]
"""Names of other libraries, or of what a user expects, and ours."""


def test_names_and_keywords_of_other_libraries():
    for module, name, ours in OTHERS:
        with refused(AttributeError, f"module '{module.__name__}' … '{name}'", ours):
            getattr(module, name)
    with refused(
        AttributeError, "module 'slalom' has no attribute 'amos'", obvious="no name is close"
    ):
        sl.amos  # noqa: B018

    others = [
        (sl.adam, "lr", "learning_rate"),
        (sl.adam, "betas", "b1 and b2"),
        (sl.adamw, "mask", "decay_where"),
        (sl.sgd, "momentun", "momentum"),
        (sl.sgd, "maximize", "Write `tx.maximize()`"),
        (sl.sgd, "mu_dtype", "Write accumulator_dtype"),
        (sl.ScaleByAdam, "nu_dtype", 'Write `tx.store({"nu": "bfloat16"}, min_size=1)`'),
        (sl.contrib.acprop, "mu_dtype", 'Write `tx.store({"mu": "bfloat16"}, min_size=1)`'),
        (sl.adagrad, "accumulator_dtype", 'Write `tx.store("bfloat16", min_size=1)`'),
        (sl.adam(1e-3).every_k, "use_grad_mean", "Write mean"),
        (sl.ScaleByAdam, "beta1", "b1"),
        (sl.train_step, "optimizer", "It takes loss_fn, has_aux"),
        (sl.minimize, "steps", "max_steps"),
        (sl.minimize, "method", "Write tx."),
        (sl.minimize, "maxiter", "Write max_steps."),
        (sl.minimize, "x0", "Write model."),
        (sl.muon, "muon_weight_dimension_numbers", "Write layout"),
        (sl.adam, "clipnorm", "sl.ClipByGlobalNorm(1.0) | tx"),
        (sl.Optimizer, "lr", "transform, model, trainable, hyperparam_dtype"),
        (sl.schedules.linear, "slope", "init_value, end_value, transition_steps, transition_begin"),
    ]
    for function, keyword, ours in others:
        with refused(TypeError, f"{function.__name__}() … '{keyword}'", ours):
            function(**{keyword: 0.9})


CLIPPED = (sl.Clip(1.0), sl.sgd(0.1))


def test_attributes():
    with refused(
        AttributeError,
        "'Optimizer' object … 'learning_rate'",
        'transform, state, count, … `opt.hyperparams["learning_rate"]` … `opt = '
        "opt.with_hyperparams(learning_rate=1e-4)` … does not hold the model",
    ):
        bound().learning_rate  # noqa: B018
    with refused(
        AttributeError,
        "DynamicJaxprTracer has no attribute foo",
        obvious="the error is the schedule's own",
    ):
        bound(sl.sgd(lambda n: n.foo)).hyperparams["learning_rate"]
    with refused(
        AttributeError, "'Readings' object … 'learning_rate'", '`opt.hyperparams["learning_rate"]`'
    ):
        bound().hyperparams.learning_rate  # noqa: B018
    others = {
        "with_hyperparams": "opt = opt.with_hyperparams(l",
        "every": "tx.every_k(k)",
        "accumulate": "tx.every_k(k)",
        "ema": "tx.average(decay)",
        "clip": "sl.ClipByGlobalNorm(1.0) | tx",
        "averge": "tx.average(...)",
    }
    for name, ours in others.items():
        with refused(AttributeError, f"'Chain' object … '{name}'", ours):
            getattr(sl.adam(0.1), name)
    with refused(
        AttributeError,
        "'Chain' object … 'b1'",
        "`tx['scale_by_adam'].b1` … `opt.hyperparams[\"b1\"]`",
    ):
        sl.adam(0.1).b1  # noqa: B018
    with refused(
        dataclasses.FrozenInstanceError,
        "ScaleByAdam is immutable, so 'b1'",
        "`sl.ScaleByAdam(b1=...)` … `opt = opt.with_hyperparams(b1=...)`",
    ):
        sl.ScaleByAdam().b1 = 0.5
    with refused(
        AttributeError,
        "'Optimizer' object … 'state_dict'",
        "`sl.checkpoint.save(path, model=model, opt=opt)` … `opt.state`",
    ):
        bound().state_dict  # noqa: B018
    with refused(AttributeError, "'Optimizer' object … 'zero_grad'", "Write nothing"):
        bound().zero_grad()


def steps_of(loss_fn: Any, tx: Any) -> None:
    model = {"w": jnp.zeros(2)}
    opt = sl.Optimizer(sl.CheckFinite() | tx, model)
    for _ in range(3):
        model, opt, _ = sl.train_step(loss_fn)(model, opt)


def test_steps_and_numbers_that_are_not_finite():
    with refused(TypeError, "`opt.step` … got a scalar, such as a loss", GRADIENTS):
        bound().step(params(), total(params()))
    with refused(TypeError, "`opt.step` … got a function", GRADIENTS):
        bound().step(params(), total)
    with refused(TypeError, "mistakes.py, `return float(total(model))`", TRACED):

        def loss_fn(model):
            return float(total(model))

        sl.train_step(loss_fn)(params(), bound())
    with refused(TypeError, "mistakes.py, `return float(total(model))`", TRACED):
        sl.minimize(loss_fn, sl.lbfgs(), params(), max_steps=10)
    with refused(
        TypeError, "mistakes.py, `return total(model) if total(model) > 0 else 0.0`", TRACED
    ):

        def loss_fn(model):
            return total(model) if total(model) > 0 else 0.0

        sl.train_step(loss_fn)(params(), bound())

    with refused(
        FloatingPointError,
        "In step 0 the gradient was not finite at 'w'",
        "a derivative that is infinite … `jnp.sqrt` or `jnp.linalg.norm` at 0, or that overflows",
    ):
        steps_of(lambda model: jnp.sqrt(jnp.sum(model["w"] ** 2)), sl.sgd(0.1))
    with refused(
        FloatingPointError,
        "In step 0 the loss was not finite, the gradient was not finite at 'w'",
        "look at the loss and at this batch",
    ):
        steps_of(lambda model: jnp.sum(model["w"] * jnp.nan), sl.sgd(0.1))
    with refused(
        FloatingPointError,
        "In step 1 the parameters were not finite at 'w', the loss was not finite",
        "look at the learning rate and the transforms",
    ):
        steps_of(lambda model: 100 * jnp.sum(model["w"]), sl.sgd(1e38))
