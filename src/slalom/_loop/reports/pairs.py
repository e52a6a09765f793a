"""Pairs the leaves of two states, and compares their windows."""

import collections
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from ..._core.protocol.loss import loss_of
from ..._core.protocol.parts import instances
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.slots import Slot
from ...wrappers import EveryK


def pairs_by_key(old_key: Callable[[Slot], Hashable], new_key: Callable[[Slot], Hashable]) -> Any:
    """A function that pairs old and new leaves by keys which no other leaves of a state have."""

    def by_key(places: Mapping[int, Slot], key: Callable[[Slot], Hashable]) -> dict[Hashable, int]:
        keys = {i: key(slot) for i, slot in places.items()}
        counts = collections.Counter(keys.values())
        return {k: i for i, k in keys.items() if k is not None and counts[k] == 1}

    def pairs(old: Mapping[int, Slot], new: Mapping[int, Slot]) -> list[tuple[int, int]]:
        left, right = by_key(old, old_key), by_key(new, new_key)
        return [(left[k], right[k]) for k in left.keys() & right.keys()]

    return pairs


def pairs_of_moved(old: Mapping[int, Slot], new: Mapping[int, Slot]) -> Iterator[tuple[int, int]]:
    """Pairs leaves with the same path inside the state of the same rule. Of several rules of one
    class, it takes those that are nearest to each other."""
    groups: dict[Hashable, tuple[list[int], list[int]]] = {}
    for n, places in enumerate((old, new)):
        for i, slot in places.items():
            groups.setdefault((slot.rule, slot.local), ([], []))[n].append(i)
    for before, after in groups.values():
        if not before or not after:
            continue
        apart = [[_distance(old[i].owner, new[j].owner) for j in after] for i in before]
        nearest_old = [_least(column) for column in zip(*apart, strict=True)]
        for m, row in enumerate(apart):
            n = _least(row)
            if n is not None and nearest_old[n] == m:
                yield before[m], after[n]


def windows_of(transform: AbstractTransform) -> set[tuple[bool, bool]]:
    """For all windows of `.every_k`: whether they hold means, and whether of scaled gradients."""
    return {
        (part.module.mean, "scaled loss" in loss_of(part.module).askers)
        for part in instances(transform, EveryK)
    }


def _distance(one: str, other: str) -> int:
    """The number of segments that only one of two paths has, if these are in one place."""
    a, b = one.split("."), other.split(".")
    start = _shared(a, b)
    end = _shared(a[start:][::-1], b[start:][::-1])
    return len(a) + len(b) - 2 * (start + end)


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many segments at the start of two paths are equal."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _least(numbers: Sequence[int]) -> int | None:
    """The position of the least number, if it is there once."""
    least = min(numbers)
    return numbers.index(least) if numbers.count(least) == 1 else None
