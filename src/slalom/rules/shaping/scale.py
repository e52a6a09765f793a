"""Transforms that scale updates by one number."""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax

from ... import fields, tree
from ..._core.fields.schedule import AbstractStatefulSchedule
from ..._core.protocol.parts import Part
from ..._core.protocol.writer import RETURN
from ..._core.text.printing import Call, constructor_call
from ...tree.types import Hyperparameter, Params, Tracer, WhereLike, is_function
from ...where.masks import labels, selected_from
from ...where.resolve import Cases, Where, as_where
from .._base import AbstractRule, AbstractTransform


class _AbstractScale(AbstractRule[None]):
    """Multiplies updates by a number."""

    step_size: fields.Number = fields.hyperparameter()

    keeps_zeros: ClassVar[bool] = True

    def direction(self, g, leaf):
        return g * self.step_size

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.step_size),) * len(jax.tree.leaves(params))


class Scale(_AbstractScale):
    """Multiplies updates by a factor: u ↦ s·u.

    **Arguments:**

    - `step_size`: the factor s; negative to descend.
    """


class ScaleBySchedule(_AbstractScale):
    """Multiplies updates by a function of the step: u ↦ s(n)·u.

    It does not flip the sign. To descend with a learning-rate schedule, use
    `ScaleByLearningRate(schedule)`.

    **Arguments:**

    - `step_size`: the schedule s, or any function of the step that returns a scalar.
    """


def sign_of(factor: Hyperparameter | AbstractStatefulSchedule) -> int | None:
    """The sign of a factor, or `None` if it is unknown."""
    if is_function(factor) or isinstance(factor, AbstractStatefulSchedule | Tracer):
        return None
    number = float(factor)  # an array would be compared by the trace around it
    return 0 if number == 0 else (-1 if number < 0 else 1)


class ScaleBy(AbstractTransform[None]):
    """Multiplies the updates of selected parameters by a factor: u ↦ s·u.

    The first selector that matches a parameter decides; other updates pass through unchanged.
    After an optimizer the factors scale the learning rate, including weight decay. A learning rate
    that decays from layer to layer:

    ```python
    >>> factors = {sl.where.path(f"layers.{i}.**"): 0.9 ** (11 - i) for i in range(12)}
    >>> tx = sl.adamw(1e-3) | sl.ScaleBy(factors)

    ```

    Each factor is a hyperparameter, named by its position: `scale_by.0.step_size`.

    **Arguments:**

    - `factors`: a mapping from selectors (or functions of the parameters) to factors: numbers,
        0-d arrays or schedules.
    """

    factors: tuple[Scale, ...]
    cases: Cases = eqx.field(static=True)

    keeps_zeros: ClassVar[bool] = True
    over: ClassVar[str] = "tree"

    def __init__(self, factors: Mapping[WhereLike, Hyperparameter]):
        if not isinstance(factors, Mapping):
            raise TypeError(
                "ScaleBy takes a mapping from selectors to factors, such as "
                f"`{{sl.where.path('head.**'): 0.1}}`, got {factors!r} of type "
                f"{type(factors).__name__}."
            )
        wheres = tuple(map(as_where, factors))
        self.factors = tuple(map(_factor, wheres, factors.values()))
        self.cases = Cases(tuple(zip(wheres, range(len(wheres)), strict=True)))

    def init(self, params: Params) -> None:
        return tree.no_state(params)

    def update(self, updates, state, params=None, context=None):
        leaves, structure = jax.tree.flatten(updates)
        by_leaf = labels(self.cases, selected_from(self.cases, updates, params))
        for part in self.children(Part.root(self, state, context)):
            chosen = [i for i, label in enumerate(by_leaf) if str(label) == part.path[0]]
            scaled, _ = part.run(RETURN, [leaves[i] for i in chosen])
            for i, leaf in zip(chosen, scaled, strict=True):
                leaves[i] = leaf
        return structure.unflatten(leaves), None

    def children(self, here: Part) -> tuple[Part, ...]:
        parts = [
            here.child((str(i),), factor, lambda outer, i=i: outer.factors[i])
            for i, factor in enumerate(self.factors)
        ]
        if here.params is None:
            return tuple(parts)
        by_leaf = labels(self.cases, here.params)
        masks = (tuple(label == i for label in by_leaf) for i in range(len(parts)))
        return tuple(
            part._replace(params=tree.cut(here.params, keep))
            for part, keep in zip(parts, masks, strict=True)
        )

    def signs(self, params: Params) -> tuple[int | None, ...]:
        signs: dict[Any, int | None] = {None: 1}
        signs |= {i: sign_of(factor.step_size) for i, factor in enumerate(self.factors)}
        return tuple(signs[label] for label in labels(self.cases, params))

    def _code(self) -> Call:
        pairs = zip(self.cases.cases, self.factors, strict=True)
        factors = {where: factor.step_size for (where, _), factor in pairs}
        return constructor_call(self, factors=factors)


def _factor(where: Where, factor: Hyperparameter) -> Scale:
    try:
        return Scale(factor)
    except (TypeError, ValueError) as error:
        message = str(error).replace("Scale.step_size", f"The factor of {where!r} in ScaleBy")
        raise type(error)(message) from None
