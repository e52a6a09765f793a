"""Hyperparameters that follow schedules with a memory."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx

from .._core.fluent import AbstractFluent
from .._core.hyperparams import targets, with_field
from .._core.messages import uncalled
from .._core.printing import Call, method_call
from .._core.schedule import AbstractSchedule, AbstractStatefulSchedule, check_schedule_value
from .._core.transform import AbstractTransform, Context, Part, missing
from .._core.wrapper import AbstractWrapper
from .._types import Params, Updates


class DrivenState(eqx.Module):
    """What `Driven` remembers."""

    schedules: tuple[Any, ...]
    """The state of each schedule."""
    inner: Any
    """The inner transform's state."""


class Driven(AbstractWrapper):
    """The inner transform with hyperparameters that follow schedules with a memory.

    Made with `tx.drive({"learning_rate": schedule})`. In every step each schedule first takes in
    what the step knows, above all its loss `value`, and its value then stands in the place of
    the hyperparameter, whatever that was. Inside `.every_k` a schedule sees the windows with
    their mean losses.

    `opt.hyperparams` shows the value that the last step used: the next one uses it too, unless
    the loss that it is given changes it.

    **Arguments:**

    - `inner`: the transform.
    - `schedules`: a mapping from hyperparameters to stateful schedules such as
        `sl.schedules.ReduceOnPlateau`. A hyperparameter is named by its path inside `inner`, any
        unambiguous suffix of it, or a glob.
    """

    inner: AbstractTransform
    schedules: tuple[AbstractStatefulSchedule, ...]
    names: tuple[str, ...] = eqx.field(static=True)

    elementwise: ClassVar[bool] = True

    def __init__(self, inner: AbstractTransform, schedules: Mapping[str, Any]):
        if not isinstance(schedules, Mapping):
            raise TypeError(
                "`.drive` takes a mapping from hyperparameters to schedules, such as "
                f"{{'learning_rate': schedule}}, got {schedules!r}."
            )
        self.inner = inner
        self.names = tuple(schedules)
        self.schedules = tuple(schedules.values())
        taken: dict[str, str] = {}
        for name, schedule in schedules.items():
            _check_schedule(name, schedule)
            for path, part, field in targets(inner, name):
                own = getattr(part.transform, field.name)
                if isinstance(own, AbstractStatefulSchedule):
                    raise ValueError(
                        f"'{path}' is driven by {own!r} already, which would hide what '{name}' "
                        "makes of it. Drive it once."
                    )
                if path in taken:
                    raise ValueError(
                        f"'{path}' would be driven twice: by '{taken[path]}' and by '{name}'."
                    )
                taken[path] = name

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the schedules need of the context."""
        return tuple(dict.fromkeys(name for s in self.schedules for name in s.needs))

    def init(self, params: Params) -> DrivenState:
        return DrivenState(tuple(s.init() for s in self.schedules), self.inner.init(params))

    def update(
        self,
        updates: Updates,
        state: DrivenState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, DrivenState]:
        return self._drive("update", updates, state, params, context)

    def step(
        self, grads: Updates, state: DrivenState, params: Params, context: Context | None = None
    ) -> tuple[Params, DrivenState]:
        return self._drive("step", grads, state, params, context)

    def _drive(
        self,
        verb: str,
        updates: Updates,
        state: DrivenState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, DrivenState]:
        context = Context() if context is None else context
        for name in self.needs:
            if not context.has(name):
                raise TypeError(missing("Driven", name))
        made, inner = self.run(verb, updates, state, params, context)
        return made, DrivenState(self._advanced(state, context), inner)

    def inside(
        self, state: Any = None, context: Context | None = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        (part,) = super().inside(state, context, params)
        values: Sequence[Any] = self.schedules
        if state is not None and context is not None:
            pairs = zip(self.schedules, self._advanced(state, context), strict=True)
            values = [check_schedule_value(s, s.value(own), context.step) for s, own in pairs]
        return (part._replace(transform=self._with(values)),)

    def _advanced(self, state: DrivenState, context: Context) -> tuple[Any, ...]:
        """The schedules' states for a step with this context, as far as it knows what they need."""
        return tuple(
            schedule.update(own, context) if all(map(context.has, schedule.needs)) else own
            for schedule, own in zip(self.schedules, state.schedules, strict=True)
        )

    def _with(self, values: Sequence[Any]) -> AbstractTransform:
        """The inner transform with these in the places of its driven hyperparameters."""
        inner = self.inner
        for name, value in zip(self.names, values, strict=True):
            for _, part, field in targets(self.inner, name):
                inner = with_field(inner, part, field, value)
        return inner

    def _code(self) -> Call:
        schedules = dict(zip(self.names, self.schedules, strict=True))
        return method_call(self, self.inner, AbstractFluent.drive, schedules=schedules)


def _check_schedule(name: str, given: Any) -> None:
    if isinstance(given, AbstractStatefulSchedule):
        return
    advice = uncalled(given) if isinstance(given, type) else ""
    if not advice and (isinstance(given, AbstractSchedule) or callable(given)):
        advice = " A schedule without a memory is given to the field itself, in place of a number."
    raise TypeError(
        f"`.drive` takes stateful schedules, such as `sl.schedules.ReduceOnPlateau(1e-3)`, got "
        f"{given!r} of type {type(given).__name__} for '{name}'.{advice}"
    )
