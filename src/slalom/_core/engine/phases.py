"""The phases of a rule at a leaf, its sums over leaves, and refreshes in some steps only."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import tree
from ...tree.dtypes import accumulation_dtype, cast, in_precision_of, is_key, promoting
from ...tree.types import Scalar
from ..protocol.parts import Part
from .at_step import STEP, Fields, LeafInputs, at_step
from .encoded import stored_like
from .matrices import (
    StackGroup,
    at_each_matrix,
    is_small,
    joined,
    of_matrices,
    stack_groups,
    stacked,
    unstacked,
)

LeafSums: TypeAlias = dict[str, Any]
"""The result of `measure` or `reduce` at a leaf: sums, and sums of squares, by name."""
Again: TypeAlias = Callable[[Sequence[dict[str, Any]]], Sequence[LeafSums]]
"""Measures all leaves again, given the factors of each by name, with sums of squares of the scaled
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


def in_one_precision(inputs: LeafInputs) -> tuple[LeafInputs, np.dtype]:
    """The inputs in the accumulation dtype of the leaf, and this dtype."""
    arrays = [inputs.u, *inputs.others.values(), *inputs.fields.values()]
    dtype = accumulation_dtype(*(x.dtype for x in arrays if isinstance(x, jax.Array | np.ndarray)))
    return in_precision_of(inputs._replace(seeds={}), dtype), dtype


@contextlib.contextmanager
def at_leaf(
    part: Part, plan: object, inputs: LeafInputs
) -> Iterator[tuple[Any, Array, Fields, np.dtype]]:
    """The rule, the gradient and the fields as phases see them, in one precision, and its dtype."""
    wide, dtype = in_one_precision(inputs)
    rule = at_step(part.module, {**wide.numbers, **wide.others, "plan": plan})
    with part.scope(), promoting(dtype):
        yield rule, wide.u, Fields(**wide.fields), dtype


def phases(
    part: Part, does: tuple[str, ...], plan: Any, inputs: LeafInputs, stored: LeafInputs
) -> tuple[Any, dict[str, Any]]:
    """The update of a leaf, if it is asked for its direction, and its new fields if it advances.

    **Arguments:**

    - `part`: the rule, and what it sees.
    - `does`: the phases, `"advance"`, `"direction"` or both.
    - `plan`, `inputs`: as the leaf has them.
    - `stored`: the inputs with the fields as they are stored.
    """
    last, old_fields, seeds = part.module.written_last, stored.fields, stored.seeds

    def at_one(inputs: LeafInputs) -> tuple[Any, dict[str, Any]]:
        with at_leaf(part, plan, inputs) as (rule, g, leaf, dtype):
            new_fields = {}
            if "advance" in does:
                old = dict(vars(leaf))
                rule.advance(g, leaf)
                new = {n: x for n, x in vars(leaf).items() if x is not old[n]}
                first = [x for n, x in new.items() if n not in last]
                for name, x in new.items():
                    value = _written_after(first, x) if name in last else x
                    new_fields[name], seen = stored_like(old_fields[name], value, seeds.get(name))
                    setattr(leaf, name, in_precision_of(seen, dtype))
            return rule.direction(g, leaf) if "direction" in does else None, new_fields

    if part.module.over != "matrix":
        return at_one(inputs)
    if inputs.u.size == 0:
        return tree.widened(inputs.u), {}
    update, new_fields = at_each_matrix(at_one, inputs, plan, part.state)
    update = None if update is None else plan.write(update)
    return update, unstacked(new_fields, plan, part.state)


def seen_by_refresh(part: Part, plan: Any, inputs: LeafInputs) -> LeafInputs:
    """The inputs of `refresh` at a leaf. Those of a rule over matrices have a leading axis."""
    seen, _ = in_one_precision(inputs)
    return stacked(seen, plan, part.state) if part.module.over == "matrix" else seen


def measured(
    part: Part, phase: str, plan: Any, inputs: LeafInputs, factors: dict[str, Any]
) -> LeafSums:
    """The result of `measure` or `reduce` at a leaf, with sums of squares in place of norms."""

    def at_one(inputs: LeafInputs) -> LeafSums:
        with at_leaf(part, plan, inputs) as (rule, g, leaf, _):
            return getattr(rule, phase)(g, leaf)

    def total(name: str, x: Any) -> Any:
        if isinstance(x, tree.NormOf):  # of all matrices of the leaf
            return x.squared(factors.get(name))
        return jnp.sum(x, axis=0) if over_matrices else x

    over_matrices = part.module.over == "matrix"
    sums = at_each_matrix(at_one, inputs, plan, part.state) if over_matrices else at_one(inputs)
    with part.scope():
        return {name: total(name, x) for name, x in sums.items()}


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
    for name, x in vars(rule)[STEP].items():
        setattr(rule, name, cast(x, dtype) if _is_float(x) else x)
    for name, x in old.items():
        setattr(state, name, cast(x, dtype))
    with part.scope():
        rule.finish(Sums(sums, again, dtype), state)
    for name, x in old.items():
        setattr(state, name, cast(getattr(state, name), x.dtype))


def _is_float(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


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

See: TypeAlias = Callable[[int, dict[str, Any]], LeafInputs]
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
    common = {name: x for name, x in numbers.items() if not differs_between_leaves(x)}
    over_matrices = rule.over == "matrix"

    def fresh(kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The old values pass through the conditional, so XLA writes the new ones in their place.
        current = [fields | old for fields, old in zip(of_leaves, kept, strict=True)]
        shapes = [jax.eval_shape(functools.partial(see, i), x) for i, x in enumerate(current)]
        alone = (StackGroup([i], [1], 0) for i in range(len(current)))
        results: list[Any] = [None] * len(current)
        done: Any = ()
        # All small matrices of equal shape at once, and large ones in turn.
        for group in stack_groups(shapes) if over_matrices else alone:
            stack = joined([see(i, current[i]) for i in group.members])
            # The fields are left out, since they would be copied.
            later = (common, stack.u, stack.numbers, stack.others)
            now, u, own, others = tree.after(later, done)
            stack = stack._replace(u=u, numbers=own, others=others)
            at_leaf = functools.partial(_refreshed_leaf, rule, plans[group.members[0]], now)
            new = of_matrices(at_leaf, stack) if over_matrices else at_leaf(stack)
            for i, number, fields in group.divided(new):
                if over_matrices:
                    fields = unstacked(fields, plans[i], part.state)
                done = tree.cast_like(fields, kept[i])
                # A loop over matrices has memory of its own for the new ones.
                if number == 1 or is_small(group.size):
                    done = _in_place_of(kept[i], done)
                results[i] = done  # before the next leaf is read
        return results

    old = [{name: fields[name] for name in rule.refreshes} for fields in of_leaves]
    return jax.lax.cond(jnp.any(numbers["due"]), fresh, lambda kept: kept, old)


def _refreshed_leaf(
    rule: Any, plan: object, common: dict[str, Any], seen: LeafInputs
) -> dict[str, Any]:
    """The fields that a rule refreshes, at a leaf or a matrix, where this is due."""
    numbers = in_precision_of(common, seen.u.dtype) | seen.numbers | seen.others | {"plan": plan}
    leaf = Fields(**seen.fields)
    with promoting(seen.u.dtype):
        at_step(rule, numbers).refresh(seen.u, leaf)
    new = {name: getattr(leaf, name) for name in rule.refreshes}
    if "due" not in seen.numbers:
        return new
    kept = {name: seen.fields[name] for name in new}
    return jax.tree.map(lambda x, y: jnp.where(seen.numbers["due"], x, y), new, kept)


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
