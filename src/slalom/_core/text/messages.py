"""Warnings, errors, and the names of other libraries with the code to write instead."""

import difflib
import functools
import inspect
import linecache
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import numpy as np

NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX raises these where a traced array would need a value."""

PACKAGE = __name__.partition(".")[0]
if TYPE_CHECKING:
    import slalom as library
else:
    library = sys.modules[PACKAGE]
"""The package itself. Its names are there when its functions are called."""

BETWEEN = (PACKAGE, "equinox", "jax", "jaxtyping", "beartype", "contextlib")


def warn(message: str) -> None:
    """Warns at the caller's line: the innermost one outside Slalom and the libraries it uses."""
    level, frame = 1, sys._getframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def where_raised(error: BaseException) -> str:
    """The place of an error: the innermost line outside Slalom and the libraries it uses."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in BETWEEN
    ]
    if not frames:
        return "in a library"
    frame, line = frames[-1]
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    return f"in line {line} of {frame.f_code.co_filename}" + (f", `{text}`" if text else "")


def listed(items: Iterable[str], limit: int) -> str:
    """The first items, and the number of all if there are more."""
    items = list(items)
    more = f", … ({len(items)})" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def series(items: Iterable[str], word: str) -> str:
    """The items as in a sentence, such as `a, b and c` for the word `and`."""
    *most, last = items
    return f"{', '.join(most)} {word} {last}" if most else last


def report(fields: Mapping[str, Iterable[str]], rare: tuple[str, ...] = ()) -> str:
    """A line with the first items of each field. Rare fields are left out if they are empty."""
    shown = {name: items for name, items in fields.items() if items or name not in rare}
    width = max(map(len, shown)) + 1
    lines = (f"{name + ':':<{width}} {listed(x, 4) or '–'}" for name, x in shown.items())
    return "\n".join(lines)


def check_int(name: str, value: object, least: int, or_else: str = "") -> None:
    """Raises an error for anything but an int of at least this size.

    `or_else` says what else is allowed, or what is counted.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        kind = type(value).__name__
        raise TypeError(f"{name} must be an int{or_else}, got {value!r} of type {kind}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def check_bool(name: str, value: object) -> None:
    """Raises an error for anything but a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")


def uncalled(value: Any) -> str:
    """Advice for a recipe or class that was passed uncalled, and for other values that people pass
    as a transform."""
    if type(value).__name__.startswith("GradientTransformation"):
        return (
            " This is a transform of Optax. Slalom has its own, mostly of the same name: write "
            "`sl.adam(1e-3)` instead of `optax.adam(1e-3)`. To use this one, write "
            "`sl.interop.from_optax(tx)`."
        )
    if isinstance(value, tuple | list):
        return " Join transforms with `|`, or write `sl.chain(*transforms)`."
    if value is None:
        return " Leave it out, or write `sl.Identity()`."
    if type(value).__name__ == "Optimizer":
        return " Join transforms before you bind them: `sl.Optimizer(tx | other, model)`."
    return f" Call it first: `{value.__name__}(...)`." if hasattr(value, "__name__") else ""


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
