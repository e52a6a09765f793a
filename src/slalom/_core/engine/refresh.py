"""Refreshes of what a rule computes in some steps only."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import tree
from ...tree.dtypes import in_precision_of, is_key, promoting
from ..protocol.parts import Part
from .matrices import StackGroup, is_small, joined, of_matrices, stack_groups
from .phases import Fields, LeafInputs, at_step, in_one_precision, stacked, unstacked

See: TypeAlias = Callable[[int, dict[str, Any]], LeafInputs]
"""Gathers the inputs of `refresh` for the leaf at this position, whose state has these fields."""


def seen_by_refresh(part: Part, plan: Any, inputs: LeafInputs) -> LeafInputs:
    """The inputs of `refresh` at a leaf. Those of a rule over matrices have a leading axis."""
    seen, _ = in_one_precision(inputs)
    return stacked(seen, plan, part.state) if part.module.over == "matrix" else seen


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
