"""Trees with any leaves, as flat trees of arrays only.

Flattening one costs little: a tree of modules is rebuilt only where it is read.
"""

from typing import Any

import jax
from jax.tree_util import GetAttrKey
from jaxtyping import PyTree

from .dtypes import is_array
from .paths import dotted


class Packed:
    """A tree whose arrays are its children, and all else is its structure.

    The structure travels with a compiled program. In a mutable cell it would go stale as soon as
    another program takes the place of this one in the cache.
    """

    def __init__(self, arrays: list[Any], rest: tuple[Any, tuple[tuple[int, type, Any], ...]]):
        self.arrays = arrays
        self.rest = rest

    def __reduce__(self) -> Any:
        # JAX does not pickle the structure of a tree of modules, but any tree that has it can be.
        return pack, (unpack(self),)


def pack(tree: PyTree) -> Packed:
    """A tree of arrays and anything else as a tree of arrays."""
    leaves, structure = jax.tree.flatten(tree)
    # With the types, because 1 == True.
    statics = tuple((i, type(x), x) for i, x in enumerate(leaves) if not _is_array(x))
    arrays = [x for x in leaves if _is_array(x)] if statics else leaves
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
    return all(map(_is_array, jax.tree.leaves(tree)))


def _is_array(x: Any) -> bool:
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _with_keys(packed: Packed) -> tuple[list[tuple[Any, Any]], Any]:
    structure, statics = packed.rest
    known = {i for i, _, _ in statics}
    positions = structure.unflatten(range(structure.num_leaves))
    named = jax.tree_util.tree_leaves_with_path(positions)
    keys = [GetAttrKey(dotted(path)) for path, i in named if i not in known]
    return list(zip(keys, packed.arrays, strict=True)), packed.rest


jax.tree_util.register_pytree_with_keys(
    Packed,
    _with_keys,
    lambda rest, arrays: Packed(list(arrays), rest),
    lambda packed: (packed.arrays, packed.rest),
)
