"""A hyperparameter at one step."""

from ...tree.dtypes import as_float
from ...tree.types import Scalar
from ..protocol.context import Context
from ..protocol.parts import AbstractDeclared
from .schedule import AbstractSchedule, call_schedule


def read_number(module: AbstractDeclared, name: str, context: Context | None) -> Scalar | None:
    """A field of a transform or skip condition as this step uses it, in the dtype it has."""
    value = getattr(module, name)
    if isinstance(value, AbstractSchedule):
        step = None if context is None else context.step
        if step is None:
            raise TypeError(
                f"{type(module).__name__}.{name} is a schedule and needs the step count: pass "
                "`context=sl.Context(step=n)` with the number of updates so far."
            )
        value = call_schedule(value, value, step)
    return None if value is None else as_float(value)
