"""The report of `opt.rebind`, and the default of its arguments."""

import dataclasses
from typing import Any, NamedTuple

from ..._core.text.messages import report


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
    """Copies of the parameters and related state that start again from their initial values."""

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
