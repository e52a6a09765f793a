"""The algebra of selectors, and the resolving of masks and labels from them.

A selector is resolved from structure, paths, shapes and dtypes alone, so what `init` saw and
what `update` sees cannot differ. The selectors themselves are in `where.py`.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np
import wadler_lindig as wl
from jaxtyping import PyTree

from .._paths import candidates, dotted, first_difference, leaf_paths, whole
from .._types import Params, Tracer, Updates

WhereLike: TypeAlias = Any
"""A selector, a function of the parameter tree to a tree of bools, or a tree of bools."""


ONLY_SHAPES = (
    "It sees shapes and dtypes (`jax.ShapeDtypeStruct` leaves), never values: a mask or label that "
    "depended on values could change between two steps."
)


# --- what a selector sees -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter as a selector sees it: no value, only where it stands and what it is."""

    path: str
    struct: jax.ShapeDtypeStruct
    key_path: tuple[Any, ...]
    tree: Any

    def owners(self) -> list[Any]:
        """The nodes on the way from the root down to this leaf, as far as keys can tell."""
        node, nodes = self.tree, [self.tree]
        for key in self.key_path[:-1]:
            if hasattr(key, "name"):
                node = getattr(node, key.name)
            elif hasattr(key, "key"):
                node = node[key.key]
            elif hasattr(key, "idx"):
                node = node[key.idx]
            else:
                break
            nodes.append(node)
        return nodes


class Where(abc.ABC):
    """A selection of leaves. Joined with `&`, `|` and `~`."""

    @abc.abstractmethod
    def picks(self, leaves: list[Leaf]) -> list[Any]:
        """What this assigns to each leaf: a bool, or a label."""

    def __and__(self, other: WhereLike) -> "Where":
        return _Both(self, as_where(other))

    def __or__(self, other: WhereLike) -> "Where":
        return _Either(self, as_where(other))

    def __invert__(self) -> "Where":
        return _Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "A selector is neither true nor false. Join selectors with `&`, `|` and `~` instead of "
            "`and`, `or` and `not`."
        )

    def atoms(self) -> tuple["Where", ...]:
        """The selectors this one is joined from."""
        return (self,)

    sees_dtypes: ClassVar[bool] = False
    """Whether what it selects depends on the parameters' dtypes, which updates do not share."""

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(repr(self))

    unmatched: ClassVar[str | None] = None
    """What to say where this selects nothing of a whole model, if that can only be a mistake."""


@dataclasses.dataclass(frozen=True)
class _Both(Where):
    left: Where
    right: Where

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [a and b for a, b in _pairs(self.left, self.right, leaves)]

    def atoms(self) -> tuple[Where, ...]:
        return self.left.atoms() + self.right.atoms()

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclasses.dataclass(frozen=True)
class _Either(Where):
    left: Where
    right: Where

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [a or b for a, b in _pairs(self.left, self.right, leaves)]

    def atoms(self) -> tuple[Where, ...]:
        return self.left.atoms() + self.right.atoms()

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclasses.dataclass(frozen=True)
class _Not(Where):
    inner: Where

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        return [not b for b in resolve_bools(self.inner, leaves)]

    def atoms(self) -> tuple[Where, ...]:
        return self.inner.atoms()

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


def _pairs(left: Where, right: Where, leaves: list[Leaf]) -> list[tuple[bool, bool]]:
    return list(zip(resolve_bools(left, leaves), resolve_bools(right, leaves), strict=True))


# --- functions and trees as selectors -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Function(Where):
    """A user's function of the whole parameter tree."""

    function: Callable[[Any], Any]

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        tree = leaves[0].tree if leaves else None
        try:
            result = self.function(tree)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"The function {self!r} failed on the parameter tree: {error}. {ONLY_SHAPES}"
            ) from error
        return _Tree.freeze(result).picks(leaves)

    def __repr__(self) -> str:
        return function_name(self.function)


@dataclasses.dataclass(frozen=True)
class _Tree(Where):
    """A user's tree, or prefix, of bools or labels, frozen."""

    structure: Any
    values: tuple[Hashable, ...]
    kinds: tuple[type, ...]  # 1 == True: without the types a memo would mix them up

    def __reduce__(self) -> Any:
        # JAX does not pickle the structure of a tree of modules, but any tree that has it can be.
        return _Tree.freeze, (self.structure.unflatten(self.values),)

    @classmethod
    def freeze(cls, tree: PyTree) -> "_Tree":
        values, structure = jax.tree.flatten(tree)
        values = tuple(_concrete(v) for v in values)
        return cls(structure, values, tuple(type(v) for v in values))

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        if not leaves:
            return []
        try:
            parts = self.structure.flatten_up_to(leaves[0].tree)
        except ValueError:
            own = self.structure.unflatten(self.values)
            differ = first_difference(own, leaves[0].tree, ("the mask", "the parameters"))
            raise ValueError(
                "The mask or label tree is neither a tree like the parameters nor a prefix of "
                f"one: {differ}."
            ) from None
        return [
            value
            for value, part in zip(self.values, parts, strict=True)
            for _ in jax.tree.leaves(part)
        ]

    def __repr__(self) -> str:
        return repr(self.structure.unflatten(self.values))


