"""The base class of selectors, and how functions, trees and mappings become selectors.

A selector depends only on structure, paths, shapes and dtypes, so `init` and `update` always agree
on what it selects. The selectors that users call are in `selectors.py`.
"""

import abc
import collections
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import wadler_lindig as wl
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import PyTree

from ..tree.paths import children_of, first_difference
from ..tree.types import Tracer, WhereLike, is_function, is_state

ONLY_SHAPES = (
    "It is called with shapes and dtypes (`jax.ShapeDtypeStruct` leaves), not with values, because "
    "a mask or label must not change between steps."
)

ONE_CALL = (
    "It is called once with the tree, not with each leaf. For a function of a leaf, write "
    "`sl.where.leaf(lambda path, leaf: ...)`."
)


# --- what a selector sees -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The path, shape and dtype of a parameter, as selectors see it, without its value."""

    path: str
    struct: jax.ShapeDtypeStruct
    key_path: tuple[Any, ...]
    tree: Any

    def ancestors(self) -> list[Any]:
        """The nodes on the path from the root to this leaf."""
        node, nodes = self.tree, [self.tree]
        for key in self.key_path[:-1]:
            if isinstance(key, GetAttrKey):
                node = getattr(node, key.name)
            elif isinstance(key, DictKey):
                node = node[key.key]
            elif isinstance(key, SequenceKey):
                node = node[key.idx]
            else:  # of a class without names, such as `jax.tree_util.Partial`
                node = next(child for k, child in children_of(node)[0] if k == key)
            nodes.append(node)
        return nodes


class Where(abc.ABC):
    """A selection of leaves. Selectors combine with `&`, `|` and `~`."""

    @abc.abstractmethod
    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        """A bool or a label for each leaf."""

    def __and__(self, other: WhereLike) -> "Where":
        return _Both((*_operands(self, _Both), as_where(other)))

    def __or__(self, other: WhereLike) -> "Where":
        return _Either((*_operands(self, _Either), as_where(other)))

    def __invert__(self) -> "Where":
        return _Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "A selector has no truth value. Combine selectors with `&`, `|` and `~` instead of "
            "`and`, `or` and `not`."
        )

    # JAX sorts the keys of dicts, and Equinox flattens the arguments of every module, such as
    # those of `sl.Orthogonalize(layout={where: "io", other: "oi"})`. Any order will do.
    def __lt__(self, other: Any) -> bool:
        return repr(self) < repr(other)

    def __gt__(self, other: Any) -> bool:
        return repr(self) > repr(other)

    def primitives(self) -> tuple["Where", ...]:
        """The selectors that this one combines; for a primitive selector, itself."""
        return (self,)

    sees_dtypes: bool = False
    """Whether the selection depends on dtypes, which updates need not share with the parameters."""

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(repr(self))

    unmatched: str | None = None
    """The error message if it selects nothing in a whole model, if that is always a mistake."""

    unmatched_among: str | None = None
    """The error message if `self & other` selects nothing, if that is always a mistake."""


@dataclasses.dataclass(frozen=True)
class _AbstractCombined(Where):
    operands: tuple[Where, ...]

    symbol: ClassVar[str]
    of: ClassVar[Callable[[Iterable[bool]], bool]]
    """Whether a leaf is selected, from whether each operand selects it."""

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        chosen = zip(*(resolve_bools(x, leaves) for x in self.operands), strict=True)
        return [type(self).of(each) for each in chosen]

    def primitives(self) -> tuple[Where, ...]:
        return tuple(primitive for x in self.operands for primitive in x.primitives())

    def __repr__(self) -> str:
        looser = _AbstractCombined if isinstance(self, _Both) else _Either
        return f" {self.symbol} ".join(_operand(x, looser) for x in self.operands)


