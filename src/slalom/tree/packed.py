"""Trees of any leaves as flat trees of arrays, and caches by their static structures.

Flattening a flat tree costs little: a tree of modules is rebuilt only where it is read."""

import dataclasses
import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey
from jaxtyping import PyTree

from .paths import dotted

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(eq=False, repr=False)
class Packed:
    """A tree whose children are its arrays, and whose structure is everything else.

    The structure travels with a compiled program. In a mutable cell it would go stale as soon as
    another program takes the place of this one in the cache.
    """

    arrays: list[Any]
    rest: tuple[Any, tuple[tuple[int, type, Any], ...]]
    """The structure of the tree; and its other leaves, each with its position and its type."""

    def __reduce__(self) -> Any:
        # JAX does not pickle the structure of a tree of modules, but any tree that has it can be.
        return pack, (unpack(self),)


def pack(tree: PyTree) -> Packed:
    """A tree of arrays and anything else as a tree of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    # With the types, because 1 == True.
    statics = tuple((i, type(x), x) for i, x in enumerate(leaves) if not isinstance(x, _ARRAYS))
    arrays = [x for x in leaves if isinstance(x, _ARRAYS)] if statics else leaves
    return Packed(arrays, (structure, statics))


def unpack(packed: PyTree) -> PyTree:
    """Undoes `pack`. Another tree stays as it is."""
    if not isinstance(packed, Packed):
        return packed
    structure, statics = packed.rest
    leaves = list(packed.arrays)
    for i, _, static in statics:
        leaves.insert(i, static)
    return structure.unflatten(leaves)


def holds_arrays(tree: PyTree) -> bool:
    """Whether all leaves of a tree are arrays, or shapes of arrays."""
    return all(isinstance(x, _ARRAYS) for x in jax.tree.leaves(tree))


def _with_keys(packed: Packed) -> tuple[list[tuple[Any, Any]], Any]:
    structure, statics = packed.rest
    static = {i for i, _, _ in statics}
    positions = structure.unflatten(range(structure.num_leaves))
    named = jax.tree_util.tree_leaves_with_path(positions)
    keys = [GetAttrKey(dotted(path)) for path, i in named if i not in static]
    return list(zip(keys, packed.arrays, strict=True)), packed.rest


jax.tree_util.register_pytree_with_keys(
    Packed,
    _with_keys,
    lambda rest, arrays: Packed(list(arrays), rest),
    lambda packed: (packed.arrays, packed.rest),
)


_clear: list[Callable[[], None]] = []

_NO_DATA = (
    *(type, types.ModuleType, types.BuiltinFunctionType, str, int, float),
    # Each structure refers to it, and it to the functions that flatten each class.
    type(jax.tree_util.default_registry),
)

_PLAIN = (*_NO_DATA, types.FunctionType, complex, bytes, enum.Enum, np.dtype, type(None))
"""The types of what functions may keep without data."""


def cached(maxsize: int) -> Callable[[Any], Any]:
    """Like `functools.lru_cache`, for keys that may hold functions of the user."""

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


def _held(x: Any) -> tuple[Any, ...] | None:
    """What a function keeps beside its code, or `None` if it is in a closure."""
    if isinstance(x, types.FunctionType):
        defaults = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        return defaults if x.__closure__ is None else None
    if isinstance(x, functools.partial):
        return *x.args, *x.keywords.values()
    return (x.__self__,) if isinstance(x, types.MethodType) else ()


def captures(x: Any) -> bool:
    """Whether a structure holds functions that can hold data, such as lambdas in a function."""
    seen: set[int] = set()
    rest = [x]
    while rest:
        x = rest.pop()
        if id(x) in seen or isinstance(x, _NO_DATA):
            continue
        seen.add(id(x))
        held = _held(x)
        if held is None or not all(isinstance(value, _PLAIN) for value in held):
            return True
        if isinstance(x, types.FunctionType):
            rest += held  # and not all globals of its module
            continue
        rest += gc.get_referents(x)
    return False
