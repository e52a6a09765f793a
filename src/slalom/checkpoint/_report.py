"""Compares a checkpoint with a program."""

import dataclasses
from collections.abc import Mapping

from .._core.text.messages import listed, report


class MismatchError(ValueError):
    """A checkpoint that does not fit the program that loads it."""

    __module__ = "slalom.checkpoint"  # as it is shown when it is raised


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """A report of loading a checkpoint, by path."""

    loaded: tuple[str, ...]
    """Values from the checkpoint, by their names in the program."""
    missing: tuple[str, ...]
    """Values of the program that have no match in the checkpoint, and stay as they are."""
    unexpected: tuple[str, ...]
    """Names that only the checkpoint has."""
    reshaped: Mapping[str, tuple[str, str]]
    """Names with another shape in the file than in the program, whose value stays."""
    retyped: Mapping[str, tuple[str, str]]
    """Names with another dtype or type, likewise."""
    restarted: tuple[str, ...]
    """State of the optimizer that would fit, but keeps the program's value, because other state of
    the same parameter does not fit: means of different ages would be far too large or too small."""
    recoded: tuple[str, ...]
    """State of the optimizer that was loaded, and is in another codec or dtype than in the file."""
    hyperparams: Mapping[str, tuple[str, str]]
    """Hyperparameters with another value: likewise. Empty with `hyperparams="file"`."""

    @property
    def fits(self) -> bool:
        """Whether the checkpoint fits the program, up to values of hyperparameters, and codecs and
        dtypes of state."""
        return not (self.missing or self.unexpected or self.reshaped or self.retyped)

    def __repr__(self) -> str:
        fields = vars(self).items()
        items = {name: differences(x) if isinstance(x, Mapping) else x for name, x in fields}
        return report(items, rare=("restarted", "recoded"))


def differences(changes: Mapping[str, tuple[str, str]]) -> list[str]:
    """Both values of each item in words."""
    return [
        f"{name} is {theirs} in the file and {ours} here"
        for name, (theirs, ours) in changes.items()
    ]


def mismatch(report: Report, where: str, asked: list[str], saved: list[str]) -> str:
    """The message for a checkpoint that does not fit.

    **Arguments:**

    - `report`: the differences.
    - `where`: the checkpoint, at the start of a sentence.
    - `asked`, `saved`: the keywords of the program, and those in the checkpoint.
    """
    lines = {
        "only in the program": list(report.missing),
        "only in the file": list(report.unexpected),
        "other shapes": differences(report.reshaped),
        "other dtypes": differences(report.retyped),
    }
    text = "".join(f"\n  {what}: {listed(items, 8)}" for what, items in lines.items() if items)
    if {name.partition(".")[0] for name in report.missing} & {*asked} - {*saved}:
        text += f"\nIt was saved with the keywords {', '.join(saved)}: load it with the same."
    return (
        f"{where} does not fit this program:{text}\nPass the same model and optimizer as when it "
        "was saved, or `strict=False` to load what fits and keep the program's values for the rest."
    )


def other_hyperparams(report: Report, where: str) -> str:
    """The warning for hyperparameters that differ."""
    return (
        f"{where} has other hyperparameters, and those of the program are kept: "
        f"{listed(differences(report.hyperparams), 8)}. To continue with those of the file, pass "
        '`hyperparams="file"`.'
    )
