"""A rule at one step, and its inputs and the fields of its state at a leaf."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

_Rule = TypeVar("_Rule")

STEP = "_numbers"
"""The attribute that holds the numbers of a rule at a step."""


def at_step(rule: _Rule, numbers: dict[str, Any]) -> _Rule:
    """A copy of a rule with the numbers of one step, to which phases may assign others.

    **Arguments:**

    - `rule`: the rule, or such a copy of it.
    - `numbers`: its hyperparameters and other numbers, by name.
    """
    here = object.__new__(type(rule))
    vars(here).update(vars(rule), **numbers, **{STEP: numbers})
    return here


class LeafInputs(NamedTuple):
    """The inputs of a rule at a leaf, or with a leading axis at each matrix of a leaf."""

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


class Fields(SimpleNamespace):
    """The fields of a state that a phase reads and assigns."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self):
            raise AttributeError(_no_field(name, vars(self)))
        vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_no_field(name, vars(self)))


def _no_field(name: str, fields: Iterable[str]) -> str:
    names = ", ".join(f"'{n}'" for n in fields) or "none"
    return (
        f"The state has no field '{name}' in this phase; its fields are: {names}. A rule passes "
        f"other arrays to its later phases in attributes of its own: `self.{name} = ...`."
    )
