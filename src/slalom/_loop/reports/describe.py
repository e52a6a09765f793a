"""Tables and metrics for inspection."""

import dataclasses
from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import Array
from wadler_lindig import TextDoc

from ... import tree
from ..._core.fields.schedule import hyperparameter_fields
from ..._core.protocol.parts import inner_transforms, transforms
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.slots import Slot, slots
from ..._core.text import notebook
from ..._core.text.printing import LINE, Call, Infix, bytes_as_text, code, shortest
from ...tree.paths import dotted, whole
from ...wrappers.scope.forms import Flatten
from ..binding.model import Split

if TYPE_CHECKING:
    from rich.table import Table


_NUMBERS = ("learning_rate", "weight_decay")
_RIGHT = (*_NUMBERS, "state_bytes")
_NOTHING = "–"
_SHORT = 32
"""The length up to which a path is never broken in a terminal."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """The sums over all arrays of a model."""

    arrays: int
    """The number of arrays."""
    parameters: int
    """The number of entries of all arrays."""
    trainable: int
    """The number of trainable entries."""
    parameter_bytes: int
    """The bytes of all arrays."""
    trainable_bytes: int
    """The number of trainable bytes."""
    state_bytes: int
    """The bytes of the optimizer's state."""
    shared_state_bytes: int
    """The bytes of state that belongs to no single array, such as step counts."""

    def __str__(self) -> str:
        total = f"{self.parameters:,} parameters ({bytes_as_text(self.parameter_bytes)})"
        trained = f"{self.trainable:,} trainable ({bytes_as_text(self.trainable_bytes)})"
        shared = f", of which {bytes_as_text(self.shared_state_bytes)} shared"
        state = f"state {bytes_as_text(self.state_bytes)}{shared * bool(self.shared_state_bytes)}"
        return f"total: {total}, {trained}, {state}"


class Description:
    """A table with a row for each array of a model, and their totals.

    It prints as plain text. `.show()` prints a table with rules and colors to a terminal, where
    rich is installed, and the same plain text to a file or a pipe. `rich.print` and notebooks
    display it as a table too.
    """

    def __init__(self, rows: dict[str, dict[str, Any]], totals: Totals):
        self._rows = rows
        self.totals = totals

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows by path.

        **Returns:** a dict from paths to dicts with the keys `path`, `dtype`, `shape`, `trainable`,
        `group` (its labels in partitions), `learning_rate` and `weight_decay` (the values for the
        next step, or `None`), `state_bytes` (the state that belongs to this array alone),
        `transform` (the transforms that act on it) and `notes` (what they say about it, such as the
        matrix that they read it as). The sums are in `.totals`.
        """
        return {path: dict(row) for path, row in self._rows.items()}

    def show(self) -> None:
        """Prints the table: with rich in a terminal, if it is installed, otherwise as plain text.

        **Returns:** nothing.
        """
        try:
            from rich.console import Console
        except ImportError:
            print(self)
            return
        console = Console()
        # A table in a file or a pipe would be cut to the width of a terminal.
        console.print(self) if console.is_terminal else print(self)

    def _lines(self, cells_of: Callable[[dict[str, Any]], dict[str, str]]) -> list[list[str]]:
        """The header and the cells of each row. Notes are shown where there are any."""
        rows = [*map(cells_of, self._rows.values())]
        noted = any(cells["notes"] != _NOTHING for cells in rows)
        columns = [name for name in rows[0] if noted or name != "notes"]
        return [columns, *([cells[name] for name in columns] for cells in rows)]

    def __repr__(self) -> str:
        lines = self._lines(_cells)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        return "\n".join([*rows, str(self.totals)])

    def __rich__(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        # Narrower than the text: no rules between columns, no columns that say nothing, and
        # what is frozen is dim.
        table = Table(
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
            caption=Text(f"\n{self.totals}"),
            caption_justify="left",
        )
        rows = [*map(_short_cells, self._rows.values())]
        for row, cells in zip(self._rows.values(), rows, strict=True):
            cells["array"] = f"{row['dtype']}[{','.join(map(str, row['shape']))}]"
            if not row["trainable"]:
                cells["transform"] = "frozen"
        names = ["path", "array", "group", *_RIGHT, "transform", "notes"]
        names = [name for name in names if any(cells[name] != _NOTHING for cells in rows)]
        long = any(len(path) > _SHORT for path in self._rows)
        for name in names:
            table.add_column(
                name.replace("_", "\n"),
                justify="right" if name in _RIGHT else "left",
                overflow="fold",
                no_wrap=name != "transform" and not (name == "path" and long),
            )
        for row, cells in zip(self._rows.values(), rows, strict=True):
            # Text, not strings, in which rich would read brackets as markup.
            style = None if row["trainable"] else "dim"
            table.add_row(*(Text(cells[name]) for name in names), style=style)
        return table

    def _repr_html_(self) -> str:
        columns, *rows = self._lines(_short_cells)
        return notebook.document(notebook.table(columns, rows, str(self.totals), _RIGHT))


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row, by column."""
    return {column: _cell(value) for column, value in row.items()}