class _Both(_AbstractCombined):
    symbol, of = "&", all

    def primitives(self) -> tuple[Where, ...]:
        # It comes last: a path that matches nothing is the better message.
        return super().primitives() + (() if self.unmatched is None else (self,))

    @property
    def unmatched(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # only read
        return self.operands[0].unmatched_among


class _Either(_AbstractCombined):
    symbol, of = "|", any


@dataclasses.dataclass(frozen=True)
class _Not(Where):
    inner: Where

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        return [not b for b in resolve_bools(self.inner, leaves)]

    def primitives(self) -> tuple[Where, ...]:
        return self.inner.primitives()

    def __repr__(self) -> str:
        return f"~{_operand(self.inner, _AbstractCombined)}"


def _operand(where: Where, looser: Any) -> str:
    """The code of an operand, in parentheses if its own operator binds less tightly."""
    return f"({where!r})" if isinstance(where, looser) else repr(where)


def _operands(where: Where, kind: type[_AbstractCombined]) -> tuple[Where, ...]:
    """The operands of a longer combination. Nested pairs would be too deep with hundreds of
    them."""
    return where.operands if isinstance(where, kind) else (where,)


# --- functions and trees as selectors -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _TreeFunction(Where):
    """A user's function of the whole parameter tree."""

    function: Callable[[Any], Any]

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        if not leaves:
            return []
        tree = leaves[0].tree
        try:
            result = self.function(tree)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"The function {self!r} failed on the parameter tree: "
                f"{str(error).rstrip('.')}. {ONLY_SHAPES} {ONE_CALL}"
            ) from error
        if result is False and len(leaves) > 1:
            raise TypeError(
                f"The function {self!r} returned False for the whole parameter tree, so it would "
                f"select nothing. {ONE_CALL} To select nothing, write `sl.where.nothing()`."
            )

        def call(arrays: PyTree) -> tuple[Hashable, ...]:
            return _FrozenTree.freeze(self.function(arrays)).values

        frozen = _FrozenTree.freeze(result)
        check_arrays_give_no_more(self, call, tree, frozen.values)
        return frozen.evaluate(leaves)

    def __repr__(self) -> str:
        return function_name(self.function)


@dataclasses.dataclass(frozen=True)
class _FrozenTree(Where):
    """A user's tree, or prefix, of bools or labels, frozen."""

    structure: Any
    values: tuple[Hashable, ...]
    kinds: tuple[type, ...]  # 1 == True, so the cache needs the types to tell them apart

    def __reduce__(self) -> Any:
        # JAX cannot pickle the structure of a tree of modules, but a tree with this structure can
        # be pickled.
        return _FrozenTree.freeze, (self.structure.unflatten(self.values),)

    @classmethod
    def freeze(cls, tree: PyTree) -> "_FrozenTree":
        values, structure = jax.tree.flatten(tree)
        values = tuple(_concrete(v) for v in values)
        return cls(structure, values, tuple(type(v) for v in values))

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        if not leaves:
            return []
        must = (
            "The tree of masks or labels must have the structure of the parameters, or be a prefix "
            "of it"
        )
        tree, names = self.structure.unflatten(self.values), ("the mask", "the parameters")
        return values_like(tree, leaves[0].tree, names, must)

    def __repr__(self) -> str:
        text = repr(self.structure.unflatten(self.values))
        if "\n" not in text:
            return text
        # A whole model with a bool at each leaf is no code either, and much longer.
        counts = collections.Counter(map(repr, self.values))
        return f"<{', '.join(f'{name}: {n}' for name, n in counts.items())}>"


def values_like(tree: PyTree, params: PyTree, names: tuple[str, str], must: str) -> list[Any]:
    """The value for each parameter, from a tree like the model or a prefix of it.

    **Arguments:**

    - `tree`: the tree. It may have anything where the parameters have no leaf, such as at a
        function of the model.
    - `params`: the parameters.
    - `names`: the names of both in the error for another structure.
    - `must`: the beginning of this error.
    """
    tree = _without_state(tree, params)
    values, structure = jax.tree.flatten(tree)
    try:
        parts = structure.flatten_up_to(params)
    except ValueError:
        raise ValueError(f"{must}: {first_difference(tree, params, names)}.") from None
    return [value for value, part in zip(values, parts, strict=True) for _ in jax.tree.leaves(part)]


def _without_state(tree: PyTree, params: PyTree) -> PyTree:
    """A tree like a model, with `None` in place of each `eqx.nn.State` and `eqx.nn.StateIndex` if
    the parameters have none."""

    def has_none(x: PyTree) -> bool:
        return not any(map(is_state, jax.tree.leaves(x, is_leaf=is_state)))

    if has_none(tree) or not has_none(params):
        return tree
    return jax.tree.map(lambda x: None if is_state(x) else x, tree, is_leaf=is_state)


_INSTEAD = {
    True: "A selection must be known when a program is traced, so make the tree outside of it.",
    False: "A selection takes whole leaves, so write a bool for each, such as `bool(leaf.any())`.",
}


