"""Checks a transform when it is bound to parameters, before anything is computed."""

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np

from ..._core.fields.hyperparams import bind_numbers, bound
from ..._core.protocol.chain import Chain
from ..._core.protocol.loss import loss_of
from ..._core.protocol.parts import (
    MIXED,
    AbstractTraits,
    Part,
    inner_transforms,
    keeps_zeros,
    segments,
    transforms,
    walk,
)
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractPacedWrapper
from ..._core.text.messages import warn
from ..._core.text.printing import Call, code, operand
from ...rules.shaping.constrain import Cautious
from ...rules.shaping.descent import AddDecayedWeights
from ...tree.dtypes import canonical_float
from ...tree.packed import clear_with_functions
from ...tree.paths import leaf_paths
from ...tree.types import Params
from ...where.masks import check_matches
from ...wrappers.gradients.loss import Maximize
from ...wrappers.scope.partitions import Partition

# The warnings of pairs of a transform and parameters that have passed all checks. Meta-learning
# binds an equal pair in every outer step, and the checks take most of the time of a binding.
_passed: dict[Hashable, tuple[str, ...]] = {}
_MOST_PASSED = 256
clear_with_functions(_passed.clear)


def checked(
    transform: AbstractTransform[Any], params: Params, dtype: Any | None, is_whole: bool = True
) -> AbstractTransform[Any]:
    """The transform with its numbers as arrays, after all checks.

    One that is not the whole optimizer may pass raw gradients on. This is a warning then.
    """
    key = _key(transform, params, (dtype, is_whole))
    passed = _passed.get(key)
    messages = tuple(_check(transform, params, is_whole)) if passed is None else passed
    for message in messages:
        warn(message)
    if passed is not None:
        return bind_numbers(transform, dtype)
    transform = bound(transform, dtype)
    if key is not None:
        if len(_passed) >= _MOST_PASSED:
            _passed.clear()
        _passed[key] = messages
    return transform


