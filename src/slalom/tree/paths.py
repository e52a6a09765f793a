"""Dotted paths of leaves, links and hyperparameters, globs over them, and checks that name them."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .dtypes import is_array, is_inexact
from .types import PyTree

_MOST_CANDIDATES = 8


def dotted(key_path: Sequence[Any]) -> str:
    """A JAX key path as a dotted path: field names, dict keys and indices joined by dots."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator=".")


@dataclasses.dataclass(frozen=True)
class _AbstractKey:
    name: str

    def __str__(self) -> str:
        return self.name  # what `dotted` shows


class HalfKey(_AbstractKey):
    """The key of the real or imaginary part of a complex leaf that was split into both."""


class CodeKey(_AbstractKey):
    """The key of an array that an encoded leaf consists of."""


def whole(key_path: Sequence[Any]) -> tuple[Any, ...]:
    """The key path of the parameter at or above a key path."""
    return tuple(key for key in key_path if not isinstance(key, HalfKey | CodeKey))


def half_of(key_path: Sequence[Any]) -> str:
    """The name of the half of a complex parameter that a key path leads to; `''` for the whole."""
    return next((key.name for key in key_path if isinstance(key, HalfKey)), "")


def leaf_paths(tree: PyTree) -> list[str]:
    """The dotted path of each leaf, in order. The path of a tree that is a single leaf is `''`."""
    return [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def children_of(node: PyTree) -> tuple[list[tuple[Any, Any]], Any]:
    """The keys and the children of a node, as JAX sees it, and its structure around them."""
    children, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node
    )
    return [(path[0], child) for path, child in children if path], structure


def example(structure: Any) -> PyTree:
    """A tree of this structure whose leaves are their own positions."""
    return structure.unflatten(range(structure.num_leaves))


