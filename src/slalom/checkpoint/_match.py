"""Matches a program with a file or a dict, replaces its leaves, and reports differences."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.engine.encoded import is_encoded
from .._core.state.marks import COPY
from .._core.text.messages import listed, report, warn
from .._core.text.printing import shortest
from .._loop.binding.binding import named_arrays
from .._loop.binding.optimizer import Optimizer
from .._loop.reports.rebind import Match, Side, in_form_of, match_leaves
from ..tree.types import PyTree, Tracer
from ..wrappers.scope.store import Store
from ._leaves import (
    StateLayout,
    filled,
    form,
    is_decodable,
    kind,
    layout_of,
    named_leaves,
    optimizers,
    placed,
    raw,
    read,
    saved_leaves,
    shape_of,
)


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
        items = {name: _differences(x) if isinstance(x, Mapping) else x for name, x in fields}
        return report(items, rare=("restarted", "recoded"))


class Source(NamedTuple):
    """A file or a dict that was read."""

    where: str
    """The source at the start of a sentence."""
    items: Mapping[str, Any]
    """Arrays, read or not, and numbers and strings, by name."""
    layouts: Mapping[str, StateLayout]
    """The layouts of optimizers, by path, where they are known."""


class Loaded(dict[str, Any]):
    """The trees that were loaded, by keyword, and a report."""

    report: Report
    """A report of the matches and differences."""


def assemble(
    source: Source, templates: Mapping[str, PyTree], strict: bool, hyperparams: str
) -> Loaded:
    """The templates with the values of the source.

    **Arguments:**

    - `source`: what was read.
    - `templates`: the trees of the program, by keyword.
    - `strict`: whether a difference is an error.
    - `hyperparams`: whose hyperparameters to use: `"program"` or `"file"`.
    """
    if hyperparams not in ("program", "file"):
        raise ValueError(f'`hyperparams` must be "program" or "file", got {hyperparams!r}.')
    comparison = _Comparison(source, take_hyperparams=hyperparams == "file")
    for root, template in templates.items():
        comparison.compare(root, template)
    asked = (name for name in source.items if name.partition(".")[0] in templates)
    comparison.note("unexpected", *(name for name in asked if name not in comparison.used))
    report = comparison.report()
    if strict and not report.fits:
        saved = dict.fromkeys(name.partition(".")[0] for name in source.items)
        raise MismatchError(_mismatch(report, source.where, [*templates], [*saved]))

    def new(name: str, leaf: Any) -> Any:
        if name in comparison.values:
            return placed(comparison.values[name], leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise MismatchError(
                f"{source.where} has nothing that fits '{name}', and the program has no value for "
                "it: it is abstract. Pass a model and an optimizer with arrays."
            )
        return leaf

    # Nothing large has been read so far. Now each array is read and put on its devices in turn.
    loaded = Loaded(
        (root, jax.tree.structure(x).unflatten(new(*pair) for pair in named_leaves(root, x)))
        for root, x in templates.items()
    )
    if report.hyperparams:
        warn(_other_hyperparams(report, source.where))
    if copies := comparison.stale_copies():
        warn(_other_copies(copies, source.where))
    loaded.report = report
    return loaded


class _Comparison:
    """The matches and differences of a program and a source.

    **Arguments:**

    - `source`: what was read.
    - `take_hyperparams`: whether to use its hyperparameters.
    """

    def __init__(self, source: Source, take_hyperparams: bool):
        self.source, self.take_hyperparams = source, take_hyperparams
        self.values: dict[str, Any] = {}
        """The new values of leaves, by their names in the program."""
        self.used: set[str] = set()
        """Names in the source that have a counterpart in the program."""
        self.outside: set[str] = set()
        """Names in the program of what was loaded outside of optimizers, such as parameters."""
        self.copies: dict[str, str] = {}
        """Missing state that copies a parameter, and the path of that parameter."""
        self.notes: dict[str, dict[str, Any]] = {f.name: {} for f in dataclasses.fields(Report)}
        """The fields of the report."""

    def report(self) -> Report:
        """The report."""
        pairs = ("reshaped", "retyped", "hyperparams")
        fields: dict[str, Any] = {
            name: items if name in pairs else tuple(items) for name, items in self.notes.items()
        }
        return Report(**fields)

    def note(self, field: str, *names: str) -> None:
        """Adds names to a field of the report."""
        self.notes[field].update(dict.fromkeys(names))

    def compare(self, root: str, template: PyTree) -> None:
        """Matches the leaves of a tree with the source."""
        leaves = saved_leaves(root, template)
        for name, leaf in leaves.items():
            if isinstance(leaf, Tracer):
                raise TypeError(
                    f"'{name}' is being traced: a checkpoint cannot be loaded inside a function "
                    "that JAX transforms. Load it first, and pass what it holds."
                )
        for path, opt in optimizers(root, template).items():
            for name in self._compare_optimizers(path, opt):
                leaves.pop(name, None)
        for name, leaf in leaves.items():
            self._take_if_alike(name, leaf, self.source.items.get(name))
        self.used.update(leaves)
        self.outside |= leaves.keys() & self.values.keys()

    def stale_copies(self) -> list[str]:
        """Missing copies of parameters that were loaded."""

        def is_loaded(param: str) -> bool:
            # The model of an optimizer may be a part of any tree, or be one array without a path.
            return any(name.endswith(param and f".{param}") for name in self.outside)

        return [name for name, param in self.copies.items() if is_loaded(param)]

    def _take(self, names: list[str], values: list[Any]) -> None:
        """Takes values in place of leaves."""
        self.note("loaded", *names)
        self.values.update(zip(names, values, strict=True))

    def _take_if_alike(self, name: str, leaf: Any, value: Any) -> None:
        """Takes a value in place of a leaf if it fits; `None` stands for no value."""
        if value is None:
            self.note("missing", name)
        elif form(value) == form(leaf):
            self._take([name], [value])
        else:
            self._differ(name, leaf, value)

    def _differ(self, name: str, leaf: Any, value: Any) -> None:
        """Notes the difference between a leaf and a value of another form."""
        shapes, kinds = (shape_of(value), shape_of(leaf)), (kind(value), kind(leaf))
        if None not in shapes and shapes[0] != shapes[1]:
            self.notes["reshaped"][name] = str(shapes[0]), str(shapes[1])
        elif kinds[0] != kinds[1]:
            self.notes["retyped"][name] = kinds
        else:
            # One codec may have made other arrays of a leaf in another version.
            self.notes["retyped"][name] = _arrays(value), _arrays(leaf)

    # --- optimizers -------------------------------------------------------------------------

    def _compare_optimizers(self, path: str, opt: Optimizer) -> set[str]:
        """Matches the arrays of an optimizer with the source, by the rules of `opt.rebind`.

        **Returns:** their names, without that of the count.
        """
        items, program = self.source.items, layout_of(opt, f"{path}.")
        saved = self.source.layouts.get(path, program)
        arrays = {f"{path}.{name}": x for name, x in named_arrays(opt.arrays).items()}
        codecs = {repr(x.codec): x.codec for x in program["state"].leaves if is_encoded(x)}
        count, runs = items.get(f"{path}.count"), opt.arrays.count.shape
        fits = _can_follow if (shape_of(count) or ()) == runs else lambda _, __: False
        for part, ours in program.items():
            theirs = saved[part].mapped(
                lambda x: x if {*jax.tree.leaves(x)} <= items.keys() else None
            )
            before = theirs.mapped(lambda x: filled(x, items, codecs))
            after = ours.mapped(lambda x: filled(x, arrays, codecs))
            for side in (after, before):
                for i in side.entries:
                    # Ages are put together from single entries.
                    side.leaves[i] = _concrete(side.leaves[i])
            matched = match_leaves(before, after, count, fits, len(runs))
            if part == "rules":
                self._compare_rules(ours, after, matched)
            else:
                self._compare_states(path, ours, after, matched, runs)
            # If the hyperparameters of the program are kept, those of the source are not missed.
            kept = part == "rules" and not self.take_hyperparams
            for j, (slot, names) in enumerate(theirs.pairs):
                if j in matched.used or kept or slot.rule == Store.__name__:
                    self.used.update(jax.tree.leaves(names))
        return {*jax.tree.leaves([side.leaves for side in program.values()])}

    def _compare_rules(self, ours: Side, after: Side, matched: Match) -> None:
        theirs = matched.values | matched.misfits
        for i, (name, leaf) in enumerate(zip(ours.leaves, after.leaves, strict=True)):
            if self.take_hyperparams or isinstance(leaf, jax.ShapeDtypeStruct):
                self._take_if_alike(name, leaf, theirs.get(i))
            elif i in theirs:
                pair = [np.asarray(raw(read(x))) for x in (theirs[i], leaf)]
                if form(theirs[i]) != form(leaf) or pair[0].tobytes() != pair[1].tobytes():
                    self.notes["hyperparams"][name] = tuple(map(_number, pair))

    def _compare_states(
        self, path: str, ours: Side, after: Side, matched: Match, runs: tuple[int, ...]
    ) -> None:
        entries = after.entries
        for i, (slot, leaf) in enumerate(after.pairs):
            names, name = jax.tree.leaves(ours.leaves[i]), f"{path}.{slot.name}"
            value, misfit = matched.values.get(i), matched.misfits.get(i)
            if value is not None and form(value) == form(leaf):
                self._take(names, jax.tree.leaves(value))
            elif value is not None and _can_follow(value, leaf):
                recoded = in_form_of(leaf, jax.tree.map(jnp.asarray, read(value)))
                self._take(names, jax.tree.leaves(recoded))
                self.note("recoded", name)
            elif value is not None and value.shape[: len(runs)] == runs:
                # Put together from the entries of other leaves, so it may have another shape.
                self._take(names, [value])
            elif value is not None:
                self._differ(names[0], leaf, value)
            elif misfit is not None and (i in entries or _can_follow(misfit, leaf)):
                self.note("restarted", name)
            elif misfit is not None:
                self._differ(names[0], leaf, misfit)
            elif slot.rule != Store.__name__:
                self.note("missing", *names)
                if slot.stored == COPY:
                    self.copies[name] = slot.param or ""
            elif isinstance(leaf, jax.ShapeDtypeStruct):
                # The number of steps for which the state was stored.
                self.values[names[0]] = _concrete(leaf)


def _concrete(x: Any) -> Any:
    return np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else read(x)


def _can_follow(old: Any, new: Any) -> bool:
    """Whether the value of an old leaf can be stored as the new one."""
    if form(old) == form(new):
        return True
    if shape_of(old) != shape_of(new) or shape_of(old) is None:
        return False
    if is_encoded(old) and not is_decodable(old):
        return False
    before, after = (x.dtype.name if is_encoded(x) else kind(x) for x in (old, new))
    if before == after:
        return True
    if "key<" in before + after:
        return False
    families = jnp.floating, jnp.complexfloating
    return any(all(jnp.issubdtype(x, f) for x in (before, after)) for f in families)


def _arrays(leaf: Any) -> str:
    arrays = leaf.arrays.items()
    return f"{kind(leaf)} with " + ", ".join(f"{n} {kind(x)}{list(x.shape)}" for n, x in arrays)


# --- messages -------------------------------------------------------------------------------


def _number(x: np.ndarray) -> str:
    """A hyperparameter in short, or those of several runs."""
    if x.ndim == 0:
        return shortest(x)
    options: Any = {"threshold": 4, "edgeitems": 2, "formatter": {"all": shortest}}
    return np.array2string(x, separator=", ", **options)


def _differences(changes: Mapping[str, tuple[str, str]]) -> list[str]:
    """Both values of each item in words."""
    return [
        f"{name} is {theirs} in the file and {ours} here"
        for name, (theirs, ours) in changes.items()
    ]


def _mismatch(report: Report, where: str, asked: list[str], saved: list[str]) -> str:
    """The message for a checkpoint that does not fit.

    **Arguments:**

    - `report`: the differences.
    - `where`: the checkpoint, at the start of a sentence.
    - `asked`, `saved`: the keywords of the program, and those in the checkpoint.
    """
    lines = {
        "only in the program": list(report.missing),
        "only in the file": list(report.unexpected),
        "other shapes": _differences(report.reshaped),
        "other dtypes": _differences(report.retyped),
    }
    text = "".join(f"\n  {what}: {listed(items, 8)}" for what, items in lines.items() if items)
    if {name.partition(".")[0] for name in report.missing} & {*asked} - {*saved}:
        text += f"\nIt was saved with the keywords {', '.join(saved)}: load it with the same."
    return (
        f"{where} does not fit this program:{text}\nPass the same model and optimizer as when it "
        "was saved, or `strict=False` to load what fits and keep the program's values for the rest."
    )


def _other_hyperparams(report: Report, where: str) -> str:
    """The warning for hyperparameters that differ."""
    return (
        f"{where} has other hyperparameters, and those of the program are kept: "
        f"{listed(_differences(report.hyperparams), 8)}. To continue with those of the file, pass "
        '`hyperparams="file"`.'
    )


def _other_copies(copies: list[str], where: str) -> str:
    """The warning for copies of the program's parameters beside parameters that were loaded."""
    return (
        f"{where} does not have {listed(copies, 4)}: these copies of parameters are those of the "
        "program, and the parameters were loaded, so the next steps would mix the two. Load the "
        "optimizer as it was saved, and then write `opt, report = opt.rebind(model, tx=tx)`."
    )
