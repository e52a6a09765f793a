"""Names for the arrays of optimizers, in messages and checkpoints."""

from collections.abc import Container
from typing import Any

import jax

from ..._core.fields.hyperparams import all_targets
from ..._core.state.slots import rule_slots, slots
from ...tree.captures import cached
from ...tree.packed import unpack
from ...tree.paths import dotted
from ...tree.types import PyTree
from .binding import Arrays


class Position(int):
    """The position of an array, which takes its place in a tree."""


def positions(structure: Any) -> Arrays:
    """The parts of an optimizer whose `Arrays` have this structure, with positions as leaves."""
    return Arrays(*map(unpack, structure.unflatten(map(Position, range(structure.num_leaves)))))


def named_arrays(arrays: Arrays) -> dict[str, Any]:
    """The arrays of an optimizer by their full paths."""
    leaves, structure = jax.tree.flatten(arrays)
    return dict(zip(_names(structure), leaves, strict=True))


def named_leaves(given: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree by their dotted paths. Those of optimizers have their full paths."""
    named: list[tuple[str, Any]] = []
    nodes = jax.tree_util.tree_leaves_with_path(given, is_leaf=lambda x: isinstance(x, Arrays))
    for path, node in nodes:
        if isinstance(node, Arrays):
            inside = named_arrays(node).items()  # in the field `arrays` of an optimizer
            named += ((".".join(filter(None, (dotted(path[:-1]), n))), x) for n, x in inside)
        else:
            named.append((dotted(path), node))
    return named


@cached(maxsize=256)
def _names(structure: Any) -> tuple[str, ...]:
    """The full path of each array.

    Hyperparameters are named as in `opt.hyperparams`, and state as in a report of `opt.rebind`. If
    a state or a part of a transform has the name of another array, a number is added to it.
    """
    transform, state, count = positions(structure)
    numbers = {
        i: path
        for path, part, field in all_targets(transform).values()
        if isinstance(i := getattr(part.module, field.name), Position)
    }
    own = zip(jax.tree.leaves(state), slots(transform, state, ()), strict=True)
    rest = zip(jax.tree.leaves(transform), rule_slots(transform), strict=True)
    places = {i: slot.name for i, slot in (*own, *rest) if isinstance(i, Position)}
    names: dict[str, int] = {}
    for i, name in (numbers | {count: "count"} | places | numbers).items():
        names[free_name(name, names)] = i
    return tuple(sorted(names, key=names.__getitem__))


def free_name(name: str, taken: Container[str]) -> str:
    """The name, with a number added if it is taken."""
    n, free = 2, name
    while free in taken:
        n, free = n + 1, f"{name}_{n}"
    return free