def snake_case(name: str) -> str:
    """`ClipByGlobalNorm` → `clip_by_global_norm`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def glob_pattern(glob: str) -> re.Pattern[str]:
    """Compiles a glob over dotted paths: `*` matches within a segment, `**` any number of them."""
    pattern, opened = "", False
    segments = glob.split(".")
    for i, segment in enumerate(segments):
        last = i == len(segments) - 1
        if segment == "**":
            pattern += ")" * opened
            # Up to another `**` the first match is as good as any, and the only one that is tried:
            # trying all of them would take minutes.
            opened = "**" in segments[i + 1 :]
            # Includes its own dot, so that it can also match no segment.
            several = r"(?>(?:[^.]+\.)*?" if opened else r"(?:[^.]+\.)*"
            pattern += r"(?:[^.]+(?:\.[^.]+)*)?" if last else several
        else:
            # A segment `*` must not be empty; within a segment, `*` may match nothing.
            part = r"[^.]+" if segment == "*" else re.escape(segment).replace(r"\*", r"[^.]*")
            pattern += part
            if not last:
                pattern += r"(?:\.|$)" if segments[i + 1 :] == ["**"] else r"\."
    return re.compile(pattern)


def has_suffix(path: str, suffix: str) -> bool:
    """Whether `path` ends with `suffix`, segment by segment."""
    return path == suffix or path.endswith("." + suffix)


def named(name: str, paths: Collection[str]) -> list[str]:
    """The paths that a name means: itself, or all that end with it."""
    if not isinstance(name, str):
        raise TypeError(
            f"A path is a string such as 'learning_rate', got {name!r} of type "
            f"{type(name).__name__}. Known paths: {candidates('', paths)}."
        )
    return [name] if name in paths else [p for p in paths if has_suffix(p, name)]


def not_one(
    name: str | type,
    matches: Collection[str],
    paths: Iterable[str],
    missing: str = "is not known",
    advice: str = "",
) -> KeyError:
    """The error for a name, or a class, that means several of the known paths, or none."""
    quoted = f"'{name}'" if isinstance(name, str) else name.__name__
    what = "is ambiguous" if matches else missing
    listed = candidates(str(name), matches or paths)
    return KeyError(f"{quoted} {what}. Candidates: {listed}.{advice}")


def candidates(name: str, paths: Iterable[str]) -> str:
    """The paths to suggest instead of `name`, closest first, as text for a message."""
    paths = list(dict.fromkeys(paths))
    close = difflib.get_close_matches(name, paths, n=_MOST_CANDIDATES, cutoff=0.4)
    # A short name often means the last segment of a longer one.
    close += [p for p in paths if p not in close and name.split(".")[-1] in p]
    listed = (close + [p for p in paths if p not in close])[:_MOST_CANDIDATES]
    text = ", ".join(f"'{p}'" for p in listed)
    more = len(paths) - len(listed)
    return (text or "none") + (f" and {more} more" if more > 0 else "")


def first_difference(left: PyTree, right: PyTree, names: tuple[str, str]) -> str:
    """Describes the first difference in structure between two trees with the given names."""
    here, there = names
    if type(left) is not type(right):
        verb = "are" if here.endswith("s") else "is"
        return f"{here} {verb} {_kind(left)}, {there} {_kind(right)}"
    lefts, rights = leaf_paths(left), leaf_paths(right)
    for ours, theirs, one, other in ((lefts, rights, here, there), (rights, lefts, there, here)):
        for path in ours:
            if path not in theirs:
                return f"'{path}' is in {one} but not in {other}"
    return _other_node(left, right, names, "") or "a container differs"


def _kind(tree: PyTree) -> str:
    # The class of an array says little, and nothing inside a program.
    shape = getattr(tree, "shape", None)
    return f"of type {type(tree).__name__}" if shape is None else f"an array of shape {shape}"


def _other_node(left: Any, right: Any, names: tuple[str, str], path: str) -> str | None:
    """Describes the first node whose type or static field differs, in trees with equal leaves."""
    here, there = names
    at = f"'{path}' " if path else ""
    if type(left) is not type(right):
        kinds = type(left).__name__, type(right).__name__
        return f"{at}is of type {kinds[0]} in {here} and of type {kinds[1]} in {there}"
    for field in dataclasses.fields(left) if dataclasses.is_dataclass(left) else ():
        a, b = getattr(left, field.name, None), getattr(right, field.name, None)
        if field.metadata.get("static", False) and a is not b and a != b:
            return f"'{path}{'.' * bool(path)}{field.name}' is {a!r} in {here} and {b!r} in {there}"
    for (key, a), (_, b) in zip(children_of(left)[0], children_of(right)[0], strict=False):
        if jax.tree_util.all_leaves([a, b]):
            continue
        difference = _other_node(a, b, names, ".".join(filter(None, (path, dotted([key])))))
        if difference:
            return difference
    return None


def check_inexact(tree: PyTree) -> None:
    """Raises if a leaf is not a floating or complex array."""
    if all(map(is_inexact, jax.tree.leaves(tree))):
        return  # Paths are only needed for messages, and cost more than all else here.
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not is_inexact(x):
            if isinstance(x, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"The leaf '{dotted(path)}' is a `jax.ShapeDtypeStruct`, and `init` makes "
                    "arrays. Write `eqx.filter_eval_shape(tx.init, params)` for an abstract state, "
                    "or `sl.Optimizer(tx, model)`, which takes abstract models."
                )
            kind = f"an array of dtype {x.dtype}" if is_array(x) else f"of type {type(x).__name__}"
            raise TypeError(
                f"The leaf '{dotted(path)}' is {kind}; parameters and gradients must be trees "
                "of floating or complex arrays. Create the optimizer with the whole model, "
                "`sl.Optimizer(tx, model)`, which skips everything else, or pass "
                "`eqx.filter(model, eqx.is_inexact_array)`."
            )


def check_real(tree: PyTree, why: str, instead: str) -> None:
    """Raises if a leaf is complex, for this reason and with this advice."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if np.iscomplexobj(x):
            raise TypeError(f"{why}, but '{dotted(path)}' is {x.dtype}. {instead}")


def check_same_structure(trees: tuple[PyTree, ...]) -> None:
    """Raises if the trees differ in structure or in the shape of a leaf."""
    first, *others = trees
    check_inexact(first)
    advice = " Pass gradients, state and parameters of the same model."
    for other in others:
        check_same_shapes(first, other, "state or parameter", advice)


def check_same_shapes(
    updates: PyTree, others: PyTree, what: str, advice: str = "", of: str = ""
) -> None:
    """Raises if the updates `of` something differ from `others` in structure or in the shape of a
    leaf."""
    if jax.tree.structure(updates) != jax.tree.structure(others):
        differ = first_difference(updates, others, ("the updates", f"the {what}s"))
        raise ValueError(f"The updates{of} differ in structure from the {what}s: {differ}.{advice}")
    leaves, rest = jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(others)
    for (path, u), other in zip(leaves, rest, strict=True):
        if np.shape(u) != np.shape(other):
            raise ValueError(
                f"The update{of} at '{dotted(path)}' has shape {np.shape(u)}, but the {what} there "
                f"has shape {np.shape(other)}. Shapes must be equal: nothing is broadcast."
            )
