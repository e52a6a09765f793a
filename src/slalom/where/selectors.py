"""The selectors: functions that return a `Where`."""

import builtins
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..tree.paths import glob_pattern
from ..tree.types import is_function
from .resolve import ONLY_SHAPES, Leaf, Where, check_arrays_give_no_more, function_name


@dataclasses.dataclass(frozen=True)
class _Selector(Where):
    """Selects the leaves that pass a test."""

    code: str
    test: Callable[..., bool]
    """Called with a leaf and `args`: a function of this module, by which selectors are compared and
    pickled."""
    args: tuple[Any, ...]
    unmatched: str | None = None
    sees_dtypes: bool = False

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        return [self.test(leaf, *self.args) for leaf in leaves]

    def __repr__(self) -> str:
        return self.code


def _matches(leaf: Leaf, glob: re.Pattern[str]) -> bool:
    return glob.fullmatch(leaf.path) is not None


def _contains(leaf: Leaf, pattern: re.Pattern[str]) -> bool:
    return pattern.search(leaf.path) is not None


def _has_ndim(leaf: Leaf, least: int, most: int | None) -> bool:
    return least <= leaf.struct.ndim and (most is None or leaf.struct.ndim <= most)


_DTYPE_GROUPS = ("number", "inexact", "floating", "complexfloating", "integer")


def _has_dtype(leaf: Leaf, name: str) -> bool:
    return bool(jnp.issubdtype(leaf.struct.dtype, getattr(jnp, name)))


def _is_inside(leaf: Leaf, cls: builtins.type, owner: bool) -> bool:
    ancestors = leaf.ancestors()
    if owner:
        containers = builtins.dict | builtins.list | builtins.tuple
        ancestors = [node for node in ancestors if not isinstance(node, containers)][-1:]
    return any(isinstance(node, cls) for node in ancestors)


def _always(leaf: Leaf, answer: bool) -> bool:
    return answer


@dataclasses.dataclass(frozen=True)
class _PerLeaf(Where):
    function: Callable[[str, Any], bool]

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        answers = [self._call(leaf) for leaf in leaves]

        def call(arrays: list[Any]) -> Iterator[Any]:
            return (self.function(leaf.path, x) for leaf, x in zip(leaves, arrays, strict=True))

        check_arrays_give_no_more(self, call, [leaf.struct for leaf in leaves], answers)
        return answers

    def _call(self, leaf: Leaf) -> Any:
        try:
            return self.function(leaf.path, leaf.struct)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"The function {function_name(self.function)} failed at '{leaf.path}': {error}. "
                f"Write it as `lambda path, leaf: ...`. {ONLY_SHAPES}"
            ) from error

    def __repr__(self) -> str:
        return f"sl.where.leaf({function_name(self.function)})"


def _check(selector: str, takes: str, value: Any, kind: builtins.type) -> None:
    """Raises an error for an argument of another type, which is often a list of arguments."""
    if not isinstance(value, kind):
        raise TypeError(
            f"sl.where.{selector} takes {takes}, got {value!r}. To select by several, combine "
            f"selectors: `sl.where.{selector}(...) | sl.where.{selector}(...)`."
        )


def path(glob: str) -> Where:
    """Selects leaves whose whole dotted path matches a glob.

    `*` matches one segment, or any characters within a segment. `**` matches any number of
    segments, including none: `"**.bias"` also matches a top-level `bias`. `"layers.1.**"` does not
    match `layers.12`. A glob that matches nothing in the bound model is an error.

    **Arguments:**

    - `glob`: such as `"layers.2.**"`, `"**.bias"` or `"blocks.*.attention.*.weight"`.

    **Returns:** a selector.
    """
    _check("path", "one glob", glob, str)
    if "***" in glob:
        raise ValueError(
            f"sl.where.path has {glob!r}, and `***` has no meaning: `*` matches one segment, and "
            "`**` any number of them."
        )
    unmatched = (
        "matches no parameter. A glob must match the whole path; `*` matches one segment and `**` "
        "any number of segments."
    )
    return _Selector(f"sl.where.path({glob!r})", _matches, (glob_pattern(glob),), unmatched)


