"""Matches the leaves of two states, and transfers a state to another transform or model."""

import dataclasses
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.engine.encoded import is_encoded
from ..._core.fields.hyperparams import all_targets
from ..._core.fields.schedule import AbstractSchedule
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import wrapper_names
from ..._core.state.marks import COPY, PER_LEAF
from ..._core.state.slots import Slot, leaves_of, slots
from ..._core.text.messages import report, warn
from ...tree.types import PyTree, Tracer
from .pairs import pairs_by_key, pairs_of_moved, windows_of
from .rows import Indices, Moved, moved, nodes_with_ages


class AsBefore:
    """The type of a default that keeps the present value, where `None` has a meaning."""

    def __repr__(self) -> str:
        return "as before"


AS_BEFORE = AsBefore()


@dataclasses.dataclass(frozen=True, repr=False)
class Rebinding:
    """A report of `opt.rebind`: the paths of all leaves of the old and the new state."""

    carried: tuple[str, ...]
    """Leaves whose value comes from the old state."""
    new: tuple[str, ...]
    """Leaves that only the new state has, with their initial value."""
    reshaped: tuple[str, ...]
    """Leaves whose shape changed or whose rows cannot be moved, and ages that restart with them,
    with their initial value."""
    dropped: tuple[str, ...]
    """Leaves that only the old state had."""
    recoded: tuple[str, ...] = ()
    """Those of the carried leaves that are stored in another codec or dtype than before."""
    renewed: tuple[str, ...] = ()
    """Copies of the parameters and related state that start again from their initial values, and
    the windows of `.every_k` if they would mix means, sums and scaled gradients."""

    def __repr__(self) -> str:
        return report(vars(self), rare=("recoded", "renewed"))


class Rebound(NamedTuple):
    """The results of `opt.rebind`. It refuses to be used as the optimizer in it."""

    opt: Any
    report: Rebinding

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`opt.rebind` returns a pair, which has no attribute '{name}'. Write `opt, report = "
            "opt.rebind(model)`.",
            name=name,
        )


class Side(NamedTuple):
    """The places and values of the leaves of a state, or of a transform itself."""

    places: list[Slot]
    leaves: list[Any]
    """Their values, or stand-ins for them. An encoded leaf is one leaf."""
    params: list[str]
    """The paths of all parameters."""

    @classmethod
    def of(cls, transform: AbstractTransform, state: PyTree, params: list[str]) -> "Side":
        leaves = jax.tree.leaves(state, is_leaf=is_encoded)
        return cls(slots(transform, state, params, is_encoded), leaves, params)

    @classmethod
    def at(cls, pairs: Iterable[tuple[Slot, Any]], params: list[str]) -> "Side":
        pairs = [*pairs]
        return cls([slot for slot, _ in pairs], [leaf for _, leaf in pairs], params)

    @property
    def entries(self) -> set[int]:
        """The positions of the per-leaf fields of state modules that also have per-parameter
        leaves."""
        owners = {s.node for s in self.places if s.param is not None}
        fields = enumerate(self.places)
        return {i for i, s in fields if s.mark == PER_LEAF and s.node in owners}

    @property
    def pairs(self) -> list[tuple[Slot, Any]]:
        """Each place with its value."""
        return [*zip(self.places, self.leaves, strict=True)]

    def mapped(self, function: Callable[[Any], Any]) -> "Side":
        """The side with other values, without those leaves for which the function gives `None`."""
        pairs = ((slot, function(leaf)) for slot, leaf in self.pairs)
        return Side.at((pair for pair in pairs if pair[1] is not None), self.params)


class Match(NamedTuple):
    """What an old state has in place of the leaves of a new one, by their positions."""

    values: dict[int, Any]
    """The old values that new leaves take."""
    misfits: dict[int, Any]
    """The old leaves that correspond to new ones, which cannot take their values."""
    used: set[int]
    """The positions of all old leaves that correspond to new ones."""
    clocks: Collection[int | None]
    """The old clocks from which new ones go on; `None` is the count of the optimizer."""


def carry(
    old: Any, new: Any, rows: Mapping[str, Indices], *, goes_on: bool
) -> tuple[PyTree, Rebinding]:
    """Transfers everything that still fits from the state of an optimizer to that of another one.

    **Arguments:**

    - `old`, `new`: the optimizers.
    - `rows`: where the rows of parameters come from.
    - `goes_on`: whether the parameters are those of the last step. Otherwise only their values can
        be others, and copies of them start again.
    """
    before, after = (Side.of(x.transform, x.state, x.binding.paths) for x in (old, new))
    if rows:
        before = before._replace(leaves=moved(before.places, before.leaves, before.params, rows))
    values, misfits, used, clocks = match_leaves(before, after, old.count, _fits)
    _warn_of_jumps(new.transform, before, after, clocks, old.count)
    is_same_run = goes_on or misfits or before.params != after.params
    anew = set() if is_same_run else _of_copies(after.places)
    if windows_of(old.transform) != windows_of(new.transform):
        begins = ("EveryK", "mini_step")
        anew |= {i for i in values if (after.places[i].rule, after.places[i].local) == begins}
    leaves, recoded = list(after.leaves), set()
    for i in values.keys() - anew:
        x = values[i]
        whole, x = (x.leaf, x.onto(leaves[i])) if isinstance(x, Moved) else (x, x)
        leaves[i] = in_form_of(leaves[i], x)
        if _storage(leaves[i]) != _storage(whole):
            recoded.add(i)
    rebinding = Rebinding(
        carried=_names(after, values.keys() - anew),
        new=_names(after, {*range(len(leaves))} - values.keys() - misfits.keys() - anew),
        reshaped=_names(after, misfits),
        dropped=_names(before, {*range(len(before.leaves))} - used),
        recoded=_names(after, recoded),
        renewed=_names(after, anew),
    )
    return jax.tree.structure(new.state, is_leaf=is_encoded).unflatten(leaves), rebinding


