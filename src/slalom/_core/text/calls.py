"""Calls of the functions that users pass, and calls that users make: checks of the arguments, and
the names of other libraries with the code to write instead."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from ...tree.types import is_function
from .messages import BETWEEN, series


def signature_of(function: Any, *, named: bool = False) -> inspect.Signature | None:
    """The arguments that a call of a function takes; `None` if they are not known.

    `named` says whether a decorator that takes any arguments is trusted to pass them on.
    """
    function = called_with_the_same(function)
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # written in C
        return None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if named and inspect.Parameter.VAR_POSITIONAL in kinds and hasattr(function, "__wrapped__"):
        return signature_of(function.__wrapped__, named=True)
    return signature


def called_with_the_same(function: Any) -> Any:
    """The innermost function that is called with the arguments of this one.

    A decorator that takes other arguments than its function may keep the name and the text of it,
    by `functools.wraps`. Those of JAX take the same ones.
    """
    while hasattr(function, "__wrapped__") and _takes_the_same(function):
        function = function.__wrapped__
    return function


def _takes_the_same(function: Any) -> bool:
    if isinstance(function, types.MethodType):
        return False
    called = function if isinstance(function, types.FunctionType) else type(function).__call__
    if not isinstance(called, types.FunctionType):
        return True  # written in C, such as `jax.jit`
    return called.__globals__["__name__"].partition(".")[0] in BETWEEN


def check_function(name: str, value: object, *arguments: str) -> None:
    """Raises an error for anything but a function, whose arguments may be named."""
    if not is_function(value):
        of = f" of ({', '.join(arguments)})" if arguments else ""
        kind = type(value).__name__
        raise TypeError(f"{name} must be a function{of}, got {value!r} of type {kind}.")


def check_takes(what: str, function: Callable[..., Any], *names: str, **keywords: object) -> None:
    """Raises an error for a function that cannot be called with arguments of these names."""
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*names, **keywords)
    except TypeError:
        arguments = ", ".join((*names, *keywords))
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{what} is called with ({arguments}), but {name} takes {signature}. Write "
            f"`lambda {arguments}: ...`."
        ) from None


def call(what: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls a function of the user, by position. The names are for the error if it takes others."""
    try:
        return function(*arguments.values())
    except TypeError:
        check_takes(what, function, *arguments)
        raise


# --- arguments by other names ---------------------------------------------------------------

