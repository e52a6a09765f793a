"""The `eqx.nn.State` of a model, such as the means of batch norm, in and out of a loss."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from ...tree.paths import dotted, first_difference
from ...tree.types import PyTree


class _Place:
    """Stands for a state where it was in `aux`."""


PLACE = _Place()


def is_state(x: Any) -> bool:
    """Whether this is the state of a model, or the place of one."""
    return isinstance(x, eqx.nn.State | _Place)


def states_of(tree: PyTree) -> list[Any]:
    """The states in a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]


def with_states(tree: PyTree, states: Sequence[Any]) -> PyTree:
    """The tree with other states in their places, in order."""
    rest = iter(states)
    return jax.tree.map(lambda x: next(rest) if is_state(x) else x, tree, is_leaf=is_state)


def check_state(new: PyTree, old: PyTree, given: str) -> None:
    """Raises an error for a state that is not like the one that the loss got.

    `given` is the argument that the state was passed as, for the message.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        differ = first_difference(new, old, ("the state that the loss returned", given))
        raise ValueError(f"The loss must return a state like {given}: {differ}.")
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True)
    for (path, x), y in pairs:
        a, b = jax.typeof(x), jax.typeof(y)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"The loss must return a state like {given}, but '{dotted(path)}' was "
                f"{b.str_short()} and is now {a.str_short()}."
            )