def match_leaves(
    before: Side, after: Side, count: Any, same_kind: Callable[[Any, Any], bool], runs: int = 0
) -> Match:
    """Finds an old leaf for each new one.

    A leaf takes the value of the leaf with the same path. If there is none, it takes the value of
    the leaf of the same rule with the same path inside its state, because the rule was wrapped or
    moved. Of several, that of the nearest rule. If there is none either, it takes the momentum `mu`
    of another rule.

    A rule that knows the age of its means takes the whole state of a parameter or none of it.
    Means of different ages with the same bias correction would be far too large or too small.

    **Arguments:**

    - `before`, `after`: the old and the new state.
    - `count`: the step count of the old optimizer.
    - `same_kind`: whether an old leaf can take the place of a new one.
    - `runs`: the number of axes that arrays have more than their slots say, for several runs.
    """
    alike = before.places == after.places and before.params == after.params
    if alike and all(map(same_kind, before.leaves, after.leaves)):
        # Two leaves may have one name, by which neither would be found.
        origins = fits = {i: i for i in range(len(after.places))}
    else:
        origins = _origins(before, after)
        fits = _fitting(origins, before, after, same_kind)
    values = {i: before.leaves[j] for i, j in fits.items()}
    used = {*origins.values()}
    for i in after.entries - fits.keys():
        gathered, fields = _gathered(i, fits, before, after, runs)
        if fields:
            values[i] = gathered
            used |= fields
    clocks = _clocks_of(before, after, fits)
    for i, j in clocks.items():
        x = count if j is None else before.leaves[j]
        if same_kind(x, after.leaves[i]):
            values[i] = x
    misfits = {i: before.leaves[j] for i, j in origins.items() if i not in values}
    used |= {j for j in clocks.values() if j is not None}
    return Match(values, misfits, used, clocks.values())


def _names(side: Side, which: Iterable[int]) -> tuple[str, ...]:
    return tuple(side.places[i].name for i in sorted(which))


def in_form_of(like: Any, x: Any) -> Any:
    """A copy in the dtype and the codec of the initial value, so that no two optimizers share a
    buffer."""
    if is_encoded(like) and is_encoded(x) and like.form == x.form:
        return jax.tree.map(jnp.copy, x)
    x = x.decode() if is_encoded(x) else x
    if is_encoded(like):
        return jax.jit(like.encode)(jnp.asarray(x, like.dtype))
    return jnp.array(x, like.dtype, copy=True)


def _fits(old: Any, new: Any) -> bool:
    shape = np.shape(new)  # also of encoded leaves
    return old.fits(shape) if isinstance(old, Moved) else np.shape(old) == shape


def _of_copies(places: list[Slot]) -> set[int]:
    """The leaves of rules that keep a copy of the parameters, but for their counts and clocks."""
    nodes = {slot.node for slot in places if slot.stored == COPY}
    return {i for i, s in enumerate(places) if s.node in nodes and s.mark is not None}


def _storage(x: Any) -> Any:
    return x.codec if is_encoded(x) else jnp.asarray(x).dtype


# --- matching leaves ------------------------------------------------------------------------


def _origins(before: Side, after: Side) -> dict[int, int]:
    """The old leaf whose value each new leaf would take, if there is one."""
    aged = nodes_with_ages(after.places)

    def momentum(slot: Slot) -> Hashable:
        return slot.local if slot.field == "mu" else None

    def unaged_momentum(slot: Slot) -> Hashable:
        return None if slot.node in aged else momentum(slot)

    by_name = operator.attrgetter("rule", "name")
    origins: dict[int, int] = {}
    for pairs in (
        pairs_by_key(by_name, by_name),
        pairs_of_moved,
        pairs_by_key(momentum, unaged_momentum),
    ):
        paired = {*origins.values()}
        old = {j: s for j, s in enumerate(before.places) if j not in paired}
        new = {i: s for i, s in enumerate(after.places) if i not in origins}
        origins |= {i: j for j, i in pairs(old, new)}
    return origins