_Advised = TypeVar("_Advised", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


_RENAMED = {
    "accumulator_dtype": "mu_dtype",
    "alpha": "decay",
    "beta1 beta_1 beta": "b1",
    "beta2 beta_2": "b2",
    "betas": "b1 b2",
    "decay_offset": "step_offset",
    "dtype_momentum mu_dtype": "accumulator_dtype",
    "epsilon": "eps",
    "every_k_schedule": "k",
    "fun": "loss_fn",
    "lr step_size": "learning_rate",
    "mask weight_decay_mask": "decay_where",
    "maxfev maxiter max_iter max_nfev": "max_steps",
    "method optimizer": "tx",
    "momentum": "trace.decay",
    "projection": "fn",
    "seed": "key",
    "should_skip_update_fn": "skip",
    "should_transform_fn": "condition",
    "trust_ratio_mask": "trust_ratio_where",
    "use_grad_mean": "mean",
    "wd": "weight_decay",
    "weight_dimension_numbers muon_weight_dimension_numbers": "layout",
    "x0": "model",
}
"""Argument names from Optax and PyTorch, and their names here."""

_ELSEWHERE = {
    "accumulate every multi_steps MultiSteps": "`tx.every_k(k)`",
    "accumulator_dtype": '`tx.store("bfloat16", min_size=1)`',
    "add_param_group": "`sl.partition(transforms, labels)`, and `opt.rebind(model, tx=tx)`",
    "amsgrad": "`sl.amsgrad(learning_rate)`",
    "apply": "`opt.step(model, grads)`, or `tx.update(grads, state, params)`",
    "apply_gradients": "`model, opt = opt.step(model, grads)`",
    "apply_if_finite skip_nan": "`tx.if_finite(n)`",
    "apply_updates": "`sl.apply_updates(model, updates)`",
    "AveragedModel polyak swa SWALR": "`tx.average()`",
    "backward": "`step = sl.train_step(loss_fn)`, which differentiates the loss",
    "bias": '`sl.where.path("**.bias")`',
    "chain then": "`tx | other`",
    "clip clip_by_global_norm clip_grad_norm clip_grad_norm_ clipnorm global_clipnorm": (
        "`sl.ClipByGlobalNorm(1.0) | tx`"
    ),
    "clip_grad_value_ clipvalue": "`sl.Clip(1.0) | tx`",
    "compile": "`step = sl.train_step(loss_fn)`, which is compiled",
    "conditionally_mask": '`tx.when(condition, otherwise="zero")`',
    "conditionally_transform": "`tx.when(condition)`",
    "cosine CosineDecay": "`sl.schedules.cosine_decay(init_value, decay_steps)`",
    "CosineAnnealingLR schedule": "`sl.adam(sl.schedules.cosine_decay(1e-3, steps))`",
    "CosineAnnealingWarmRestarts": "`sl.schedules.sgdr(cycles)`",
    "ema ema_momentum params_ema use_ema with_ema": "`tx.average(decay)`",
    "ExponentialLR": "`sl.schedules.exponential_decay(1e-3, 1, gamma)`",
    "fit minimize train": (
        "`step = sl.train_step(loss_fn)` and `model, opt, loss = step(model, opt, x, y)`"
    ),
    "freeze": "`sl.Optimizer(tx, model, trainable=~where)`",
    "grad": "`eqx.filter_grad(loss_fn)`, or `step = sl.train_step(loss_fn)`",
    "GradientTransformation GradientTransformationExtraArgs": "`sl.AbstractTransform`",
    "GradScaler": "`tx.scale_loss()`",
    "init": "`opt = sl.Optimizer(tx, model)`, which has initialized the state",
    "inject_hyperparams": "`sl.adam(lr)`; `opt.hyperparams` reads, `opt.with_hyperparams` changes",
    "inject_stateful_hyperparams": '`tx.drive({"learning_rate": schedule})`',
    "join_schedules SequentialLR": "`sl.schedules.join(...)`",
    "LambdaLR": "`sl.adam(lambda step: ...)`",
    "LinearLR": "`sl.schedules.linear(init_value, end_value, transition_steps)`",
    "load_state_dict": '`sl.checkpoint.load(path, model=model, opt=opt)["opt"]`',
    "lr_finder": "`sl.lr_range_test(loss_fn, tx, model, batches)`",
    "masked": "`tx.mask(where)`, or `tx.only(where)`",
    "maximize": "`tx.maximize()`",
    "microbatch microbatching": "`sl.train_step(loss_fn, microbatches=m)`",
    "mu_dtype": '`tx.store({"mu": "bfloat16"}, min_size=1)`',
    "multi_transform": "`sl.partition(transforms, labels)`",
    "MultiStepLR": "`sl.schedules.piecewise_constant(1e-3, {30_000: 0.1, 60_000: 0.1})`",
    "nu_dtype": '`tx.store({"nu": "bfloat16"}, min_size=1)`',
    "OneCycleLR": "`sl.schedules.cosine_onecycle(steps, peak_value)`",
    "opt_state": "`opt.state`",
    "optim": "`sl.adam(1e-3)`: the recipes are names of the package itself",
    "param_groups": "`opt.describe(model)` to see the groups, and `opt.with_hyperparams(...)`",
    "polyak_averaging": "`tx.average()`, or `sl.incremental_update(new, old, step_size)`",
    "PolynomialLR": "`sl.schedules.polynomial(init_value, end_value, power, transition_steps)`",
    "reduce_on_plateau": '`tx.drive({"learning_rate": sl.schedules.ReduceOnPlateau(...)})`',
    "restore": "`sl.checkpoint.load(path, model=model, opt=opt)`",
    "safe_increment safe_int32_increment": "`sl.tree.increment`",
    "ScalarOrSchedule": "`sl.Hyperparameter`",
    "selective_transform": "`tx.only(where)`",
    "skip_large_updates": "`tx.every_k(k, skip=sl.SkipLargeUpdates(c))`",
    "skip_not_finite": "`tx.every_k(k, skip=sl.SkipNotFinite())`",
    "split_real_and_imaginary": "`tx.split_complex()`",
    "state_dict": (
        "`sl.checkpoint.save(path, model=model, opt=opt)` to save a run, or `opt.state` to "
        "look at the state"
    ),
    "stateless_with_tree_map": "`sl.StatelessPerLeaf(fn)`",
    "StepLR": "`sl.schedules.exponential_decay(1e-3, step_size, gamma, staircase=True)`",
    "tree_map_params": "`sl.map_params(fn, state, params)`",
    "tree_utils": "`sl.tree`",
    "value_and_grad": "`step = sl.train_step(loss_fn)`, or `eqx.filter_value_and_grad(loss_fn)`",
    "value_and_grad_from_state": "`sl.train_step(loss_fn, reuse_linesearch=True)`",
    "weight_decay": (
        "`sl.adamw(learning_rate, weight_decay=0.1)`, or `sl.AddDecayedWeights(0.1) | tx`"
    ),
    "with_hyperparams": (
        "`opt = sl.Optimizer(tx, model)`, and `opt = opt.with_hyperparams(learning_rate=1e-4)`"
    ),
    "zero_grad": "nothing: JAX does not accumulate gradients",
}
"""Functions, methods and keywords of Optax, PyTorch and Keras, or that people expect, and the code
to write instead."""

_OPTIONS_OF_RULES = frozenset(["accumulator_dtype", "maximize", "mu_dtype", "nu_dtype"])
"""Keywords in this table that rules may be given too."""


def _entry(table: Mapping[str, str], name: str) -> str:
    """The text for a name, in a table in which names that share one are in one entry."""
    return next((text for names, text in table.items() if name in names.split()), "")


def renamed(name: str, arguments: Iterable[str]) -> str:
    """Advice that names the known arguments with another name elsewhere, if any."""
    ours = _entry(_RENAMED, name).split()
    return f" Write {' and '.join(ours)}." if ours and set(ours) <= set(arguments) else ""


def elsewhere(name: str) -> str:
    """Advice for a name of another library, if it is one."""
    code = _entry(_ELSEWHERE, name)
    return f" Write {code}." if code else ""


def similar(name: str, code_of: Mapping[str, str], cutoff: float = 0.7) -> str:
    """Suggests the code of the most similar names, if any are similar enough."""
    close = difflib.get_close_matches(name, code_of, n=2, cutoff=cutoff)
    return f" Did you mean {' or '.join(code_of[n] for n in close)}?" if close else ""


def keyword_advice(keyword: str, keywords: Iterable[str]) -> str:
    """Advice for an unknown keyword."""
    names = {name: name for name in keywords if name != "self"}
    # The other names in the table are names of functions, and keywords of optimizers only.
    is_option = "learning_rate" in names or keyword in _OPTIONS_OF_RULES
    return (
        renamed(keyword, names)
        or (elsewhere(keyword) if is_option else "")
        or similar(keyword, names)
        or (f" It takes {', '.join(names)}." if names else " It takes none.")
    )


def check_keywords(function: Callable[..., Any], name: str, keywords: Iterable[str]) -> None:
    """Raises a `TypeError` with advice if a function does not take one of the keywords."""
    names = _keywords(function)
    if names is None or names.issuperset(keywords):
        return
    unknown = next(keyword for keyword in keywords if keyword not in names)
    parameters = [*inspect.signature(function).parameters]
    if unknown in parameters:  # it is `*args`
        before = ", ".join(parameters[: parameters.index(unknown)])
        advice = f" Write `{name}({before}, *{unknown}, ...)`."
    else:
        advice = keyword_advice(unknown, (x for x in parameters if x in names))
    raise TypeError(f"{name}() got an unexpected keyword '{unknown}'.{advice}")


@functools.cache
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords that a function takes; `None` if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL)


