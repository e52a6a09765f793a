"""The phases of a rule at a leaf, its sums over leaves, and refreshes in some steps only."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ... import tree
from ...tree.dtypes import accumulation_dtype, cast, in_precision_of, is_key, real_dtype
from ...tree.types import Scalar
from ..protocol.parts import Part
from .at_step import Fields, at_step, numbers_at
from .matrices import (
    OneByOne,
    Seen,
    StackGroup,
    is_number,
    is_small,
    joined,
    of_matrices,
    stack_groups,
)

Store: TypeAlias = Callable[[str, Any], Any]
"""Stores a new value of a field, and returns it as later phases see it."""
LeafSums: TypeAlias = dict[str, Any]
"""The result of `measure` or `reduce` at a leaf: sums, and sums of squares, by name."""
Again: TypeAlias = Callable[[Sequence[dict[str, Any]]], Sequence[LeafSums]]
"""Measures a leaf again, given a factor for each name, with sums of squares of the scaled
arrays."""


class Sums:
    """The results of `measure` and `reduce`, summed over all leaves, by name."""

    def __init__(self, of_leaves: Sequence[LeafSums], again: Again, dtype: np.dtype):
        self._of_leaves, self._again, self._dtype = of_leaves, again, dtype
        self._totals: dict[str, Scalar] = {}

    def __getitem__(self, name: str) -> Scalar:
        if name not in self._totals:  # a second read must not add a conditional
            terms = [leaf[name] for leaf in self._of_leaves]
            if terms and isinstance(terms[0], tree.SumOfSquares):
                total = tree.norm_of_all(terms, self._terms_again(name))
            else:
                total = tree.sum_of([cast(x, self._dtype) for x in terms])
            self._totals[name] = cast(total, self._dtype)
        return self._totals[name]

    def each(self, *names: str) -> Any:
        """The results of `measure` at each leaf: a vector with an entry per leaf, or one vector per
        name."""
        terms = [leaf[name] for name in names for leaf in self._of_leaves]
        if not terms:
            values = jnp.zeros(0, self._dtype)
        elif isinstance(terms[0], tree.SumOfSquares):
            values = cast(tree.norms_of(terms, self._terms_again(*names)), self._dtype)
        else:
            values = jnp.stack([cast(x, self._dtype) for x in terms])
        vectors = jnp.split(values, len(names))
        return vectors if vectors[1:] else vectors[0]

    def _terms_again(self, *names: str) -> Callable[[list[Any]], list[tree.SumOfSquares]]:
        def again(factors: list[Any]) -> list[tree.SumOfSquares]:
            number = len(self._of_leaves)
            sums = self._again(
                [dict(zip(names, factors[n::number], strict=True)) for n in range(number)]
            )
            return [leaf[name] for name in names for leaf in sums]

        return again


class LeafInputs(NamedTuple):
    """The inputs of a rule at a leaf, in the dtypes that they have."""

    u: Any
    """The update that comes in."""
    numbers: dict[str, Any]
    """The numbers of this step."""
    others: dict[str, Any]
    """The parameter as `"p"` and the gradient of the loss as `"grad"`, if the rule needs them."""
    fields: dict[str, Any]
    """The fields of the state."""
    seeds: dict[str, Any]
    """The seeds of the random bits of encoded fields."""


@contextlib.contextmanager
def at_leaf(
    part: Part, plan: object, inputs: LeafInputs
) -> Iterator[tuple[Any, Array, Fields, Callable[[PyTree], PyTree]]]:
    """The rule, the gradient and the fields as phases see them, in one precision, and a function
    that brings other arrays to it."""
    u, numbers, others, fields, _ = inputs
    shaped = [x for x in fields.values() if isinstance(x, jax.Array | np.ndarray)]
    dtype = accumulation_dtype(*(x.dtype for x in (u, *others.values(), *shaped)))
    real = real_dtype(dtype)
    numbers = {n: cast(x, real) if is_number(x) else x for n, x in numbers.items()}

    def wide(x: PyTree) -> PyTree:
        return jax.tree.map(lambda x: in_precision_of(x, dtype), x)

    u, others, fields = wide((u, others, fields))
    rule = at_step(part.module, {**numbers, **others, "plan": plan})
    # Under strict promotion, which users may choose, real times complex would be refused.
    promoting = contextlib.nullcontext() if dtype == real else jax.numpy_dtype_promotion("standard")
    with part.scope(), promoting:
        yield rule, u, Fields(**fields), wide


def phases(
    part: Part, does: tuple[str, ...], plan: object, inputs: LeafInputs, store: Store
) -> Any:
    """Advances the state of a leaf and stores it, or returns the update, or does both.

    **Arguments:**

    - `part`: the rule, and what it sees.
    - `does`: the phases, `"advance"`, `"direction"` or both.
    - `plan`, `inputs`: as the leaf has them.
    - `store`: stores a field by its name.
    """
    last = part.module.written_last
    with at_leaf(part, plan, inputs) as (rule, g, leaf, wide):
        rule = _over_matrices(part, rule)
        if "advance" in does:
            old = dict(vars(leaf))
            rule.advance(g, leaf)
            new = {n: x for n, x in vars(leaf).items() if x is not old[n]}
            first = [x for n, x in new.items() if n not in last]
            for name, x in new.items():
                value = _written_after(first, x) if name in last else x
                setattr(leaf, name, wide(store(name, value)))
        return rule.direction(g, leaf) if "direction" in does else None


def seen_by_refresh(part: Part, plan: object, inputs: LeafInputs) -> Seen:
    """The inputs of `refresh` at a leaf."""
    with at_leaf(part, plan, inputs) as (rule, g, leaf, _):
        if part.module.over == "matrix":
            return OneByOne(rule, part.state).seen(g, vars(leaf))
        seen = {n: x for n, x in numbers_at(rule).items() if n != "plan"}
        return Seen(g, vars(leaf), seen)


def measured(
    part: Part, phase: str, plan: object, inputs: LeafInputs, factors: dict[str, Any]
) -> LeafSums:
    """The result of `measure` or `reduce` at a leaf, with sums of squares in place of norms."""
    with at_leaf(part, plan, inputs) as (rule, g, leaf, _):
        sums = getattr(_over_matrices(part, rule), phase)(g, leaf)
        return {
            name: x.squared(factors.get(name)) if isinstance(x, tree.NormOf) else x
            for name, x in sums.items()
        }


def finish(rule: Any, part: Part, sums: Sequence[LeafSums], again: Again, state: Fields) -> None:
    """Runs `finish` in the common precision of all sums, the loss and the numbers of the state.

    **Arguments:**

    - `rule`: the rule at this step, which it assigns to.
    - `part`: the rule, and what it sees.
    - `sums`: the result of `measure` or `reduce` at each leaf.
    - `again`: measures the leaves again, with factors.
    - `state`: the scalars of the state.
    """
    old = {name: x for name, x in vars(state).items() if _is_float(x)}
    arrays = [*old.values(), *jax.tree.leaves(sums)]
    if "value" in rule.needs:
        arrays.append(rule.value)
    dtype = accumulation_dtype(jnp.float32, *(x.dtype for x in arrays))
    for name, x in numbers_at(rule).items():
        setattr(rule, name, cast(x, dtype) if _is_float(x) else x)
    for name, x in old.items():
        setattr(state, name, cast(x, dtype))
    with part.scope():
        rule.finish(Sums(sums, again, dtype), state)
    for name, x in old.items():
        setattr(state, name, cast(getattr(state, name), x.dtype))


def _is_float(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def _over_matrices(part: Part, rule: Any) -> Any:
    """The rule with phases that see a whole leaf."""
    return OneByOne(rule, part.state) if rule.over == "matrix" else rule


def _written_after(others: list[Array], x: Array) -> Array:
    """`x`, written after others.

    The condition never holds, and XLA does not know. Thus `x` seems to depend on these arrays, so
    XLA writes it last and in place. Otherwise it would copy the array that `x` replaces, which the
    others still read.
    """
    condition = jnp.bool_(True)
    for other in others:
        condition = condition & (other.real > jnp.inf)
    return jnp.where(condition, 0, x)


# --- the refresh ------------------------------------------------------------------------------

See: TypeAlias = Callable[[int, dict[str, Any]], Seen]
"""Gathers the inputs of `refresh` for the leaf at this position, whose state has these fields."""


def refreshed(
    part: Part,
    numbers: dict[str, Any],
    see: See,
    of_leaves: Sequence[dict[str, Any]],
    plans: Sequence[Any],
) -> list[dict[str, Any]]:
    """The fields that a rule refreshes, at each leaf, computed in one conditional for all leaves.

    **Arguments:**

    - `part`: the rule, and its state.
    - `numbers`: the numbers of this step. `due` says whether to refresh: a bool, or one for each
        leaf.
    - `see`: gathers the inputs of `refresh` at a leaf. It is called inside the conditional, so
        that steps without a refresh do not pay for it.
    - `of_leaves`: the fields of the state at each leaf.
    - `plans`: the plan of the rule for each leaf.
    """
    rule = part.module
    _check_refresh(rule, of_leaves[0], numbers)
    due = numbers["due"]
    common = {name: x for name, x in numbers.items() if not differs_between_leaves(x)}

    def at_leaf(common: dict[str, Any], plan: object, seen: Seen) -> dict[str, Any]:
        dtype = tree.real_dtype(seen.g.dtype)
        numbers = {name: cast(x, dtype) if is_number(x) else x for name, x in common.items()}
        leaf = Fields(**seen.fields)
        at_step(rule, {**numbers, **seen.numbers, "plan": plan}).refresh(seen.g, leaf)
        new = {name: getattr(leaf, name) for name in rule.refreshes}
        if due.ndim == 0:
            return new
        kept = {name: seen.fields[name] for name in new}
        return jax.tree.map(lambda x, y: jnp.where(seen.numbers["due"], x, y), new, kept)

    def fresh(kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The old values pass through the conditional, so XLA writes the new ones in their place.
        current = [fields | old for fields, old in zip(of_leaves, kept, strict=True)]

        def store(i: int, new: dict[str, Any], in_turn: bool) -> dict[str, Any]:
            if rule.over == "matrix":
                new = OneByOne(at_step(rule, {"plan": plans[i]}), part.state).written(new)
            new = tree.cast_like(new, kept[i])
            return new if in_turn else _in_place_of(kept[i], new)

        return _in_batches(at_leaf, common, see, store, current, plans, rule)

    old = [{name: fields[name] for name in rule.refreshes} for fields in of_leaves]
    return jax.lax.cond(jnp.any(due), fresh, lambda kept: kept, old)


def _in_place_of(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new arrays, written over the old ones after all of the new ones were computed.

    XLA would otherwise write them to new memory, and let the idle branch copy the old ones there.
    """
    signals = [tree.false_after(x) for x in jax.tree.leaves(new) if x.size]
    condition = functools.reduce(jnp.logical_and, signals, True)
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), old, new)


