"""Helpers of warnings and error messages."""

import linecache
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

import jax

NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX raises these where a traced array would need a value."""

PACKAGE = __name__.partition(".")[0]
_BETWEEN = (PACKAGE, "equinox", "jax", "jaxtyping", "beartype", "contextlib")


def warn(message: str) -> None:
    """Warns at the caller's line: the innermost one outside Slalom and the libraries it uses."""
    level, frame = 1, sys._getframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def place(error: BaseException) -> str:
    """The place of an error: the innermost line outside Slalom and the libraries it uses."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _BETWEEN
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


def uncalled(given: Any) -> str:
    """Advice for a recipe or class that was passed uncalled, and for other values that people pass
    as a transform."""
    if type(given).__name__.startswith("GradientTransformation"):
        return (
            " This is a transform of Optax. Slalom has its own, mostly of the same name: write "
            "`sl.adam(1e-3)` instead of `optax.adam(1e-3)`. To use this one, write "
            "`sl.interop.from_optax(tx)`."
        )
    if isinstance(given, tuple | list):
        return " Join transforms with `|`, or write `sl.chain(*transforms)`."
    if given is None:
        return " Leave it out, or write `sl.Identity()`."
    if type(given).__name__ == "Optimizer":
        return " Join transforms before you bind them: `sl.Optimizer(tx | other, model)`."
    return f" Call it first: `{given.__name__}(...)`." if hasattr(given, "__name__") else ""