def regex(pattern: str) -> Where:
    """Selects leaves whose dotted path contains a match of a regular expression (`re.search`).

    A pattern that matches nothing in the bound model is an error.

    **Arguments:**

    - `pattern`: a regular expression. To match the whole path, anchor it with `^` and `$`.

    **Returns:** a selector.
    """
    _check("regex", "one regular expression", pattern, str)
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"sl.where.regex has {pattern!r}, which is no regular expression: {error}. `re.escape` "
            "takes characters literally, and `sl.where.path` takes a glob."
        ) from None
    code = f"sl.where.regex({pattern!r})"
    return _Selector(code, _contains, (compiled,), "matches no parameter.")


def ndim(n: int | None = None, *, min: int = 0, max: int | None = None) -> Where:
    """Selects leaves by their number of axes.

    **Arguments:**

    - `n`: the exact number of axes. Pass either `n`, or `min` and `max`.
    - `min`: the minimum number of axes.
    - `max`: the maximum number of axes. Defaults to no maximum.

    **Returns:** a selector.

    ```python
    >>> sl.where.ndim(min=2)
    sl.where.ndim(min=2)

    ```
    """
    if n is not None and (min, max) != (0, None):
        raise TypeError("sl.where.ndim takes either a number of axes, or `min` and `max`.")
    for axes in (min, *(number for number in (n, max) if number is not None)):
        if isinstance(axes, bool) or not isinstance(axes, int) or axes < 0:
            raise TypeError(f"sl.where.ndim takes whole numbers ≥ 0, got {axes!r}.")
    if max is not None and max < min:
        raise ValueError(f"sl.where.ndim has min={min} and max={max}, which nothing matches.")
    least, most = (min, max) if n is None else (n, n)
    bounds = [f"min={least}"] if least else []
    bounds += [] if most is None else [f"max={most}"]
    numbers = str(least) if least == most else ", ".join(bounds) or "min=0"
    return _Selector(f"sl.where.ndim({numbers})", _has_ndim, (least, most))


def dtype(dtype: Any) -> Where:
    """Selects leaves of a dtype, or of a group of dtypes.

    **Arguments:**

    - `dtype`: such as `jnp.bfloat16`, `"float32"`, or the group `jnp.complexfloating`.

    **Returns:** a selector.
    """
    for kind, group in ((float, "floating"), (complex, "complexfloating"), (int, "integer")):
        if dtype is kind or dtype == kind.__name__:
            raise TypeError(
                f"sl.where.dtype({kind.__name__}) would mean {np.dtype(kind)} alone. Write "
                f"`sl.where.dtype(jnp.{group})`, or name one dtype."
            )
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    if name in _DTYPE_GROUPS:
        return _of_dtype(name)
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = ""
    # NumPy has more dtypes, and takes None for float64.
    if dtype is None or not hasattr(jnp, name):
        raise TypeError(
            "sl.where.dtype takes a dtype, such as `jnp.float32`, or a group, such as "
            f"`jnp.floating`, got {dtype!r}."
        )
    return _of_dtype(name)


def _of_dtype(name: str) -> Where:
    return _Selector(f"sl.where.dtype({name!r})", _has_dtype, (name,), sees_dtypes=True)


def type(cls: builtins.type, *, owner: bool = False) -> Where:
    """Selects leaves inside instances of a class.

    **Arguments:**

    - `cls`: such as `eqx.nn.LayerNorm`.
    - `owner`: whether to select only an instance's own arrays, without modules inside it.

    **Returns:** a selector.
    """
    if isinstance(cls, eqx.Module):
        name = builtins.type(cls).__name__
        raise TypeError(
            f"sl.where.type takes a class, got a module: write `sl.where.type({name})`."
        )
    _check("type", "one class", cls, builtins.type)
    name = cls.__name__
    if getattr(eqx.nn, name, None) is cls:
        name = f"eqx.nn.{name}"
    code = f"sl.where.type({name}{', owner=True' if owner else ''})"
    return _Selector(code, _is_inside, (cls, owner))


def leaf(function: Callable[[str, Any], bool]) -> Where:
    """Selects leaves for which a function of path and leaf returns true.

    **Arguments:**

    - `function`: called as `function(path, leaf)` with the dotted path and a
        `jax.ShapeDtypeStruct`; returns a bool.

    **Returns:** a selector.
    """
    if not is_function(function):
        raise TypeError(f"sl.where.leaf takes a function of (path, leaf), got {function!r}.")
    return _PerLeaf(function)


def everything() -> Where:
    """Selects all leaves.

    **Returns:** a selector.
    """
    return _Selector("sl.where.everything()", _always, (True,))


def nothing() -> Where:
    """Selects no leaf.

    **Returns:** a selector.
    """
    return _Selector("sl.where.nothing()", _always, (False,))
