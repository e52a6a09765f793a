"""The one path grammar: dotted names of leaves, links and hyperparameters, and globs over them."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree


def dotted(key_path: Sequence[Any]) -> str:
    """A JAX key path as a dotted name: fields, dict keys and indices joined by dots."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator=".")


@dataclasses.dataclass(frozen=True)
class HalfKey:
    """The key of the real or the imaginary part, in trees that have both in place of a leaf."""

    name: str

    def __str__(self) -> str:
        return self.name  # what `dotted` shows


def whole(key_path: Sequence[Any]) -> tuple[Any, ...]:
    """The key path of the parameter itself, where one leads to its real or imaginary part."""
    return tuple(key for key in key_path if not isinstance(key, HalfKey))


def half_of(key_path: Sequence[Any]) -> str:
    """Which part of a complex parameter a key path leads to; `''` for the whole."""
    return next((key.name for key in key_path if isinstance(key, HalfKey)), "")


def leaf_paths(tree: PyTree, is_leaf: Any = None) -> list[str]:
    """The dotted name of each leaf, in order. A tree that is one leaf has the name `''`."""
    return [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def example(structure: Any) -> PyTree:
    """A tree of this structure: its leaves are their own positions."""
    return structure.unflatten(range(structure.num_leaves))


def snake_case(name: str) -> str:
    """`ClipByGlobalNorm` → `clip_by_global_norm`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def glob_pattern(glob: str) -> re.Pattern[str]:
    """A glob over dotted names: `*` stays within a segment, `**` spans any number of them."""
    pattern = ""
    segments = glob.split(".")
    for i, segment in enumerate(segments):
        last = i == len(segments) - 1
        if segment == "**":
            # Takes its own dot along, so that it can also stand for no segment at all.
            pattern += r"(?:[^.]+(?:\.[^.]+)*)?" if last else r"(?:[^.]+\.)*"
        else:
            # A segment that is only `*` must be there; within a name it may be empty.
            part = r"[^.]+" if segment == "*" else re.escape(segment).replace(r"\*", r"[^.]*")
            pattern += part
            if not last:
                pattern += r"(?:\.|$)" if segments[i + 1 :] == ["**"] else r"\."
    return re.compile(pattern)


def has_suffix(path: str, suffix: str) -> bool:
    """Whether `path` ends with `suffix`, segment by segment."""
    return path == suffix or path.endswith("." + suffix)


def candidates(name: str, known: Iterable[str], limit: int = 8) -> str:
    """Those of `known` that a message should offer instead of `name`, the closest first."""
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, known, n=limit, cutoff=0.4)
    # A short name is often meant as the last segment of a long one.
    close += [k for k in known if k not in close and name.split(".")[-1] in k]
    listed = (close + [k for k in known if k not in close])[:limit]
    text = ", ".join(f"'{k}'" for k in listed)
    more = len(known) - len(listed)
    return (text or "none") + (f" and {more} more" if more > 0 else "")


def first_difference(left: PyTree, right: PyTree, names: tuple[str, str]) -> str:
    """Where two trees, called by their names, first differ in structure, in words."""
    here, there = names
    if type(left) is not type(right):
        verb, kinds = "are" if here.endswith("s") else "is", (type(left), type(right))
        return f"{here} {verb} of type {kinds[0].__name__}, {there} of type {kinds[1].__name__}"
    lefts, rights = leaf_paths(left), leaf_paths(right)
    for ours, theirs, own, other in ((lefts, rights, here, there), (rights, lefts, there, here)):
        for path in ours:
            if path not in theirs:
                return f"'{path}' is in {own} and missing in {other}"
    return _other_node(left, right, names, "") or "a container inside differs"


def _other_node(left: Any, right: Any, names: tuple[str, str], path: str) -> str | None:
    """Where two trees with equal leaves differ in a node's type or static field, in words."""
    here, there = names
    at = f"'{path}' " if path else ""
    if type(left) is not type(right):
        kinds = type(left).__name__, type(right).__name__
        return f"{at}is of type {kinds[0]} in {here} and of type {kinds[1]} in {there}"
    for field in dataclasses.fields(left) if dataclasses.is_dataclass(left) else ():
        a, b = getattr(left, field.name, None), getattr(right, field.name, None)
        if field.metadata.get("static", False) and a is not b and a != b:
            return f"'{path}{'.' * bool(path)}{field.name}' is {a!r} in {here} and {b!r} in {there}"
    children = [
        jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x, node=node: x is not node)
        for node in (left, right)
    ]
    for (key, a), (_, b) in zip(*children, strict=False):
        if jax.tree_util.all_leaves([a, b]):
            continue
        found = _other_node(a, b, names, ".".join(filter(None, (path, dotted(key)))))
        if found:
            return found
    return None
