"""Prints transforms, schedules and optimizers as the code that makes them.

The layout is done by `wadler_lindig`, which Equinox prints with, so `eqx.tree_pformat` works on any
tree that contains them.
"""

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl

from ...tree.types import Tracer
from .messages import PACKAGE

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

LINE = 92
"""The width of a line. Longer code is broken over several lines."""


class AbstractPrinted(eqx.Module):
    """A module that prints as code, both by `repr` and inside trees that Equinox prints."""

    def _code(self) -> object:
        """The value to print: a `Call`, an `Infix`, `Entries`, or any other value."""
        return constructor_call(self)

    def __repr__(self) -> str:
        return code(self._code())

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        if type(self).__repr__ is not AbstractPrinted.__repr__:
            return wl.TextDoc(repr(self))
        return _doc(self._code(), kwargs)


class StaticFunction(AbstractPrinted):
    """A plain function as a module without leaves. Another function recompiles."""

    function: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *args: object) -> Any:
        return self.function(*args)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def _code(self) -> object:
        return self.function


def as_module(function: Any) -> Any:
    """A plain function as a module. A function that is a tree, such as a module, stays as it is."""
    is_plain = callable(function) and not isinstance(function, type)
    plain = is_plain and jax.tree_util.all_leaves([function])
    return StaticFunction(function) if plain else function


@dataclasses.dataclass(frozen=True)
class Call:
    """`name(*args, **kwargs)`, or with a `receiver` the method call `receiver.name(...)`."""

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    receiver: object = None

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        callee: wl.AbstractDoc = wl.TextDoc(self.name)
        if self.receiver is not None:
            callee = _operand(self.receiver, kwargs).group() + wl.TextDoc(f".{self.name}")
        arguments = [_doc(x, kwargs) for x in self.args]
        arguments += [wl.TextDoc(f"{key}=") + _doc(x, kwargs) for key, x in self.kwargs.items()]
        return callee + _bracketed("(", arguments, ")", kwargs)


@dataclasses.dataclass(frozen=True)
class Infix:
    """Operands with a symbol between them, or a symbol in front of a single operand."""

    symbol: str
    operands: Sequence[Any]
    precedence: int = 0
    one_per_line: bool = False
    """Whether each operand gets its own line where they do not fit into one."""
    width: int = LINE
    """The width of that line."""

    def docs(self, kwargs: dict[str, Any]) -> list[wl.AbstractDoc]:
        """The operands, in parentheses where they are operations that bind less tightly."""
        docs = []
        for i, operand in enumerate(self.operands):
            inner = _code_of(operand)
            # a - (b - c) needs its parentheses, (a - b) - c does not.
            loose = isinstance(inner, Infix) and inner.precedence < self.precedence + (i > 0)
            docs.append(_operand(operand, kwargs) if loose else _doc(operand, kwargs))
        return docs

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        docs = self.docs(kwargs)
        if len(docs) == 1:
            return wl.TextDoc(self.symbol) + docs[0]
        line = wl.join(wl.TextDoc(f" {self.symbol} "), docs)
        # Code that is broken before an operator needs parentheses.
        too_long = self.one_per_line and len(wl.pformat(line, width=10**6)) > self.width
        return self.in_parentheses(kwargs) if too_long else line

    def in_parentheses(self, kwargs: dict[str, Any]) -> wl.AbstractDoc:
        """The operation in parentheses, with an operand on each line where it is too long."""
        docs = self.docs(kwargs)
        if len(docs) == 1:
            return wl.TextDoc(f"({self.symbol}") + docs[0] + wl.TextDoc(")")
        separator = wl.BreakDoc(" ") + wl.TextDoc(f"{self.symbol} ")
        return _bracketed("(", docs, ")", kwargs, separator)


@dataclasses.dataclass(frozen=True)
class Entries:
    """A dict, as pairs of a key and a value. The keys may be arrays, which do not hash."""

    pairs: Sequence[tuple[Any, Any]]

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        docs = [self._entry(k, x, kwargs) for k, x in self.pairs]
        return _bracketed("{", docs, "}", kwargs)

    def _entry(self, key: object, value: object, kwargs: dict[str, Any]) -> wl.AbstractDoc:
        key, inner = _doc(key, kwargs) + wl.TextDoc(": "), _code_of(value)
        if isinstance(inner, Infix):
            # It is an argument of a call, so it is indented twice, and a comma follows.
            taken = 2 * kwargs["indent"] + len(wl.pformat(key, width=10**6)) + 1
            inner = dataclasses.replace(inner, width=inner.width - taken)
        return key + _doc(inner, kwargs)


# --- calls from signatures ------------------------------------------------------------------


def constructor_call(module: Any, **values: object) -> Call:
    """The call that makes a module, without the arguments that equal their defaults.

    An argument is read from the attribute of the same name, unless `values` has it. It is printed
    without its name if it is the only one without a default.
    """
    cls = type(module)
    parameters = list(inspect.signature(cls).parameters.values())
    fields = [f.name for f in dataclasses.fields(module)]

    def is_kept(name):
        return name in fields or name in values or isinstance(getattr(cls, name, None), property)

    if not all(p.kind not in _VARIADIC and is_kept(p.name) for p in parameters):
        # An `__init__` that keeps its arguments under other names.
        return Call(public_name(cls), (), {name: getattr(module, name) for name in fields})
    required = [p.name for p in parameters if p.default is _EMPTY]
    positional = required if len(required) == 1 else []
    return Call(public_name(cls), *_arguments(parameters, module, values, positional))


