"""Modules whose fields are declared: checked when made, printed as the code that makes them."""

import contextlib
import dataclasses
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._types import Params, Tracer

_PACKAGE = __name__.partition(".")[0]
_BETWEEN = (_PACKAGE, "equinox", "jax", "jaxtyping", "beartype", "contextlib")

LINE = 92
"""What prints longer than this is printed over several lines."""

CHECK = "slalom.check"
"""Where a field's metadata keeps its check, a function of a name and a value."""


class Part(NamedTuple):
    """One thing inside another: where it stands, and what it sees there."""

    path: tuple[str, ...]
    module: Any
    """A transform, a skip condition or a stateful schedule."""
    state: Any
    context: Any
    """The `Context` that it sees, with its own clock."""
    params: Params | None
    """The parameters that it acts on."""
    get: Callable[[Any], Any]
    """From the outer module to this one, for `eqx.tree_at`."""
    group: tuple[str, ...] = ()
    """The labels of the partition groups around it."""

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    def run(self, write: Any, updates: Any) -> tuple[Any, Any]:
        """Runs this transform, under its name in profiles: what `write` makes of its updates, and
        its new state."""
        with jax.named_scope("/".join(self.path)) if self.path else contextlib.nullcontext():
            return self.module.run(write, updates, self.state, self.params, self.context)


class AbstractDeclared(eqx.Module):
    """The base of transforms, skip conditions and schedules: their fields and parts are declared."""

    def children(
        self, state: Any = None, context: Any = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        """What this holds that has hyperparameters, state or a clock of its own.

        Everything that inspects or edits a composition goes through this method: hyperparameters,
        `state_of`, `describe`, `reset`, `rebind`. A part that is not returned here does not exist
        for them.

        **Arguments:**

        - `state`, `context`, `params`: those of this module, where they are known.

        **Returns:** the direct parts by name, each with its own state, context and parameters.
        """
        del state, context, params
        return ()

    def __check_init__(self):
        for field in dataclasses.fields(self):
            check = field.metadata.get(CHECK)
            value = getattr(self, field.name)
            optional = field.default is None and value is None
            if check is not None and not optional:
                check(f"{type(self).__name__}.{field.name}", value)
            flag = field.type is bool and field.metadata.get("static", False)
            if flag and not isinstance(value, bool | np.bool_):
                raise TypeError(
                    f"{type(self).__name__}.{field.name} must be True or False, got {value!r}."
                )

    def __repr__(self) -> str:
        return call(self)


def warn(message: str) -> None:
    """Warns at the line that led here, outside of Slalom and of what calls it in between."""
    level, frame = 1, sys._getframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def uncalled(given: Any) -> str:
    """The advice for a recipe or class that stands where what it returns should."""
    return f" Call it first: `{given.__name__}(...)`." if hasattr(given, "__name__") else ""


def shortest(value: Any) -> str:
    """A number in the fewest digits that name it in its own precision."""
    if isinstance(value, Tracer):
        return f"<traced {value.dtype}>"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "<donated>"
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape != ():
            return f"<{value.dtype}{list(value.shape)}>"
        value = np.asarray(value)[()]
        if value.dtype.type not in (np.float32, np.float64):
            return str(value)  # integers, and ml_dtypes, which print their own shortest form
        return repr(float(np.format_float_scientific(value)))
    return repr(value)


def code(value: Any) -> str:
    """A declared module or plain value as the code that makes it."""
    if isinstance(value, np.dtype):
        return repr(value.name)
    if isinstance(value, float | jax.Array | np.ndarray | np.generic):
        return shortest(value)
    if isinstance(value, types.FunctionType):
        ours = value.__module__.startswith(f"{_PACKAGE}.tree.")
        return f"{'sl.tree.' * ours}{value.__name__}"
    if isinstance(value, list):
        return f"[{', '.join(map(code, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(code, value))}{',' * (len(value) == 1)})"
    return repr(value)


def call(module: Any) -> str:
    """`Name(field=…)` with the fields that are not at their defaults.

    The name of a required field is left out where it is the only one.
    """
    fields = dataclasses.fields(module)
    required = [f for f in fields if f.default is dataclasses.MISSING]
    arguments = []
    for field in fields:
        text = code(getattr(module, field.name))
        if field.default is not dataclasses.MISSING and text == code(_default(field)):
            continue
        alone = len(required) == 1 and field is required[0]
        arguments.append(text if alone else f"{field.name}={text}")
    name = f"{_prefix(type(module))}{type(module).__name__}"
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= LINE or len(arguments) == 1:
        return line
    inside = indented(",\n".join(arguments))
    return f"{name}(\n    {inside},\n)"


def indented(text: str) -> str:
    """Code whose lines after the first stand one level further in."""
    return text.replace("\n", "\n    ")


def _prefix(cls: type) -> str:
    """How the library's own names are reached; a user's own classes are called by name."""
    package, _, rest = cls.__module__.partition(".")
    if package != _PACKAGE:
        return ""
    return "sl.schedules." if rest.partition(".")[0] == "schedules" else "sl."


def _default(field: dataclasses.Field[Any]) -> Any:
    converter = field.metadata.get("converter")
    return field.default if converter is None else converter(field.default)


def operand(module: Any) -> str:
    """The code of a transform, fit to stand left of a method call."""
    text = repr(module)
    return f"({text})" if " | " in text and text[0] != "(" else text
