"""Masks and labels of parameters, from selectors and from the marks of models.

States of transforms and optimizers inside a model are not trained. Other parts have two marks:
`paramax.NonTrainable` around a part of the model, and in a class the paths of what is frozen in its
instances:

    class Normalized(eqx.Module):
        __frozen__ = ("mean", "std")

A path freezes everything below it, and may contain `*` and `**`. `trainable=` overrides the marks.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from ..tree.packed import cached
from ..tree.paths import candidates, children_of, dotted, glob_pattern, leaf_paths, whole
from ..tree.types import Params, Updates
from .resolve import Cases, Leaf, Where, resolve_bools

MARK = "slalom.mark"
"""The key in the metadata of a field that makes its class one of states."""


@dataclasses.dataclass(frozen=True)
class Unmarked(Where):
    """The leaves that no mark freezes."""

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        return [not frozen for frozen in _frozen(leaves[0].tree)] if leaves else []


def _frozen(node: Any) -> list[bool]:
    """Whether a mark in this node or inside it freezes each of its leaves."""
    if _is_non_trainable(type(node)) or _is_state(type(node)):
        return [True] * len(jax.tree.leaves(node))
    if jax.tree_util.all_leaves([node]):
        return [False]
    frozen = [f for _, child in children_of(node)[0] for f in _frozen(child)]
    # And everything below.
    patterns = [glob_pattern(glob) for path in _stated(node) for glob in (path, f"{path}.**")]
    if not patterns:
        return frozen
    return [
        f or any(p.fullmatch(path) for p in patterns)
        for f, path in zip(frozen, leaf_paths(node), strict=True)
    ]


def _is_state(cls: type) -> bool:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return any(MARK in field.metadata for field in fields)


def _is_non_trainable(cls: type) -> bool:
    # By name, since paramax need not be installed.
    names = ((c.__module__.partition(".")[0], c.__name__) for c in cls.__mro__)
    return ("paramax", "NonTrainable") in names


def _stated(node: Any) -> tuple[str, ...]:
    """The paths that the class of a node declares. Raises an error for impossible ones."""
    cls = type(node)
    stated = getattr(cls, "__frozen__", ())
    if not isinstance(stated, tuple | list) or not all(isinstance(x, str) for x in stated):
        raise TypeError(
            f"{cls.__name__}.__frozen__ must be a tuple of paths of what is not trained, such as "
            f"('mean', 'encoder.**'), got {stated!r}."
        )
    for path in stated:
        first = path.partition(".")[0]
        if "*" not in first and not hasattr(node, first):
            names = (
                [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
            )
            raise ValueError(
                f"{cls.__name__}.__frozen__ names {path!r}, but {cls.__name__} has no '{first}'. "
                f"Fields: {candidates(first, names)}."
            )
    return tuple(stated)


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
    leaves = _leaves_of(*_structure_and_shapes(params))
    for primitive in where.primitives():
        if primitive.unmatched is not None and not any(resolve_bools(primitive, leaves)):
            paths = candidates("", leaf_paths(params))
            raise ValueError(f"{primitive!r} {primitive.unmatched} Paths: {paths}.")
    if isinstance(where, Cases):
        _check_no_case_is_hidden(where, leaves)


def _check_no_case_is_hidden(cases: Cases, leaves: list[Leaf]) -> None:
    takers: dict[str, Where] = {}
    for where, _ in cases.cases:
        chosen = resolve_bools(where, leaves)
        paths = [leaf.path for leaf, c in zip(leaves, chosen, strict=True) if c]
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
    structure, shapes = _structure_and_shapes(params)
    try:
        return _resolve_cached(function, where, structure, shapes)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _resolve_cached.__wrapped__(function, where, structure, shapes)


@cached(maxsize=1024)
def _resolve_cached(function: Any, where: Any, structure: Any, shapes: Any) -> tuple[Any, ...]:
    return tuple(function(where, _leaves_of(structure, shapes)))


def _structure_and_shapes(params: Params) -> tuple[Any, tuple[Any, ...]]:
    arrays, structure = jax.tree.flatten(params)
    return structure, tuple((tuple(np.shape(x)), np.dtype(x.dtype)) for x in arrays)


def _leaves_of(structure: Any, shapes: Any) -> list[Leaf]:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    tree = structure.unflatten(structs)
    return [
        Leaf(dotted(whole(key_path)), struct, whole(key_path), tree)
        for key_path, struct in jax.tree_util.tree_leaves_with_path(tree)
    ]