def method_call(
    module: Any, receiver: object, method: Callable[..., Any], **values: object
) -> Call:
    """The method call `receiver.method(...)` that makes a module, read as a constructor's is.

    The method's first parameter and those without a default are printed without their names.
    """
    _, *parameters = inspect.signature(method).parameters.values()
    positional = [p.name for i, p in enumerate(parameters) if i == 0 or p.default is _EMPTY]
    return Call(method.__name__, *_arguments(parameters, module, values, positional), receiver)


def _arguments(
    parameters: Sequence[inspect.Parameter],
    module: Any,
    values: Mapping[str, Any],
    positional: Sequence[str],
) -> tuple[list[Any], dict[str, Any]]:
    converters = {f.name: f.metadata.get("converter") for f in dataclasses.fields(module)}
    args, kwargs = [], {}
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        value = values[name] if name in values else getattr(module, name)
        convert = converters.get(name)
        if default is not _EMPTY:
            default = default if convert is None else convert(default)
            # Compared as code: a bound module has arrays where the defaults are Python numbers.
            if code(value) == code(default):
                continue
        if name in positional:
            args.append(value)
        else:
            kwargs[name] = value
    return args, kwargs


def public_name(cls: type) -> str:
    """The name that code uses for a class: the library's own are reached through `sl`."""
    package, _, rest = cls.__module__.partition(".")
    if package != PACKAGE:
        return cls.__name__
    at_top = vars(sys.modules[PACKAGE]).get(cls.__name__) is cls
    module = "" if at_top else f"{rest.partition('.')[0]}."
    return f"sl.{module}{cls.__name__}"


# --- text -----------------------------------------------------------------------------------


def code(value: object, width: int = LINE) -> str:
    """A module or plain value as the code that makes it."""
    return eqx.tree_pformat(_Laid(value), width=width, indent=4)


def operand(value: object) -> str:
    """The code of a value with parentheses around an operation, for a method call after it."""
    return eqx.tree_pformat(_Laid(value, operand=True), width=LINE, indent=4)


def shortest(value: Any) -> str:
    """A number in the fewest digits that identify it in its own precision, at least float32.

    Of an array, such as a number of several runs under `vmap`, the common value of all entries, or
    its dtype and shape if they differ.
    """
    if isinstance(value, Tracer):
        return f"<traced {value.dtype}>"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "<donated>"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if value.shape != ():
            common = _common_value(value)
            return f"<{value.dtype}{list(value.shape)}>" if common is None else shortest(common)
        value = np.asarray(value)[()]
        if jnp.issubdtype(value.dtype, jnp.floating):
            # The fewest digits of a half-precision number would name another float32.
            wide = value if value.dtype == np.float64 else value.astype(np.float32)
            return repr(float(np.format_float_scientific(wide)))
        return str(value)
    return repr(value)


def bytes_as_text(size: int) -> str:
    """A size with three digits and its unit."""
    for power, unit in enumerate(("B", "kB", "MB")):
        if size < 1000 ** (power + 1):
            return f"{size / 1000**power:.3g} {unit}"
    return f"{size / 1000**3:.3g} GB"


def _common_value(array: Any) -> Any:
    """The number that all entries of an array equal, as for runs that agree; otherwise `None`."""
    here = getattr(array, "is_fully_addressable", True)
    is_number = isinstance(array.dtype, np.dtype)  # and no PRNG key
    # Printing must not copy a large array from its device.
    if not here or not is_number or not 0 < array.size <= 4096:
        return None
    numbers = np.ravel(np.asarray(array))
    return numbers[0] if np.all(numbers == numbers[0]) else None


@dataclasses.dataclass(frozen=True)
class _Laid:
    """A value to be printed as code."""

    value: object
    operand: bool = False

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return _operand(self.value, kwargs) if self.operand else _doc(self.value, kwargs)


def _code_of(value: object) -> object:
    return value._code() if isinstance(value, AbstractPrinted) else value


def _operand(value: object, kwargs: dict[str, Any]) -> wl.AbstractDoc:
    inner = _code_of(value)
    return inner.in_parentheses(kwargs) if isinstance(inner, Infix) else _doc(value, kwargs)


def _doc(value: object, kwargs: dict[str, Any]) -> wl.AbstractDoc:
    if isinstance(value, np.dtype):
        return wl.TextDoc(repr(value.name))
    if isinstance(value, float | jax.Array | np.ndarray | np.generic):
        return wl.TextDoc(shortest(value))
    if isinstance(value, types.FunctionType):
        # Code that was run with `exec` may have no module.
        ours = (value.__module__ or "").startswith(f"{PACKAGE}.tree.")
        return wl.TextDoc(f"{'sl.tree.' * ours}{value.__name__}")
    if type(value) is list:
        return _bracketed("[", [_doc(x, kwargs) for x in value], "]", kwargs)
    if type(value) is tuple:
        comma = wl.TextDoc("," * (len(value) == 1))
        return _bracketed("(", [_doc(x, kwargs) + comma for x in value], ")", kwargs)
    if type(value) is dict:
        return Entries(tuple(value.items())).__pdoc__(**kwargs)
    return wl.pdoc(value, **kwargs)


def _bracketed(
    begin: str,
    docs: Sequence[wl.AbstractDoc],
    end: str,
    kwargs: dict[str, Any],
    separator: wl.AbstractDoc = wl.comma,
) -> wl.AbstractDoc:
    if not docs:
        return wl.TextDoc(begin + end)
    inside = wl.BreakDoc("") + wl.join(separator, [doc.group() for doc in docs])
    nested = inside.nest(kwargs["indent"])
    return (wl.TextDoc(begin) + nested + wl.BreakDoc("") + wl.TextDoc(end)).group()
