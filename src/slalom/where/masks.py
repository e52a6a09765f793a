"""How selectors become masks and labels of parameters."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from ..tree.captures import cached
from ..tree.paths import candidates, dotted, leaf_paths, whole
from ..tree.types import Params, Updates
from .resolve import Cases, Leaf, Where, resolve_bools


def mask(where: Where, params: Params) -> tuple[bool, ...]:
    """Whether each leaf of the parameters, in order, is selected. Cached."""
    return resolve(resolve_bools, where, params)


def selected_from(where: Where, updates: Updates, params: Params | None) -> Params:
    """The tree that `update` evaluates a selector on: the parameters, or else the updates."""
    if params is not None:
        return params
    for primitive in where.primitives():
        if primitive.sees_dtypes:
            raise TypeError(
                f"{primitive!r} selects by the dtypes of the parameters, so `update` needs them: "
                "`tx.update(grads, state, params)`."
            )
    return updates


def labels(where: Where, params: Params) -> tuple[Hashable, ...]:
    """The label of each leaf of the parameters, in order. Cached."""
    return resolve(_labels, where, params)


def check_matches(where: Where, params: Params) -> None:
    """Raises an error if a path or regex selects nothing in the whole bound tree, or if a case
    selects only what earlier cases take."""
    for primitive in where.primitives():
        message = primitive.if_unmatched()
        if message is not None and not any(mask(primitive, params)):
            paths = candidates("", leaf_paths(params))
            raise ValueError(f"{primitive!r} {message} Paths: {paths}.")
    if isinstance(where, Cases):
        _check_no_case_is_hidden(where, params)


def _check_no_case_is_hidden(cases: Cases, params: Params) -> None:
    takers: dict[str, Where] = {}
    for where, _ in cases.cases:
        chosen = mask(where, params)
        paths = [path for path, c in zip(leaf_paths(params), chosen, strict=True) if c]
        if paths and takers.keys() >= set(paths):
            raise ValueError(
                f"{where!r} selects nothing that earlier selectors leave: '{paths[0]}' belongs to "
                f"{takers[paths[0]]!r}. The first selector that matches counts, so put the special "
                "ones first."
            )
        takers = dict.fromkeys(paths, where) | takers


def _labels(where: Where, leaves: list[Leaf]) -> list[Hashable]:
    return where.evaluate(leaves)


def resolve(function: Any, where: Any, params: Params) -> tuple[Any, ...]:
    """`function(where, leaves)`, a value per leaf, cached by structure, shapes and dtypes."""
    arrays, structure = jax.tree.flatten(params)
    shapes = tuple((tuple(np.shape(x)), np.dtype(x.dtype)) for x in arrays)
    try:
        return _resolve_cached(function, where, structure, shapes)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _resolve_cached.__wrapped__(function, where, structure, shapes)


@cached(maxsize=1024)
def _resolve_cached(function: Any, where: Any, structure: Any, shapes: Any) -> tuple[Any, ...]:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    tree = structure.unflatten(structs)
    leaves = [
        Leaf(dotted(whole(key_path)), struct, whole(key_path), tree)
        for key_path, struct in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return tuple(function(where, leaves))
