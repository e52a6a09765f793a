"""Warnings, errors, and what their texts have in common."""

import linecache
import operator
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

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


def check_int(name: str, value: object, least: int | None = None, or_else: str = "") -> None:
    """Raises an error for anything but an int, and for one below a bound.

    `or_else` says what else is allowed, or what is counted.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        kind = type(value).__name__
        raise TypeError(f"{name} must be an int{or_else}, got {value!r} of type {kind}.")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def as_int(number: Any) -> int:
    """An integer of any kind as an int. Anything else is returned as is, for a check."""
    try:
        return number if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return number


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