def _key(transform: AbstractTransform[Any], params: Params, options: Hashable) -> Hashable:
    """All that the checks depend on, or `None` if it has no hash, as with arrays."""
    numbers, rule = jax.tree.flatten(transform)
    leaves, structure = jax.tree.flatten(params)
    # With the types, since 1 == True == 1.0.
    key = (
        (rule, *((type(x), x) for x in numbers)),
        (structure, *((np.shape(x), x.dtype) for x in leaves)),
        (options, canonical_float()),
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _check(transform: AbstractTransform[Any], params: Params, is_whole: bool) -> Iterator[str]:
    """Raises an error for a transform that does not suit the parameters; yields warnings."""
    for part in transforms(transform):
        for where in part.module.selectors():
            check_matches(where, params)
    loss_of(transform)
    _check_objective(transform)
    yield from _negative_rates(transform)
    for outer in transforms(transform, params=params):
        if isinstance(outer.module, Chain):
            links = [link._replace(path=outer.path + link.path) for link in outer.children()]
            for check in (_idle_steps, _two_rates, _late_clips, _late_links, _early_constraints):
                yield from check(links)
    yield from _two_linearizations(transform, params)
    for part in transforms(transform, params=params):
        yield from part.module.warnings(part.params)
    ascent = _ascent(transform, params)
    if ascent is not None:
        if is_whole:
            raise ValueError(ascent)
        yield (
            f"{ascent} If another transform of Optax flips their sign later, convert both together "
            "to silence this warning: `sl.interop.to_optax(first | second)`."
        )


def _ascent(transform: AbstractTransform[Any], params: Params) -> str | None:
    """The message for an optimizer that would ascend for some leaves or in some steps, if any."""
    signs = transform.signs(params)
    if 1 in signs and -1 in signs:
        raw = [path for path, s in zip(leaf_paths(params), signs, strict=True) if s == 1]
        listed = ", ".join(f"'{path}'" for path in raw[:3]) + (", …" if len(raw) > 3 else "")
        culprit = _innermost(transform, params, {1, -1})
        ascending = f"Raw gradients would be added to {listed}, so these parameters would ascend: "
        if isinstance(culprit.module, Partition):
            group = next(g for g in culprit.children() if 1 in g.module.signs(g.params))
            return (
                f"{ascending}their group '{'.'.join((culprit.name, *group.group))}' does not flip "
                "the sign of the gradients, and other groups do. To descend, end the group with "
                "`sl.ScaleByLearningRate(1e-3)`. To ascend on purpose, use `.maximize()` on a "
                "group that descends: `sl.sgd(1e-3).maximize()`. To leave these parameters "
                "unchanged, use `sl.SetToZero()`."
            )
        return (
            f"{ascending}'{culprit.name}' passes their gradients through unchanged, and flips the "
            "sign of all others. To leave these parameters unchanged, use `.only(where)` instead "
            "of `.mask(where)`. To train them too, mask only the links before the learning rate, "
            "and let the learning rate act on all parameters."
        )
    if MIXED in signs:
        culprit = _innermost(transform, params, {MIXED})
        return (
            "Raw gradients would be added in every step in which the condition of "
            f"'{culprit.name}' is false, so the parameters would ascend: it passes the gradients "
            "through unchanged in these steps, and flips their sign in all others. To leave the "
            'parameters unchanged in these steps, use `.when(condition, otherwise="zero")`. To '
            "descend in these steps too, apply `.when` only to the links before the learning rate."
        )
    return None


def _innermost(transform: AbstractTransform[Any], params: Params, signs: set[Any]) -> Part:
    """The innermost part with all of these signs."""
    every = transforms(transform, params=params)
    # Parts come depth first.
    return [part for part in every if signs <= {*part.module.signs(part.params)}][-1]


def _check_objective(transform: AbstractTransform[Any], around: Any = None) -> None:
    """Raises an error for a wrapper that sees the loss where its inner transform ascends."""
    if isinstance(transform, Maximize) and around is not None:
        (method,) = segments(around)
        raise ValueError(
            f"{type(around).__name__} is outside `.maximize()`, so it would follow the loss "
            f"where the transform inside ascends. Call `.maximize()` after `.{method}(...)`: "
            f"`tx.{method}(...).maximize()`."
        )
    if transform.follows_loss:
        around = transform
    for inner in inner_transforms(transform):
        _check_objective(inner, around)


def _inside(link: Part) -> list[Part]:
    """The transforms in a link, with their whole paths."""
    return [part for part in walk(link) if isinstance(part.module, AbstractTraits)]


def _idle_steps(links: list[Part]) -> Iterator[str]:
    """The warnings of links that update parameters in the idle steps of a link before them."""
    paced: Part | None = None
    for part in links:
        link = part.module
        if paced is not None and not keeps_zeros(link):
            yield (
                f"'{paced.name}' returns zeros in its idle steps, and '{part.name}' after it "
                "turns them into nonzero updates, so the parameters change in idle steps too. "
                f"Move it inside{_moved_inside(link, paced.module)}."
            )
            paced = None
        paced = _idle_part(part) or paced


def _moved_inside(link: AbstractTransform[Any], wrapper: AbstractTransform[Any]) -> str:
    """The code that wraps a link too, where the wrapper is made by a method."""
    call = wrapper._code()
    if not isinstance(call, Call) or call.receiver is None:
        return ""
    return f": `(... | {operand(link)}).{code(dataclasses.replace(call, receiver=None))}`"


def _two_rates(links: list[Part]) -> Iterator[str]:
    """The warning of two links that both flip the sign of the updates."""
    descending: dict[int, str] = {}
    for part in links:
        if not any(inner.module.sets_learning_rate for inner in transforms(part.module)):
            continue  # a negative factor of any other link is deliberate
        for i, sign in enumerate(part.module.signs(part.params)):
            if sign == -1 and i in descending:
                yield (
                    f"'{descending[i]}' and '{part.name}' both flip the sign of the updates, "
                    "so together they ascend. Keep only one learning rate. For another factor, "
                    "use `sl.Scale`."
                )
                return
            if sign == -1:
                descending[i] = part.name


def _late_clips(links: list[Part]) -> Iterator[str]:
    """Warnings of links that clip updates after a learning rate scaled them."""
    inside = (inner.module for link in links for inner in transforms(link.module))
    if any("residuals" in module.needs for module in inside):
        return  # which does not take a gradient, so that only its step can be clipped
    rate: str | None = None
    for part in links:
        if rate is not None and part.module.clips:
            yield (
                f"'{part.name}' comes after '{rate}', so it clips the step, not the gradient. "
                f"To clip the gradient, put it first: `{operand(part.module)} | ...`."
            )
        if any(inner.module.sets_learning_rate for inner in transforms(part.module)):
            rate = part.name


_LATE = {
    AddDecayedWeights: "it adds the weights to the step, and they grow. Put it before the learning "
    "rate, or use `sl.SubtractDecayedWeights`, whose decay does not follow the learning rate.",
    Cautious: "it drops the entries that lower the loss. Put it before the learning rate.",
}
"""What links do wrong that take updates to point along the gradients, where they point against."""


def _late_links(links: list[Part]) -> Iterator[str]:
    """The warnings of such links that come after a learning rate."""
    rate: dict[str, str] = {}
    late: dict[str, Part] = {}
    for link in links:
        signs = zip(leaf_paths(link.params), link.module.signs(link.params), strict=True)
        flipped = [path for path, sign in signs if sign == -1]
        late = {path: part for path, part in late.items() if path not in flipped}
        if not flipped:
            for part in _inside(link):
                if type(part.module) in _LATE:
                    late |= dict.fromkeys(rate.keys() & set(leaf_paths(part.params)), part)
        rate |= dict.fromkeys(flipped, link.name)
    for path, part in sorted(late.items())[:1]:
        yield f"'{part.name}' comes after '{rate[path]}', so {_LATE[type(part.module)]}"


def _early_constraints(links: list[Part]) -> Iterator[str]:
    """Warnings of links that change updates after a constraint shaped them."""
    constrained: dict[str, Part] = {}
    for link in links:
        inner = _inside(link)
        for part in inner:
            # Measuring links are no rules, and zero updates keep the parameters as they are.
            changes = isinstance(part.module, AbstractRule) and part.module.update_sign != 0
            both = constrained.keys() & set(leaf_paths(part.params))
            if not changes or part.module.constrains or not both:
                continue
            first = constrained[min(both)]
            yield (
                f"'{part.name}' comes after '{first.name}' and changes its updates, so the "
                "parameters no longer meet the constraint. Put the constraint last: "
                f"`... | {operand(first.module)}`."
            )
            return
        for part in inner:
            if part.module.constrains:
                constrained |= dict.fromkeys(leaf_paths(part.params), part)


def _two_linearizations(transform: AbstractTransform[Any], params: Params) -> Iterator[str]:
    """The warning of two rules that each linearize the loss in some of the parameters."""
    parts = (p for p in transforms(transform, params=params) if "residuals" in p.module.needs)
    names = [part.name for part in parts if jax.tree.leaves(part.params)]
    if len(names) > 1:
        yield (
            f"'{names[0]}' and '{names[1]}' each compute a step that would reduce all residuals if "
            "the parameters of the other one were fixed, so together they overshoot. Use one rule "
            "for both groups, and a first-order rule for the rest."
        )


def _negative_rates(transform: AbstractTransform[Any]) -> Iterator[str]:
    """The warnings of learning rates whose own sign undoes the flip."""
    for part in transforms(transform):
        rate = part.module.learning_rate if part.module.sets_learning_rate else None
        if isinstance(rate, float) and rate < 0:
            yield (
                f"The learning rate of '{part.name}' is {rate}, so each step ascends the loss. "
                f"Write {-rate}. To ascend on purpose, write {-rate} and use `tx.maximize()`."
            )


def _idle_part(part: Part) -> Part | None:
    """The part of a link, or the link itself, that makes its result zero in some steps."""
    if isinstance(part.module, AbstractPacedWrapper):
        return part
    paced: Part | None = None
    for inner in part.children():
        if not isinstance(inner.module, AbstractTransform):
            continue
        inner = inner._replace(path=part.path + inner.path)
        if isinstance(part.module, Chain) and not keeps_zeros(inner.module):
            paced = None
        paced = _idle_part(inner) or paced
    return paced
