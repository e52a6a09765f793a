"""The declarations of models of which arrays are not trainable.

States of transforms and optimizers inside a model are not trained. Other parts have two marks:
`paramax.NonTrainable` around a part of the model, and in a class the paths of what is frozen in its
instances:

    class Normalized(eqx.Module):
        __frozen__ = ("mean", "std")

A path freezes everything below it, and may contain `*` and `**`. `trainable=` overrides the marks.
"""

import dataclasses
from typing import Any

import jax

from ..tree.paths import candidates, glob_pattern, leaf_paths
from .resolve import Leaf, Where

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
    parts = jax.tree.leaves(node, is_leaf=lambda x: x is not node and _has_mark(type(x)))
    frozen = [f for x in parts for f in (_frozen(x) if _has_mark(type(x)) else [False])]
    patterns = [glob_pattern(path) for path in _stated(node)]
    if not patterns:
        return frozen
    return [
        f or any(p.fullmatch(prefix) for p in patterns for prefix in _prefixes(path))
        for f, path in zip(frozen, leaf_paths(node), strict=True)
    ]


def _has_mark(cls: type) -> bool:
    return hasattr(cls, "__frozen__") or _is_non_trainable(cls) or _is_state(cls)


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


def _prefixes(path: str) -> list[str]:
    segments = path.split(".")
    return [".".join(segments[: i + 1]) for i in range(len(segments))]