def _concrete(value: Any) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            "A mask or label must be a Python value, got "
            f"{'a traced' if isinstance(value, Tracer) else 'an'} array of dtype "
            f"{value.dtype}. What is selected must be known before anything is computed: decide "
            "by path, shape or dtype, for example `sl.where.ndim(min=2)`."
        )
    return value


def function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


# --- from what the user gave to a selector --------------------------------------------------


def as_where(where: WhereLike) -> Where:
    """A selector from whatever is accepted as `where`."""
    if isinstance(where, Where):
        return where
    if isinstance(where, str):
        raise TypeError(
            f"A string is no selector, got {where!r}. Write `sl.where.path({where!r})`."
        )
    if where is None:
        raise TypeError("None is no selector. Write `sl.where.everything()`, or `.nothing()`.")
    # A module is a tree although it may be callable: law 7.
    if jax.tree_util.all_leaves([where]) and callable(where):
        return _Function(where)
    return _Tree.freeze(where)


@dataclasses.dataclass(frozen=True)
class Cases(Where):
    """The label of the first selector that matches; `rest`, where given, for the others."""

    cases: tuple[tuple[Where, Hashable], ...]
    rest: Hashable = None

    def picks(self, leaves: list[Leaf]) -> list[Any]:
        labels: list[Any] = [self.rest] * len(leaves)
        for where, label in reversed(self.cases):
            chosen = resolve_bools(where, leaves)
            labels = [label if c else old for c, old in zip(chosen, labels, strict=True)]
        return labels

    def atoms(self) -> tuple[Where, ...]:
        return tuple(atom for where, _ in self.cases for atom in where.atoms())


def as_labels(labels: Any) -> Where:
    """A labelling from a tree, a prefix, a function, or a mapping of selectors to labels."""
    if isinstance(labels, Mapping) and any(isinstance(k, Where) for k in labels):
        return Cases(tuple((as_where(where), label) for where, label in labels.items()))
    return _Tree.freeze(labels) if isinstance(labels, str) else as_where(labels)


# --- resolving ------------------------------------------------------------------------------


def mask(where: Where, params: Params) -> tuple[bool, ...]:
    """Which leaves of the parameters, in order, are selected. Memoised."""
    return resolve(resolve_bools, where, params)


def selected_from(where: Where, updates: Updates, params: Params | None) -> Params:
    """What a selector is asked about in `update`: the parameters, or updates in their place."""
    if params is not None:
        return params
    for atom in where.atoms():
        if atom.sees_dtypes:
            raise TypeError(
                f"{atom!r} selects by the parameters' dtypes, and updates have their own: pass "
                "the parameters: `tx.update(grads, state, params)`."
            )
    return updates


def labels(where: Where, params: Params) -> tuple[Hashable, ...]:
    """The label of each leaf of the parameters, in order. Memoised."""
    return resolve(_labels, where, params)


def check_matches(where: Where, params: Params) -> None:
    """Refuses a path or regex that selects nothing in the whole bound tree."""
    for atom in where.atoms():
        if atom.unmatched is not None and not any(mask(atom, params)):
            paths = candidates("", leaf_paths(params))
            raise ValueError(f"{atom!r} {atom.unmatched} Paths here: {paths}.")


def resolve_bools(where: Where, leaves: list[Leaf]) -> list[bool]:
    chosen = where.picks(leaves)
    for leaf, value in zip(leaves, chosen, strict=True):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"A mask must hold bools, got {value!r} of type {type(value).__name__} "
                f"at '{leaf.path}' from {where!r}."
            )
    return [bool(value) for value in chosen]


def _labels(where: Where, leaves: list[Leaf]) -> list[Hashable]:
    return where.picks(leaves)


def resolve(kind: Any, where: Any, params: Params) -> tuple[Any, ...]:
    """`kind(where, leaves)`, a value for each leaf, memoised by structure, shapes and dtypes."""
    arrays, structure = jax.tree.flatten(params)
    shapes = tuple((tuple(np.shape(x)), np.dtype(x.dtype)) for x in arrays)
    try:
        return _resolve_memoised(kind, where, structure, shapes)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _resolve_memoised.__wrapped__(kind, where, structure, shapes)


@functools.lru_cache(maxsize=1024)
def _resolve_memoised(kind: Any, where: Any, structure: Any, shapes: Any) -> tuple[Any, ...]:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    tree = structure.unflatten(structs)
    leaves = [
        Leaf(dotted(whole(key_path)), struct, whole(key_path), tree)
        for key_path, struct in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return tuple(kind(where, leaves))
