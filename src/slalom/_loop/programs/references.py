"""Keys of functions, and references that do not keep them alive."""

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any


def identity(x: Any) -> Hashable:
    """The entry of a key for a value: the value itself if others can equal it, else its id.

    The id of a function stands for it only while it lives, so the entries of the key must be
    dropped when it dies.
    """
    # A method is a new object each time it is looked up.
    if isinstance(x, types.MethodType) and _has_identity(type(x.__self__)):
        return id(x.__self__), id(x.__func__)
    return id(x) if _has_identity(type(x)) else x


def reference(x: Any, forget: Callable[[Any], None]) -> Callable[[], Any]:
    """A function that returns the value, without keeping it alive where `identity` gives an id.

    **Arguments:**

    - `x`: the value.
    - `forget`: called with the dead reference when the value dies.
    """
    if identity(x) is x:
        return lambda: x
    return (weakref.WeakMethod if isinstance(x, types.MethodType) else weakref.ref)(x, forget)


@functools.lru_cache(1024)
def _has_identity(kind: type) -> bool:
    """Whether objects of a type equal only themselves, and can be referred to weakly."""
    is_equal_to_itself = kind.__eq__ is object.__eq__ and kind.__hash__ is not None
    return is_equal_to_itself and kind.__weakrefoffset__ > 0
