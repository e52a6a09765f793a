"""Selectors: which leaves a transform acts on.

Wherever the library takes a `where`, it takes a selector from this module, a function of the
whole parameter tree that returns a tree (or a prefix of one) of bools, or such a tree itself.
"""

import builtins
import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._paths import glob_pattern
from .resolve import ONLY_SHAPES, Leaf, Where, function_name


@dataclasses.dataclass(frozen=True)
class _Path(Where):
    glob: str

    unmatched: ClassVar[str | None] = (
        "matches no parameter. The whole path must match, `*` is one segment and `**` any number "
        "of them."
    )

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        pattern = glob_pattern(self.glob)
        return [pattern.fullmatch(leaf.path) is not None for leaf in leaves]

    def __repr__(self) -> str:
        return f"sl.where.path({self.glob!r})"


@dataclasses.dataclass(frozen=True)
class _Regex(Where):
    pattern: str

    unmatched: ClassVar[str | None] = "is found in no parameter's path."

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [re.search(self.pattern, leaf.path) is not None for leaf in leaves]

    def __repr__(self) -> str:
        return f"sl.where.regex({self.pattern!r})"


@dataclasses.dataclass(frozen=True)
class _NDim(Where):
    min: int
    max: int | None

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [
            self.min <= len(leaf.struct.shape)
            and (self.max is None or len(leaf.struct.shape) <= self.max)
            for leaf in leaves
        ]

    def __repr__(self) -> str:
        if self.min == self.max:
            return f"sl.where.ndim({self.min})"
        bounds = [f"min={self.min}"] if self.min else []
        bounds += [f"max={self.max}"] if self.max is not None else []
        return f"sl.where.ndim({', '.join(bounds) or 'min=0'})"


_DTYPE_GROUPS = ("number", "inexact", "floating", "complexfloating", "integer")


@dataclasses.dataclass(frozen=True)
class _DType(Where):
    name: str

    sees_dtypes: ClassVar[bool] = True

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        group = getattr(jnp, self.name)
        return [bool(jnp.issubdtype(leaf.struct.dtype, group)) for leaf in leaves]

    def __repr__(self) -> str:
        return f"sl.where.dtype({self.name!r})"


@dataclasses.dataclass(frozen=True)
class _Type(Where):
    cls: builtins.type
    owner: bool

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [self._holds(leaf) for leaf in leaves]

    def _holds(self, leaf: Leaf) -> bool:
        owners = leaf.owners()
        if self.owner:
            plain = builtins.dict | builtins.list | builtins.tuple
            owners = [node for node in owners if not isinstance(node, plain)][-1:]
        return any(isinstance(node, self.cls) for node in owners)

    def __repr__(self) -> str:
        return f"sl.where.type({self.cls.__name__}{', owner=True' if self.owner else ''})"


@dataclasses.dataclass(frozen=True)
class _PerLeaf(Where):
    function: Callable[[str, Any], bool]

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [self._ask(leaf) for leaf in leaves]

    def _ask(self, leaf: Leaf) -> Any:
        try:
            return self.function(leaf.path, leaf.struct)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"The function {function_name(self.function)} failed at '{leaf.path}': {error}. "
                f"{ONLY_SHAPES}"
            ) from error

    def __repr__(self) -> str:
        return f"sl.where.leaf({function_name(self.function)})"


@dataclasses.dataclass(frozen=True)
class _All(Where):
    selected: bool

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [self.selected] * len(leaves)

    def __repr__(self) -> str:
        return f"sl.where.{'everything' if self.selected else 'nothing'}()"


def _check(selector: str, takes: str, given: Any, kind: builtins.type) -> None:
    """Refuses another kind of argument; several selectors are joined with `|`."""
    if not isinstance(given, kind):
        raise TypeError(
            f"sl.where.{selector} takes {takes}, got {given!r}. To select by several, join "
            f"selectors: `sl.where.{selector}(...) | sl.where.{selector}(...)`."
        )


def path(glob: str) -> Where:
    """Leaves whose whole dotted path matches a glob.

    `*` is one segment (or, inside a segment, any characters), `**` any number of segments
    including none: `"**.bias"` also matches a top-level `bias`, and `"layers.1.**"` does not
    match `layers.12`. A glob that matches nothing in the bound model is an error.

    **Arguments:**

    - `glob`: such as `"layers.2.**"`, `"**.bias"`, `"blocks.*.attention.*.weight"`.

    **Returns:** a selector.
    """
    _check("path", "one glob", glob, str)
    return _Path(glob)


def regex(pattern: str) -> Where:
    """Leaves in whose dotted path a regular expression is found (`re.search`).

    **Arguments:**

    - `pattern`: a regular expression; anchor it with `^` and `$` where the whole path is meant.

    **Returns:** a selector. One that matches nothing in the bound model is an error.
    """
    _check("regex", "one regular expression", pattern, str)
    re.compile(pattern)
    return _Regex(pattern)


def ndim(n: int | None = None, *, min: int = 0, max: int | None = None) -> Where:
    """Leaves by their number of axes.

    **Arguments:**

    - `n`: exactly this many; or instead
    - `min`, `max`: at least and at most this many.

    **Returns:** a selector.

    ```python
    >>> sl.where.ndim(min=2)
    sl.where.ndim(min=2)

    ```
    """
    if n is not None and (min, max) != (0, None):
        raise TypeError("sl.where.ndim takes either a number of axes, or `min` and `max`.")
    for axes in (n, min, max):
        _check("ndim", "whole numbers", 0 if axes is None else axes, int)
    return _NDim(min, max) if n is None else _NDim(n, n)


def dtype(dtype: Any) -> Where:
    """Leaves of a dtype, or of a group of dtypes.

    **Arguments:**

    - `dtype`: such as `jnp.bfloat16`, `"float32"`, or the group `jnp.complexfloating`.

    **Returns:** a selector.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    if name in _DTYPE_GROUPS:
        return _DType(name)
    if dtype is None:
        raise TypeError("sl.where.dtype takes a dtype, got None.")
    return _DType(np.dtype(dtype).name)


def type(cls: builtins.type, *, owner: bool = False) -> Where:
    """Leaves that stand anywhere below an instance of a class.

    **Arguments:**

    - `cls`: such as `eqx.nn.LayerNorm`.
    - `owner`: only the instance's own fields, not those of modules inside it.

    **Returns:** a selector.
    """
    _check("type", "one class", cls, builtins.type)
    return _Type(cls, owner)


def leaf(function: Callable[[str, Any], bool]) -> Where:
    """Leaves for which a function of path and leaf holds.

    **Arguments:**

    - `function`: called as `function(path, leaf)` with the dotted path and a
        `jax.ShapeDtypeStruct`; returns a bool.

    **Returns:** a selector.
    """
    if not callable(function):
        raise TypeError(f"sl.where.leaf takes a function of (path, leaf), got {function!r}.")
    return _PerLeaf(function)


def everything() -> Where:
    """All leaves.

    **Returns:** a selector.
    """
    return _All(True)


def nothing() -> Where:
    """No leaf.

    **Returns:** a selector.
    """
    return _All(False)