def differs_between_leaves(number: Array | None) -> bool:
    """Whether each leaf reads its own entry of a number, or its own key."""
    return number is not None and bool(number.ndim or is_key(number))


def _check_refresh(rule: Any, fields: dict[str, Any], numbers: dict[str, Any]) -> None:
    who = type(rule).__name__
    for name in rule.refreshes:
        if name not in fields:
            raise TypeError(
                f"{who}.refreshes names '{name}', which is no field of its state that belongs to "
                "the parameters. Mark the field with `sl.fields.per_param()`."
            )
    if "due" not in numbers:
        raise TypeError(
            f"{who} has a `refresh`, and its `begin` does not say when it is due. Set `self.due` "
            "there to a bool array such as `state.age % 10 == 0`."
        )


def _in_batches(
    function: Callable[[dict[str, Any], Any, Seen], Any],
    common: dict[str, Any],
    see: See,
    store: Callable[[int, Any, bool], Any],
    of_leaves: Sequence[dict[str, Any]],
    plans: Sequence[Any],
    rule: Any,
) -> list[Any]:
    """Applies the function at each leaf: to all small matrices of equal shape at once, and to large
    ones in turn. Its results are stored before the next leaf is read."""
    results: list[Any] = [None] * len(of_leaves)
    done: Any = ()
    over_matrices = rule.over == "matrix"
    seen = [jax.eval_shape(functools.partial(see, i), fields) for i, fields in enumerate(of_leaves)]
    alone = (StackGroup([i], [1], 0) for i in range(len(of_leaves)))
    for group in stack_groups(seen) if over_matrices else alone:
        first = group.members[0]
        stack = joined([see(i, of_leaves[i]) for i in group.members])
        # The fields are left out, since they would be copied.
        now, g, numbers = tree.after((common, stack.g, stack.numbers), done)
        stack = stack._replace(g=g, numbers=numbers)
        # Under strict promotion, real times complex would be refused.
        with jax.numpy_dtype_promotion("standard"):
            at_leaf = functools.partial(function, now, plans[first])
            new = of_matrices(at_leaf, stack) if over_matrices else at_leaf(stack)
        for i, number, part in group.divided(new):
            # A loop over matrices has memory of its own for the new ones.
            results[i] = done = store(i, part, number > 1 and not is_small(group.size))
    return results
