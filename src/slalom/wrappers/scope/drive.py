"""Hyperparameters driven by stateful schedules."""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx

from ..._core.fields.hyperparams import targets, with_field
from ..._core.fields.schedule import (
    AbstractSchedule,
    AbstractStatefulSchedule,
    check_schedule_value,
)
from ..._core.protocol.context import Context
from ..._core.protocol.inputs import missing
from ..._core.protocol.parts import Part
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer
from ..._core.text.messages import uncalled
from ...tree.types import Gradients, Params, PyTree, is_function


class DriveState(eqx.Module):
    """The state of `Drive`."""

    schedules: dict[str, Any]
    """The state of each schedule, by the name of the hyperparameter that it drives."""
    inner: PyTree
    """The inner transform's state."""


class Drive(AbstractWrapper[DriveState]):
    """The inner transform with hyperparameters driven by stateful schedules.

    Made by `tx.drive`, which describes the arguments.

    In every step each schedule is first updated with the context, especially the loss `value`. Its
    new value then replaces the hyperparameter. Inside `.every_k` a schedule sees one step per
    window, with the mean loss.

    `opt.hyperparams` shows the value that the last step used. The next step uses it too, unless
    its loss changes the schedule.
    """

    schedules: dict[str, AbstractStatefulSchedule]

    over: ClassVar[str] = "number"
    follows_loss: ClassVar[bool] = True

    def __init__(self, inner: AbstractTransform, schedules: Mapping[str, Any]):
        if not isinstance(schedules, Mapping):
            raise TypeError(
                "`.drive` takes a mapping from hyperparameters to schedules, such as "
                f"{{'learning_rate': schedule}}, got {schedules!r}."
            )
        self.inner = inner
        self.schedules = dict(schedules)
        taken: dict[str, str] = {}
        for name, schedule in schedules.items():
            _check_schedule(name, schedule)
            for path, (part, field) in targets(inner, name).items():
                value = getattr(part.module, field.name)
                if isinstance(value, AbstractStatefulSchedule):
                    raise ValueError(
                        f"'{path}' is already driven by {value!r}, which '{name}' would "
                        "override. Drive it once."
                    )
                if path in taken:
                    raise ValueError(
                        f"'{path}' would be driven twice: by '{taken[path]}' and by '{name}'."
                    )
                taken[path] = name

    @property
    def passes_gradients(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        """Whether no schedule uses the gradients."""
        return "grad" not in self.needs

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        """The entries of the context that the schedules need."""
        return tuple(dict.fromkeys(name for s in self.schedules.values() for name in s.needs))

    def init(self, params: Params) -> DriveState:
        return DriveState(
            {name: s.init() for name, s in self.schedules.items()}, self.inner.init(params)
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, DriveState]:
        for name in self.needs:
            if not here.context.has(name):
                raise TypeError(missing("Drive", name))
        part, *_ = self.children(here)
        result, inner = part.run(write, updates)
        return result, DriveState(self._advanced(here.state, here.context), inner)

    def children(self, here: Part) -> tuple[Part, ...]:
        state, context = here.state, here.context
        values: Mapping[str, Any] = self.schedules
        if state is not None and context is not None:
            advanced = self._advanced(state, context)
            values = {
                name: check_schedule_value(s, s.value(advanced[name]), context.step)
                for name, s in self.schedules.items()
            }
        states = {} if state is None else state.schedules
        outer = here._replace(params=None)
        schedules = (
            outer.child((n,), s, lambda outer, n=n: outer.schedules[n], states.get(n))
            for n, s in self.schedules.items()
        )
        return (self.inner_part(here)._replace(module=self._with(values)), *schedules)

    def _advanced(self, state: DriveState, context: Context) -> dict[str, Any]:
        """The states of the schedules after a step with this context. A schedule whose needs the
        context lacks keeps its state."""

        def advance(schedule: AbstractStatefulSchedule, s: PyTree) -> PyTree:
            return schedule.update(s, context) if all(map(context.has, schedule.needs)) else s

        return {name: advance(s, state.schedules[name]) for name, s in self.schedules.items()}

    def _with(self, values: Mapping[str, Any]) -> AbstractTransform:
        """The inner transform with these values of its driven hyperparameters."""
        inner = self.inner
        for name, value in values.items():
            for part, field in targets(self.inner, name).values():
                inner = with_field(inner, part, field, value)
        return inner


def _check_schedule(name: str, schedule: object) -> None:
    if isinstance(schedule, AbstractStatefulSchedule):
        return
    advice = uncalled(schedule) if isinstance(schedule, type) else ""
    if not advice and (isinstance(schedule, AbstractSchedule) or is_function(schedule)):
        advice = " Pass a stateless schedule as the hyperparameter itself, in place of a number."
    raise TypeError(
        f"`.drive` takes stateful schedules, such as `sl.schedules.ReduceOnPlateau(1e-3)`, got "
        f"{schedule!r} of type {type(schedule).__name__} for '{name}'.{advice}"
    )
