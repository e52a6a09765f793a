"""Carrying a state over to another transform, or to another model."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._core.marks import PER_LEAF
from .._core.slots import Slot, leaves_of, slots
from .._core.transform import AbstractTransform
from .._paths import leaf_paths


class AsBefore:
    """The type of a default that keeps the present value, where `None` has a meaning."""

    def __repr__(self) -> str:
        return "as before"


AS_BEFORE = AsBefore()


@dataclasses.dataclass(frozen=True, repr=False)
class Rebinding:
    """What became of a state when its optimizer was bound anew: paths of its leaves."""

    carried: tuple[str, ...]
    """In the new state, with the value of the old one."""
    new: tuple[str, ...]
    """In the new state only: as `init` made them."""
    reshaped: tuple[str, ...]
    """In both, with another shape: as `init` made them."""
    dropped: tuple[str, ...]
    """In the old state only."""

    def __repr__(self) -> str:
        def line(field: str, names: tuple[str, ...]) -> str:
            more = f", … ({len(names)})" if len(names) > 4 else ""
            return f"{field + ':':<9} {', '.join(names[:4]) or '–'}{more}"

        return "\n".join(line(f.name, getattr(self, f.name)) for f in dataclasses.fields(self))


class _Side(NamedTuple):
    """The places and values of a state's leaves."""

    places: list[Slot]
    leaves: list[Any]
    params: list[str]
    entries: frozenset[int]
    """The per-leaf fields, by position, that stand beside what they have an entry for."""

    @classmethod
    def of(cls, transform: AbstractTransform, state: PyTree, params: PyTree) -> "_Side":
        paths = leaf_paths(params)
        places = slots(transform, state, paths)
        beside = {s.node for s in places if s.param is not None}
        entries = (i for i, s in enumerate(places) if s.mark == PER_LEAF and s.node in beside)
        return cls(places, jax.tree.leaves(state), paths, frozenset(entries))


def carry(
    old: tuple[AbstractTransform, PyTree, PyTree], new: tuple[AbstractTransform, PyTree, PyTree]
) -> tuple[PyTree, Rebinding]:
    """The new state with everything of the old one that still fits.

    What fits a leaf is the leaf of the same path; else, where there is only one such, that of the
    same rule at the same path inside its state, since the rule was wrapped or moved; else the
    momentum `mu` of another rule.

    A rule that knows the age of what it accumulates takes a parameter's state whole or not at
    all: means of different ages, corrected alike, would be far too large or too small.

    **Arguments:**

    - `old`, `new`: a transform, its state, and a tree of the structure of the parameters.
    """
    before, after = _Side.of(*old), _Side.of(*new)
    origins = _origins(before, after)
    fits = {
        i: j
        for i, j in origins.items()
        if jnp.shape(before.leaves[j]) == jnp.shape(after.leaves[i])
        and (after.places[i].mark != PER_LEAF or before.params == after.params)
    }
    for group in _aged_groups(after.places):
        if any(i not in fits for i in group):
            for i in group:
                fits.pop(i, None)

    leaves, used = list(after.leaves), set(fits.values())
    for i, j in fits.items():
        leaves[i] = _as(after.leaves[i], before.leaves[j])
    for i in after.entries:
        sources = _entries(i, fits, before, after)
        leaves[i] = _gathered(after.leaves[i], sources, before.leaves)
        used.update(j for j, _ in filter(None, sources))
        if any(sources):
            fits[i] = -1

    reshaped = {i for i in origins.keys() - fits.keys() if origins[i] not in used}
    used |= {origins[i] for i in reshaped}
    report = Rebinding(
        carried=_names(after, fits),
        new=_names(after, set(range(len(leaves))) - fits.keys() - reshaped),
        reshaped=_names(after, reshaped),
        dropped=_names(before, set(range(len(before.leaves))) - used),
    )
    return jax.tree.structure(new[1]).unflatten(leaves), report


def _names(side: _Side, which: Iterable[int]) -> tuple[str, ...]:
    return tuple(side.places[i].name for i in sorted(which))