def _fitting(
    origins: dict[int, int], before: Side, after: Side, same_kind: Callable[[Any, Any], bool]
) -> dict[int, int]:
    """The origins whose values fit, without those of per-leaf fields."""
    entries = after.entries
    fits = {
        i: j
        for i, j in origins.items()
        if i not in entries
        and same_kind(before.leaves[j], after.leaves[i])
        and (after.places[i].mark != PER_LEAF or before.params == after.params)
    }
    aged, were_aged = (nodes_with_ages(side.places) for side in (after, before))
    owners = {i: (s.node, s.param) for i, s in enumerate(after.places) if s.node in aged}
    whole = {i for i, j in fits.items() if before.places[j].node in were_aged}
    torn = {owner for i, owner in owners.items() if owner[1] is not None and i not in whole}
    return {i: j for i, j in fits.items() if owners.get(i) not in torn}


# --- clocks ---------------------------------------------------------------------------------


def _clocks_of(before: Side, after: Side, fits: dict[int, int]) -> dict[int, int | None]:
    """The old clock that each clock of the new state goes on from.

    A wrapper with a clock does not move the schedules inside it: they go on at the step at which
    their own rule was before. Where nothing inside was carried over, the clock goes on from the
    innermost one that it may replace, or else from the one around it, where `None` stands for the
    count of the optimizer.
    """
    old, new, used = _clocks(before.places), _clocks(after.places), {*fits.values()}
    # The leaves of a wrapper itself say nothing about the clock of its inner transform.
    wrappers = wrapper_names()
    chosen: dict[int, int | None] = {}
    for owner, i in sorted(new.items(), key=lambda clock: clock[0].count(".")):
        inside = {
            _around(before.places[j].owner, old)
            for n, j in fits.items()
            if after.places[n].rule not in wrappers and _around(after.places[n].owner, new) == i
        }
        if len(inside) == 1:
            chosen[i] = inside.pop()
            continue
        outer = _around(owner, new)
        around = fits.get(i, None if outer is None else chosen[outer])
        near = {around}
        if around is not None and all(_around(path, new) != i for path in new):
            # The clock of the inner transform may be gone, or in another place.
            start = f"{before.places[around].owner}."
            near |= {j for path, j in old.items() if path.startswith(start)}
        free = [path for path, j in old.items() if j in near or (i not in fits and j not in used)]
        chosen[i] = old[max(free, key=len)] if free else None
    return chosen


def _warn_of_jumps(
    transform: AbstractTransform,
    before: Side,
    after: Side,
    kept: Collection[int | None],
    count: Any,
) -> None:
    """Warns of schedules that go on at the count of the optimizer, where a clock was dropped."""
    dropped = {owner: i for owner, i in _clocks(before.places).items() if i not in kept}
    now = _clocks(after.places)
    scheduled = [
        path
        for path, (part, field) in all_targets(transform).items()
        if isinstance(getattr(part.module, field.name), AbstractSchedule)
        and _around(f"{part.name}.", now) is None
    ]
    for owner, i in dropped.items():
        numbers = (before.leaves[i], count)
        if not scheduled or any(isinstance(x, Tracer) for x in numbers):
            return
        step, calls = map(int, numbers)
        if step != calls:
            warn(
                f"'{scheduled[0]}' goes on at step {calls} of its schedule, which is the count of "
                f"the optimizer: the count of '{owner}', {step}, is dropped. To go on at step "
                f"{step}, keep a wrapper with a clock around it, such as `tx.if_finite()`."
            )
            return


def _clocks(places: list[Slot]) -> dict[str, int]:
    """The position of each clock, by the path of its wrapper."""
    wrappers = wrapper_names(with_clock=True)
    return {
        slot.owner: i
        for i, slot in enumerate(places)
        if slot.rule in wrappers and slot.local == "count"
    }


def _around(owner: str, clocks: dict[str, int]) -> int | None:
    """The innermost of these clocks around a transform."""
    outer = [path for path in clocks if owner.startswith(f"{path}.")]
    return clocks[max(outer, key=len)] if outer else None


# --- ages -----------------------------------------------------------------------------------


def _gathered(
    i: int, fits: dict[int, int], before: Side, after: Side, runs: int
) -> tuple[Any, set[int]]:
    """The value of a new per-leaf field, put together from entries of old ones, and those fields.

    It is one number if all leaves have the same age, and an entry for each otherwise.
    """
    slot, fresh = after.places[i], after.leaves[i]
    fields = {
        s.node: (j, leaves_of(s.node, before.places))
        for j, s in enumerate(before.places)
        if s.mark == PER_LEAF and s.field == slot.field
    }
    carried = {
        (after.places[n].param, after.places[n].half): before.places[j]
        for n, j in fits.items()
        if after.places[n].node == slot.node and before.places[j].node in fields
    }
    ages, used = [], set()
    for n, leaf in enumerate(leaves_of(slot.node, after.places)):
        age = fresh
        if origin := carried.get(leaf):
            j, names = fields[origin.node]
            age, n = before.leaves[j], names.index((str(origin.param), origin.half))
            used.add(j)
        ages.append(age if jnp.ndim(age) == runs else age[..., n])
    if jnp.ndim(fresh) == runs and all(age is ages[0] for age in ages):
        return in_form_of(fresh, ages[0]), used
    return jnp.stack([in_form_of(fresh, age) for age in ages], axis=-1), used