def advise_positions(advice: str, name: str | None = None) -> Callable[[_Advised], _Advised]:
    """A decorator that refuses missing arguments, and too many by position, with advice.

    Unknown keywords are refused as by `advise_keywords`. The signature stays the same. `name` is
    the function's name if users call it by another one.
    """

    def decorate(function: _Advised) -> _Advised:
        parameters = inspect.signature(function).parameters
        named = name or function.__name__
        kinds = [p.kind for p in parameters.values()]
        most = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        unlimited = inspect.Parameter.VAR_POSITIONAL in kinds
        required = [
            p
            for p in parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        # Methods are called with `self`, which nobody writes.
        is_method = "self" in parameters

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> Any:
            if kwargs:
                check_keywords(function, named, kwargs)
            if len(args) > most and not unlimited:
                raise TypeError(
                    f"{named}() takes {most - is_method} argument{'s' * (most - is_method > 1)} by "
                    f"position, got {len(args) - is_method}. {advice}"
                )
            absent = [
                f"'{p.name}'"
                for p in required[min(len(args), most) :]
                if p.kind is p.POSITIONAL_ONLY or p.name not in kwargs
            ]
            if absent:
                raise TypeError(f"{named}() is missing {series(absent, 'and')}. {advice}")
            return function(*args, **kwargs)

        return cast(_Advised, call)

    return decorate


def advise_keywords(function: _Advised) -> _Advised:
    """A decorator for `check_keywords`. The signature stays the same."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        if kwargs:
            check_keywords(function, function.__name__, kwargs)
        return function(*args, **kwargs)

    return cast(_Advised, call)


def advise_methods(cls: _Class) -> _Class:
    """A decorator for a class whose methods all refuse unknown keywords with advice."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and name[0] != "_":
            setattr(cls, name, advise_keywords(method))
    return cls
