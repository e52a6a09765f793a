"""Declares which fields of a state belong to the parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from ...tree.paths import children_of
from ...tree.types import PyTree
from ...where.masks import MARK
from ..engine.encoded import is_encoded
from ..text.calls import call, check_function

PARAM_LIKE, PER_PARAM, PER_LEAF = "param_like", "per_param", "per_leaf"
SPREAD, UNTIL_RESET = "spread", "until_reset"
_STORED = "slalom.stored"
SIGNED, NONNEGATIVE, EXACT, COPY = "signed", "nonnegative", "exact", "copy"
REDUCED = "reduced"
_State = TypeVar("_State")


# --- declarations ---------------------------------------------------------------------------


def param_like(stored: str = SIGNED) -> Any:
    """Marks a state field that has the parameters' structure, with an array of the same shape for
    each parameter.

    Inspection, sharding, precision and `sl.map_params` act on the marked fields.

    **Arguments:**

    - `stored`: how `tx.store` may encode the field. A `"signed"` field, such as a mean of
        gradients, tolerates an error that is small compared with its neighbors. A
        `"nonnegative"` one, such as a mean of squares, changes slowly, has a huge range and must
        not become 0, because updates are divided by it. An `"exact"` one, such as a sum over all
        steps, stays as it is unless the user names it. So does a `"copy"` of the parameters,
        with which `opt.rebind(model)` starts again from the model.

    **Returns:** a field, for the body of a state class.
    """
    if stored not in (SIGNED, NONNEGATIVE, EXACT, COPY):
        raise ValueError(
            f"`stored` must be 'signed', 'nonnegative', 'exact' or 'copy', got {stored!r}: how "
            "`tx.store` may encode the field."
        )
    return _marked(PARAM_LIKE, stored)


def per_param(*, spread: bool = False, stored: str | None = None) -> Any:
    """Marks a state field that has arrays of other shapes for each parameter.

    It is a tree like the parameters, with an array or a tree of arrays in place of each leaf.

    **Arguments:**

    - `spread`: whether these arrays are divided among the devices that share their parameter. This
        is for large arrays with axes of their own, such as the factors of Shampoo: the mesh axis
        that divides an axis of the parameter divides the next axis of theirs that it can. It acts
        on automatic axes of a mesh.
    - `stored`: the assumptions that `opt.rebind` may make. `"reduced"` arrays have the axes of
        their parameter, of size 1 where they are means or sums along it, so they move with its
        rows. A `"copy"` is computed from the parameters, such as their norm, and
        `opt.rebind(model)` computes it again.

    **Returns:** a field, for the body of a state class.
    """
    if stored not in (None, REDUCED, COPY):
        raise ValueError(
            f"`stored` must be 'reduced', 'copy' or None, got {stored!r}: what `opt.rebind` may "
            "assume of the field."
        )
    return _marked(SPREAD if spread else PER_PARAM, stored)


def per_leaf() -> Any:
    """Marks a state field that is a vector with an entry for each parameter, or a single number.

    **Returns:** a field, for the body of a state class.
    """
    return _marked(PER_LEAF)


def until_reset() -> Any:
    """Marks a state field that belongs to all parameters together.

    A reset of all parameters restarts it; a reset of some of them keeps it.

    **Returns:** a field, for the body of a state class.
    """
    return _marked(UNTIL_RESET)


def _marked(mark: str, stored: str | None = None) -> Any:
    return eqx.field(metadata={MARK: mark, _STORED: stored or ""})


# --- reading them ---------------------------------------------------------------------------


def marks(node: object) -> dict[str, str]:
    """The marks of a state's fields, by field name. Empty for other values."""
    if isinstance(node, type) or not dataclasses.is_dataclass(node):
        return {}
    return {f.name: f.metadata[MARK] for f in dataclasses.fields(node) if MARK in f.metadata}


def params_like_fields(state: PyTree) -> list[str]:
    """The names of a state's parameter-shaped fields."""
    return [name for name, mark in marks(state).items() if mark == PARAM_LIKE]


def children_by_name(state: PyTree) -> dict[str, Any]:
    """The fields of a state by name. Empty for other values."""
    if not dataclasses.is_dataclass(state):
        return {}
    return {key.name: child for key, child in children_of(state)[0]}


def with_fields(state: PyTree, new: dict[str, Any]) -> PyTree:
    """A state with other values in some fields. The constructor would convert and check them."""
    if not new:
        return state
    children, structure = children_of(state)
    return structure.unflatten([new.get(key.name, child) for key, child in children])


def stored_as(state: PyTree, field: str) -> str:
    """The `stored` of a marked field."""
    (f,) = (f for f in dataclasses.fields(state) if f.name == field)
    return f.metadata[_STORED]


def map_params(
    function: Callable[..., Any],
    state: _State,
    *rest: PyTree,
    other: Callable[[Any], Any] | None = None,
) -> _State:
    """Maps the parameter-shaped fields of a state, at any depth.

    **Arguments:**

    - `function`: called as `function(leaf, *rest_leaves)` at each leaf of every field that was
        declared with `sl.fields.param_like()`.
    - `state`: the state of any transform, an optimizer, or any tree that contains some.
    - `rest`: further trees of the parameters' structure, for `function`.
    - `other`: applied to every other leaf, in an optimizer also to its hyperparameters and count.
        Defaults to keeping them.

    **Returns:** the same tree with those leaves replaced.

    ```python
    >>> params = {"w": jnp.ones(3), "b": jnp.ones(())}
    >>> state = sl.adam(1e-3).init(params)
    >>> sl.map_params(lambda leaf, p: p, state, params)[0].mu["w"]
    Array([1., 1., 1.], dtype=float32)

    ```
    """

    check_function("map_params.function", function, "leaf", "*rest_leaves")
    if other is not None:
        check_function("map_params.other", other, "leaf")

    def has_marks(node: object) -> bool:
        return bool(params_like_fields(node)) or hasattr(type(node), "_map_state")

    def rebuild(node: PyTree) -> PyTree:
        if hasattr(type(node), "_map_state"):
            return node._map_state(lambda x: map_params(function, x, *rest, other=other), other)
        marked = params_like_fields(node)
        if not marked:
            return node if other is None else other(node)
        new = {
            name: _map_marked(function, child, rest)
            if name in marked
            else map_params(function, child, *rest, other=other)
            for name, child in children_by_name(node).items()
        }
        return with_fields(node, new)

    return jax.tree.map(rebuild, state, is_leaf=has_marks)


def _map_marked(function: Callable[..., Any], marked: PyTree, rest: tuple[Any, ...]) -> PyTree:
    """Maps every array of a marked field, and the arrays of an encoded leaf one by one."""

    def at_leaf(leaf: PyTree, *others: PyTree) -> PyTree:
        rest = {f"rest_{i}": x for i, x in enumerate(others)}
        return jax.tree.map(lambda x: call("map_params.function", function, leaf=x, **rest), leaf)

    # Where a mask left `None`, the other trees may have a leaf.
    return jax.tree.map(at_leaf, marked, *rest, is_leaf=lambda x: x is None or is_encoded(x))
