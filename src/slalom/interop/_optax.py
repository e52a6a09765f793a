"""The optional dependency, and a look into its transforms: pairs of functions, mostly closures."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..tree.types import captured

if TYPE_CHECKING:
    from optax import (
        GradientTransformation as GradientTransformation,
        GradientTransformationExtraArgs as GradientTransformationExtraArgs,
        MultiSteps as MultiSteps,
    )
else:
    # Types are checked at run time too, also where Optax is missing.
    GradientTransformation = GradientTransformationExtraArgs = MultiSteps = Any

Function = Callable[..., Any]


def import_optax(who: str) -> Any:
    """The module `optax`, for the function `sl.interop.{who}`."""
    try:
        return importlib.import_module("optax")
    except ImportError as error:
        raise ImportError(f"`sl.interop.{who}` needs Optax: pip install optax.") from error


def name_of(update: Function) -> str:
    """A name such as `chain(scale_by_adam, scale)`, from the names of functions."""
    name = _own_name(update).partition(".<locals>")[0].partition(".")[0]
    factory = _cells(update).get("inner_factory")
    if callable(factory):
        return f"{name}({getattr(factory, '__name__', '...')})"
    inner = [name_of(f) for f in _inner(update)]
    if name == "with_extra_args_support" and inner:
        return inner[0]
    return f"{name}({', '.join(inner)})" if inner else name


def required_keywords(update: Function) -> tuple[str, ...]:
    """The extra arguments that this function, or one that it calls, requires."""
    names = [
        parameter.name
        for f in _all(update)
        for parameter in inspect.signature(f).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    return tuple(dict.fromkeys(names))


def injected(update: Function) -> dict[str, float]:
    """The numbers of `optax.inject_hyperparams` that its state holds, with their initial values."""
    if not _own_name(update).startswith("inject_hyperparams."):
        return {}
    # Only the function that initializes the state knows the initial values.
    numbers = _cells(update).get("numeric_hps", {}).items()
    # An int may be a count, such as the length of a history.
    kinds = {k: getattr(getattr(x, "dtype", None), "kind", "") for k, x in numbers}
    return {k: x for k, x in numbers if isinstance(x, float) or kinds[k] == "f"}


def _own_name(function: Function) -> str:
    """The qualified name of a function, or of the class of another callable object."""
    if isinstance(function, functools.partial):
        return _own_name(function.func)
    return getattr(function, "__qualname__", type(function).__qualname__)


def _all(update: Function) -> Iterator[Function]:
    yield update
    for f in _inner(update):
        yield from _all(f)


def _inner(update: Function) -> list[Function]:
    """The update functions that a function refers to."""
    return [f for x in _cells(update).values() for f in _updates_in(x)]


def _updates_in(x: Any) -> Iterator[Function]:
    if isinstance(x, tuple | list | dict):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _updates_in(y)
        return
    is_function = inspect.isfunction(x) or inspect.ismethod(x) or isinstance(x, functools.partial)
    if is_function and {"state", "params"} <= inspect.signature(x).parameters.keys():
        yield x


def _cells(function: Function) -> dict[str, Any]:
    """The variables of a closure, or the attributes that a bound method uses, by name."""
    if isinstance(function, functools.partial):
        bound = dict(enumerate(function.args)) | function.keywords
        return _cells(function.func) | {str(name): x for name, x in bound.items()}
    if inspect.ismethod(function):
        return vars(function.__self__) if hasattr(function.__self__, "__dict__") else {}
    return captured(function)