def _short_cells(row: dict[str, Any]) -> dict[str, str]:
    """The cells with the last segments of the transforms' paths, which fit on a screen."""
    names = [path.rpartition(".")[2] for path in row["transform"].split(" | ")]
    return _cells(row | {"transform": " | ".join(names)})


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return _NOTHING
    return shortest(value) if tree.is_array(value) else str(value)


def describe(opt: Any, model: Split) -> Description:
    """Describes how an optimizer treats each array of a model."""
    transform, state, values = opt.transform, opt.state, dict(opt.hyperparams)
    leaves = zip(model.paths, model.leaves, model.trainable, model.marked, strict=True)
    rows: dict[str, dict[str, Any]] = {
        path: {
            "path": path,
            "dtype": str(x.dtype),
            "shape": x.shape,
            "trainable": trained,
            "group": "",
            **dict.fromkeys(_NUMBERS),
            "state_bytes": 0,
            "transform": "",
            "notes": "marked" * (marked and not trained),
        }
        for path, x, trained, marked in leaves
        if tree.is_array(x)
    }
    buffers = {}
    for part in transforms(transform, state, params=model.params):
        if isinstance(part.module, Flatten):
            buffers[part.name] = part.module.shares(part.state, part.params)
        declared = {field.name for field in hyperparameter_fields(part.module)}
        numbers = {n: values.get(".".join((*part.path, n))) for n in _NUMBERS if n in declared}
        seen = jax.tree_util.tree_leaves_with_path(part.params)
        paths = [dotted(whole(key_path)) for key_path, _ in seen]
        for path, note in dict(zip(paths, part.module.notes(part.params), strict=True)).items():
            if path not in rows:
                continue  # inside a transform that changes the leaves, such as `.flatten()`
            row = rows[path]
            row |= numbers
            if part.group:
                row["group"] = ".".join(part.group)
            if not inner_transforms(part.module):
                row["transform"] = " | ".join(filter(None, (row["transform"], part.name)))
            notes = (*row["notes"].split("; "), note)
            row["notes"] = "; ".join(dict.fromkeys(filter(None, notes)))
    places = slots(transform, state, list(rows))
    shared = 0
    for slot, leaf in zip(places, jax.tree.leaves(state), strict=True):
        size = leaf.size * leaf.dtype.itemsize
        param = slot.param_among(rows)
        owners = _in_buffer(buffers, slot) if param is None else {param: 1.0}
        if not owners:
            shared += size
        for path, fraction in owners.items():
            rows[path]["state_bytes"] += round(size * fraction)
    arrays = [leaf for leaf in model.leaves if tree.is_array(leaf)]
    trained = jax.tree.leaves(model.params)
    totals = Totals(
        arrays=len(arrays),
        parameters=sum(leaf.size for leaf in arrays),
        trainable=sum(leaf.size for leaf in trained),
        parameter_bytes=notebook.size_of(arrays)[1],
        trainable_bytes=notebook.size_of(trained)[1],
        state_bytes=notebook.size_of(state)[1],
        shared_state_bytes=shared,
    )
    return Description(rows, totals)


def _in_buffer(buffers: Mapping[str, Any], slot: Slot) -> Mapping[str, float]:
    """The parameters that share a leaf of a flattened state, with the fraction of each."""
    for outer, shares in buffers.items():
        if slot.owner.startswith(f"{outer}.") and slot.param is not None:
            return shares.get(slot.param, {})
    return {}


def metrics(transform: AbstractTransform[Any], state: Any) -> dict[str, Array]:
    """The metrics of each transform's last update, by path."""
    return {
        ".".join(filter(None, (*part.path, name))): value
        for part in transforms(transform, state)
        for name, value in part.module.metrics(part.state).items()
    }


# --- the repr of an optimizer -----------------------------------------------------------------


def summary(opt: Any) -> Call:
    """The `repr` of an optimizer."""
    arrays, size = notebook.size_of(opt.state)
    trainable = opt.binding.trainable
    facts: dict[str, Any] = {} if trainable is None else {"trainable": trainable}
    facts["count"] = opt.arrays.count
    facts["parameters"] = TextDoc(_arrays(opt.binding.params.num_leaves))
    facts["state"] = TextDoc(f"{_arrays(arrays)}, {bytes_as_text(size)}")
    printed = opt.transform._code()
    if isinstance(printed, Infix):
        # It is indented by four spaces, and a comma follows.
        printed = dataclasses.replace(printed, width=LINE - 5)
    return Call("Optimizer", (printed,), facts)


def _arrays(number: int) -> str:
    return "1 array" if number == 1 else f"{number} arrays"


def as_html(opt: Any, values: Mapping[str, Any]) -> str:
    """An optimizer in a notebook, with the values of its hyperparameters."""
    printed = summary(opt)
    facts = ", ".join(f"{name}={code(value)}" for name, value in printed.kwargs.items())
    title = f'<b>Optimizer</b> <span class="slalom-quiet">{escape(facts)}</span>'
    inside = notebook.transform_tree(opt.transform, opt.state, values)
    return notebook.document(notebook.folded(title, inside, is_open=True))
