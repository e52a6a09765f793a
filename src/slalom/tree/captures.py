"""Functions of the user inside static structures, and caches that must not keep them."""

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax

_clear: list[Callable[[], None]] = []

_NO_DATA = (
    *(type, types.ModuleType, types.BuiltinFunctionType, str, int, float),
    # Each structure refers to it, and it to the functions that flatten each class.
    type(jax.tree_util.default_registry),
)


def cached(maxsize: int) -> Callable[[Any], Any]:
    """As `functools.lru_cache`, for keys that may hold functions of the user."""

    def decorate(function: Any) -> Any:
        lasting = functools.lru_cache(maxsize)(function)
        clear_with_functions(lasting.cache_clear)
        return lasting

    return decorate


def clear_with_functions(clear: Callable[[], None]) -> None:
    """Registers a function that empties a cache. It is called when functions in its keys may be
    unused."""
    _clear.append(clear)


def release_functions_with(*owners: Any) -> None:
    """Empties the caches when all owners have died."""
    alive = list(map(weakref.ref, owners))

    def release() -> None:
        if all(get() is None for get in alive):
            for clear in _clear:
                clear()

    for owner in owners:
        weakref.finalize(owner, release).atexit = False


def captures(x: Any) -> bool:
    """Whether a structure holds functions that can hold data, such as lambdas in a function."""
    seen: set[int] = set()
    rest = [x]
    while rest:
        x = rest.pop()
        if id(x) in seen or isinstance(x, _NO_DATA):
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            if x.__closure__ is not None:
                return True
            continue
        rest += gc.get_referents(x)
    return False
