"""The state of a transform with the names of its fields, as `optax.tree.get` finds them.

Optax looks for names in dicts and named tuples. So each state is in a node that is a named tuple
for whoever asks, and for JAX a container of the state, whose marks stay visible.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.tree_util import SequenceKey
from jaxtyping import Array, Int

from .._core.state.marks import children_by_name, marks, with_fields


class OptaxFields(NamedTuple):
    """The state of `to_optax` without the transform."""

    count: Int[Array, "*runs"]  # pyright: ignore[reportIncompatibleMethodOverride]  # Optax's name
    inner_state: Any


class _AbstractNamed(tuple):
    """A state, the only entry of this tuple, whose fields read like the fields of a named tuple."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    def __reduce__(self) -> Any:
        return _named, tuple(self)

    def __repr__(self) -> str:
        return repr(self[0])

    def _replace(self, **fields: Any) -> "_AbstractNamed":
        return _named(with_fields(self[0], fields))


def _named(state: Any) -> _AbstractNamed:
    return _kind(type(state))((state,))


@functools.cache
def _kind(cls: type) -> type[_AbstractNamed]:
    names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static", False)]
    # Properties, because a tuple has methods `count` and `index`.
    fields = {n: property(lambda node, n=n: getattr(node[0], n)) for n in names}
    kind = type(
        cls.__name__, (_AbstractNamed,), {"__slots__": (), "_fields": tuple(names)} | fields
    )
    jax.tree_util.register_pytree_with_keys(
        kind,
        lambda node: (((SequenceKey(0), node[0]),), None),
        lambda _, children: kind(children),
        lambda node: (tuple(node), None),
    )
    return kind


def with_names(state: Any) -> Any:
    """The state with names for each part that has marked fields."""

    def name(node: Any) -> Any:
        if not marks(node):
            return node
        inside = {name: with_names(child) for name, child in children_by_name(node).items()}
        return _named(with_fields(node, inside))

    return jax.tree.map(name, state, is_leaf=lambda node: bool(marks(node)))


def without_names(state: Any) -> Any:
    """Undoes `with_names`."""

    def plain(node: Any) -> Any:
        if not isinstance(node, _AbstractNamed):
            return node
        inside = {name: without_names(x) for name, x in children_by_name(node[0]).items()}
        return with_fields(node[0], inside)

    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, _AbstractNamed))