def _concrete(value: Any) -> Any:
    if isinstance(value, np.bool_ | np.ndarray) and (value.shape, value.dtype) == ((), np.bool_):
        return bool(value)
    if isinstance(value, jax.Array | np.ndarray):
        is_traced = isinstance(value, Tracer)
        raise TypeError(
            f"A mask or label must be a Python value, got {'a traced' if is_traced else 'an'} "
            f"array of dtype {value.dtype} and shape {value.shape}. {_INSTEAD[is_traced]} To mask "
            "single entries, multiply the updates: `tx | sl.Stateless(lambda updates, params: "
            "jax.tree.map(jnp.multiply, updates, masks))`."
        )
    return value


def function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def check_arrays_give_no_more(
    where: Where, call: Callable[[Any], Iterable[Any]], structs: Any, answers: Iterable[Any]
) -> None:
    """Raises an error if a user's function selects more where it sees arrays instead of shapes.

    `answers` are those of `call` for shapes.
    """
    of_arrays: list[Any] = []
    try:
        jax.eval_shape(lambda arrays: of_arrays.extend(call(arrays)), structs)
    except Exception:
        # The function was written for shapes.
        return
    for answer, other in zip(answers, of_arrays, strict=False):
        if answer is not True and other != answer:
            raise TypeError(
                f"The function of {where!r} tests whether leaves are arrays. It sees "
                "`jax.ShapeDtypeStruct`s in place of arrays, for which `eqx.is_array` and "
                "`eqx.is_inexact_array` are False: test `leaf.ndim` or `leaf.dtype`."
            )


# --- conversion to selectors ----------------------------------------------------------------


def as_where(where: WhereLike) -> Where:
    """Converts a `where` argument to a selector."""
    if isinstance(where, Where):
        return where
    if isinstance(where, str):
        raise TypeError(
            f"A string is not a selector, got {where!r}. Write `sl.where.path({where!r})`."
        )
    if isinstance(where, list | tuple) and where and all(isinstance(w, str) for w in where):
        paths = " | ".join(f"sl.where.path({path!r})" for path in where[:2])
        raise TypeError(f"A list of strings is not a selector, got {where!r}. Write `{paths}`.")
    if where is None:
        raise TypeError("None is not a selector. Write `sl.where.everything()` or `.nothing()`.")
    # A callable module is a tree of bools, not a function.
    if jax.tree_util.all_leaves([where]) and is_function(where):
        if str(getattr(where, "__module__", "")).startswith(f"{__package__}."):
            name = f"sl.where.{where.__name__}"
            raise TypeError(
                f"{name} makes a selector, and is not one itself. Call it: "
                f"`{name}({'...' * bool(inspect.signature(where).parameters)})`."
            )
        return _TreeFunction(where)
    return _FrozenTree.freeze(where)


def as_where_or_none(where: WhereLike | None) -> Where | None:
    """Like `as_where`, for an optional argument."""
    return None if where is None else as_where(where)


@dataclasses.dataclass(frozen=True)
class Cases(Where):
    """The label of the first selector that matches a leaf, and `rest` if none matches."""

    cases: tuple[tuple[Where, Hashable], ...]
    rest: Hashable = None

    def __repr__(self) -> str:
        cases = ", ".join(f"{where!r}: {label!r}" for where, label in self.cases)
        return f"{{{cases}}}" + (f", otherwise {self.rest!r}" if self.rest is not None else "")

    def evaluate(self, leaves: list[Leaf]) -> list[Any]:
        labels: list[Any] = [self.rest] * len(leaves)
        for where, label in reversed(self.cases):
            chosen = resolve_bools(where, leaves)
            labels = [label if c else old for c, old in zip(chosen, labels, strict=True)]
        return labels

    def primitives(self) -> tuple[Where, ...]:
        return tuple(primitive for where, _ in self.cases for primitive in where.primitives())


def as_labels(labels: Any) -> Where:
    """Labels from a tree, a prefix, a function, or a mapping from selectors to labels."""
    if isinstance(labels, Mapping) and any(isinstance(k, Where) or is_function(k) for k in labels):
        return Cases(tuple((as_where(where), label) for where, label in labels.items()))
    is_tree = isinstance(labels, str | list | tuple)
    return _FrozenTree.freeze(labels) if is_tree else as_where(labels)


def resolve_bools(where: Where, leaves: list[Leaf]) -> list[bool]:
    chosen = where.evaluate(leaves)
    for leaf, value in zip(leaves, chosen, strict=True):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"A mask must consist of bools, got {value!r} of type {type(value).__name__} "
                f"at '{leaf.path}' from {where!r}."
            )
    return [bool(value) for value in chosen]
