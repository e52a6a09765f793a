"""Calls of the functions that users pass, and checks of their arguments."""

import inspect
import types
from collections.abc import Callable
from typing import Any

from ...tree.types import is_function
from .messages import BETWEEN


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
