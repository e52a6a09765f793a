"""Moves entries of the state with the rows of its parameters, for `opt.rebind(model, rows=...)`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..._core.engine.encoded import is_encoded
from ..._core.state.marks import NONNEGATIVE, PARAM_LIKE, PER_LEAF, REDUCED, UNTIL_RESET
from ..._core.state.slots import Slot
from ...tree.paths import leaf_paths
from ...tree.sharding import placed_like, replicated
from ...tree.types import Params, Tracer
from ...where.masks import check_matches, labels
from ...where.resolve import Cases, as_where

Indices = dict[int, Int[Array, " rows"]]
"""For each axis of a parameter that changes, where its new entries come from; −1 is nowhere."""


class Moved(NamedTuple):
    """An old leaf of the state, as it is after the rows of its parameter have moved."""

    slot: Slot
    leaf: Any
    indices: Indices | None
    """`None` if its axes are not those of the parameter."""
    is_aged: bool = False
    """Whether the bias of its means is corrected by their age."""

    @property
    def is_reduced(self) -> bool:
        """Whether an axis of size 1 stands for all entries."""
        return self.slot.stored == REDUCED

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the moved leaf has this shape, and any of its entries."""
        sizes = np.shape(self.leaf)
        if self.indices is None or len(sizes) != len(shape):
            return False
        for axis, (size, wanted) in enumerate(zip(sizes, shape, strict=True)):
            index = self.indices.get(axis)
            if index is None or (self.is_reduced and size == wanted == 1):
                if size != wanted:
                    return False
                continue
            if index.shape[0] != wanted:
                return False
            if isinstance(index, Tracer):
                continue
            largest = int(np.max(index, initial=-1))
            if largest >= size:
                raise ValueError(
                    f"`rows` takes entry {largest} of '{self.slot.name}', which has {size} along "
                    f"axis {axis}. Entries count from 0, and -1 makes a new one."
                )
            if largest < 0:
                return False
        return True

    def onto(self, fresh: Any) -> Array:
        """Its value, with initial values for new entries."""
        old, like = (x.decode() if is_encoded(x) else x for x in (self.leaf, fresh))
        # JAX takes no rows of arrays that are divided along explicit axes of a mesh.
        x, fresh = replicated(old), replicated(like)
        # Age is that of the whole parameter. A mean of squares that starts at 0 without a
        # correction of its own would make the first hundred steps several times too long.
        averages = self.is_aged and (self.is_reduced or self.slot.stored == NONNEGATIVE)
        is_new = jnp.zeros((1,) * x.ndim, bool)
        for axis, index in (self.indices or {}).items():
            if self.is_reduced and x.shape[axis] == fresh.shape[axis] == 1:
                continue
            absent = jnp.expand_dims(index < 0, [n for n in range(x.ndim) if n != axis])
            x = jnp.take(x, jnp.maximum(index, 0), axis)
            if averages:
                mean = jnp.mean(x, axis, keepdims=True, where=~absent)
                x = jnp.where(absent, mean.astype(x.dtype), x)
            else:
                is_new = is_new | absent
        return placed_like(jnp.where(is_new, fresh.astype(x.dtype), x), like)


def nodes_with_ages(places: list[Slot]) -> set[tuple[str, str]]:
    """The state modules that know the age of their means."""
    return {slot.node for slot in places if slot.mark == PER_LEAF}


def moved(
    places: list[Slot], leaves: list[Any], params: list[str], rows: Mapping[str, Indices]
) -> list[Any]:
    """The leaves of a state, with the rows of these parameters moved."""
    aged = nodes_with_ages(places)
    owned = {(slot.node, slot.param_among(params)) for slot in places}
    concerned = {node for node, param in owned if param in rows}

    def one(slot: Slot, x: Any) -> Any:
        ndim, param = len(np.shape(x)), slot.param_among(params)
        if param is not None and param in rows and ndim > 0:  # a number stands for all rows
            movable = slot.stored == REDUCED or slot.mark == PARAM_LIKE
            return Moved(slot, x, rows[param] if movable else None, slot.node in aged)
        # A matrix over the entries of all parameters, as in Broyden's method.
        of_all = slot.node in concerned and slot.mark == UNTIL_RESET and ndim > 1
        # A buffer of small parameters. Large ones have leaves of their own beside it.
        is_buffer = slot.mark == PARAM_LIKE and param is None
        of_some = is_buffer and any((slot.node, p) not in owned for p in rows)
        return Moved(slot, x, None) if of_all or of_some else x

    return [one(slot, x) for slot, x in zip(places, leaves, strict=True)]


def rows_of(rows: Any, params: Params, before: list[str]) -> dict[str, Indices]:
    """The indices in `rows` by the path of each parameter.

    **Arguments:**

    - `rows`: a mapping from selectors to indices, or to a mapping from axes to indices.
    - `params`: the new parameters.
    - `before`: the paths of the old ones.
    """
    if not isinstance(rows, Mapping):
        raise TypeError(
            f"`rows` must be a mapping from selectors to indices, got a {type(rows).__name__}. "
            'Write `rows={sl.where.path("embedding.weight"): index}`.'
        )
    cases = Cases(tuple((as_where(where), f"{n}") for n, where in enumerate(rows)))
    indices = {f"{n}": index for n, index in enumerate(rows.values())}
    check_matches(cases, params)
    result = {}
    chosen = zip(leaf_paths(params), labels(cases, params), jax.tree.leaves(params), strict=True)
    for path, n, x in chosen:
        if n is None:
            continue
        if path not in before:
            raise ValueError(
                f"`rows` selects '{path}', which is a new parameter. Its state has no old rows."
            )
        index = indices[str(n)]
        of_axes = index if isinstance(index, Mapping) else {0: index}
        result[path] = {axis: _index(path, x, axis, of_axes[axis]) for axis in of_axes}
    return result


def _index(path: str, x: Any, axis: Any, rows: Any) -> Int[Array, " rows"]:
    index = jnp.asarray(rows) if np.size(rows) else jnp.zeros(0, jnp.int32)
    if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(
            f"The index of `rows` for '{path}' must be a vector of integers, the old entry of each "
            f"new one and -1 for a new one, got an array of shape {index.shape} and dtype "
            f"{index.dtype}."
        )
    if not isinstance(axis, int) or not 0 <= axis < x.ndim:
        raise ValueError(f"`rows` moves axis {axis!r} of '{path}', which has the shape {x.shape}.")
    if index.shape[0] != x.shape[axis]:
        raise ValueError(
            f"The index of `rows` for '{path}' has {index.shape[0]} entries, but the new parameter "
            f"has {x.shape[axis]} along axis {axis}. Give an entry for each of these."
        )
    if not isinstance(index, Tracer) and int(np.min(index, initial=0)) < -1:
        raise ValueError(
            f"The index of `rows` for '{path}' has a negative entry other than -1, which makes a "
            "new one. Entries count from 0."
        )
    return index
