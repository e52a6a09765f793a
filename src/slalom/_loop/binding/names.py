"""A name for each array of an optimizer."""

from typing import Any

import jax

from ..._core.fields.hyperparams import all_targets
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.slots import rule_slots, slots


def names_of(transform: AbstractTransform[Any], state: Any, total: int) -> tuple[str, ...]:
    """The full path of each leaf of a transform, its state and the count.

    Hyperparameters are named as in `opt.hyperparams`, and state as in a report of `opt.rebind`. If
    a state or a part of a transform has the name of another leaf, a number is added to it.

    **Arguments:**

    - `transform`, `state`: the transform and its state, with the positions of the leaves as leaves.
    - `total`: the number of leaves. The count is the last one.
    """
    names = [""] * total
    for i, slot in zip(jax.tree.leaves(transform), rule_slots(transform), strict=True):
        names[i] = slot.name
    numbers = []
    for path, part, field in all_targets(transform).values():
        i = getattr(part.module, field.name)
        if isinstance(i, int):
            names[i] = path
            numbers.append(i)
    places = dict(zip(jax.tree.leaves(state), slots(transform, state, ()), strict=True))
    for i, slot in places.items():
        names[i] = slot.name
    names[total - 1] = "count"
    first = dict.fromkeys((*numbers, total - 1, *places))
    taken: set[str] = set()
    for i in (*first, *(i for i in range(total) if i not in first)):
        names[i] = free_name(names[i], taken)
        taken.add(names[i])
    return tuple(names)


def free_name(name: str, taken: set[str]) -> str:
    """The name, with a number added if it is taken."""
    n, free = 2, name
    while free in taken:
        n, free = n + 1, f"{name}_{n}"
    return free