def _as(like: Any, x: Any) -> Any:
    """A copy in the dtype of what `init` made: neither optimizer may donate it for the other."""
    return jnp.array(x, like.dtype, copy=True)


# --- what fits what -------------------------------------------------------------------------


def _origins(before: _Side, after: _Side) -> dict[int, int]:
    """For each new leaf that has one, the old leaf it would take its value from."""
    aged = {slot.node for slot in after.places if slot.mark == PER_LEAF}

    def by_path(slot: Slot) -> Hashable:
        return slot.rule, slot.name

    def by_rule(slot: Slot) -> Hashable:
        return slot.rule, slot.local

    def by_momentum(slot: Slot) -> Hashable:
        return slot.local if slot.field == "mu" and slot.node not in aged else None

    origins: dict[int, int] = {}
    keys: tuple[Callable[[Slot], Hashable], ...] = (by_path, by_rule)
    for key in keys:
        _pair_up(key, key, before, after, origins)
    _pair_up(lambda s: s.local if s.field == "mu" else None, by_momentum, before, after, origins)
    return origins


def _pair_up(
    old_key: Callable[[Slot], Hashable],
    new_key: Callable[[Slot], Hashable],
    before: _Side,
    after: _Side,
    origins: dict[int, int],
) -> None:
    """Adds the pairs of leaves, not paired yet, whose key only they have."""
    old = _alone(old_key, before, set(origins.values()))
    new = _alone(new_key, after, set(origins))
    for key in new.keys() & old.keys():
        origins[new[key]] = old[key]


def _alone(key: Callable[[Slot], Hashable], side: _Side, paired: set[int]) -> dict[Hashable, int]:
    """The places, not paired yet, whose key no other one of them has, by key."""
    found: dict[Hashable, list[int]] = {}
    for i, slot in enumerate(side.places):
        if i not in paired and i not in side.entries and key(slot) is not None:
            found.setdefault(key(slot), []).append(i)
    return {k: many[0] for k, many in found.items() if len(many) == 1}


# --- ages -----------------------------------------------------------------------------------


def _aged_groups(places: list[Slot]) -> list[list[int]]:
    """The leaves that belong to one parameter in a state with ages, parameter by parameter."""
    aged = {slot.node for slot in places if slot.mark == PER_LEAF}
    groups: dict[Hashable, list[int]] = {}
    for i, slot in enumerate(places):
        if slot.node in aged and slot.param is not None:
            groups.setdefault((slot.node, slot.param), []).append(i)
    return list(groups.values())


def _entries(
    i: int, fits: dict[int, int], before: _Side, after: _Side
) -> list[tuple[int, int] | None]:
    """For each entry of a new per-leaf field, the old field and the entry of it that it takes."""
    slot = after.places[i]
    carried = {
        (after.places[n].param, after.places[n].half): before.places[j]
        for n, j in fits.items()
        if j >= 0 and after.places[n].node == slot.node
    }
    sources: list[tuple[int, int] | None] = []
    for leaf in leaves_of(slot.node, after.places):
        source = carried.get(leaf)
        field = source and next(
            (
                j
                for j, s in enumerate(before.places)
                if s.mark == PER_LEAF and (s.node, s.field) == (source.node, slot.field)
            ),
            None,
        )
        if source is None or field is None:
            sources.append(None)
        else:
            names = leaves_of(source.node, before.places)
            sources.append((field, names.index((str(source.param), source.half))))
    return sources


def _gathered(fresh: Any, sources: list[tuple[int, int] | None], old: list[Any]) -> Any:
    """A per-leaf field: one number where all leaves are of one age, else an entry for each."""
    known = [source for source in sources if source is not None]
    if not known:
        return fresh
    first = known[0][0]
    alike = len(known) == len(sources) and {field for field, _ in known} == {first}
    if alike and jnp.ndim(fresh) == jnp.ndim(old[first]) == 0:
        return _as(fresh, old[first])

    def entry(numbers: Any, n: int) -> Any:
        return _as(fresh, numbers if jnp.ndim(numbers) == 0 else numbers[n])

    return jnp.stack(
        [
            entry(fresh, n) if source is None else entry(old[source[0]], source[1])
            for n, source in enumerate(sources)
        ]
    )
