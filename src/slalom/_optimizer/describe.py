"""Tables and metrics for inspection."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float
from wadler_lindig import TextDoc

from .. import tree
from .._core.fields import hyperparameter_fields
from .._core.printing import Call, shortest
from .._core.slots import Slot, slots
from .._core.transform import AbstractTransform
from .._core.walk import inner_transforms, transforms
from .._paths import dotted, whole
from .._types import Params
from ..where.resolve import Where
from ..wrappers.flatten import Flatten
from .model import Split


@dataclasses.dataclass
class _Row:
    """One array of a model."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool
    group: str = ""
    learning_rate: Float[Array, "*runs"] | None = None
    weight_decay: Float[Array, "*runs"] | None = None
    state_bytes: int = 0
    transform: str = ""

    def cells(self) -> list[str]:
        return [_cell(getattr(self, name)) for name in _COLUMNS]


_COLUMNS = [field.name for field in dataclasses.fields(_Row)]
_NUMBERS = ("learning_rate", "weight_decay")


class Description:
    """A table with a row for each array of a model."""

    def __init__(self, rows: list[_Row]):
        self._rows = rows

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows by path.

        **Returns:** a dict from paths to dicts with the keys `path`, `dtype`, `shape`, `trainable`,
        `group` (its labels in partitions), `learning_rate` and `weight_decay` (the values for the
        next step, or `None`), `state_bytes` (the state that belongs to this array alone) and
        `transform` (the transforms that act on it).
        """
        return {row.path: {c: getattr(row, c) for c in _COLUMNS} for row in self._rows}

    def __repr__(self) -> str:
        table = [_COLUMNS, *(row.cells() for row in self._rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(_COLUMNS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return "–"
    return shortest(value) if tree.is_array(value) else str(value)


def describe(
    transform: AbstractTransform[Any],
    state: Any,
    hyperparams: Mapping[str, Float[Array, "*runs"]],
    model: Split,
) -> Description:
    """Describes how each array of a model is optimized."""
    values = dict(hyperparams)
    rows = {
        path: _Row(path, str(leaf.dtype), tuple(leaf.shape), is_trainable)
        for path, leaf, is_trainable in zip(model.paths, model.leaves, model.trainable, strict=True)
        if tree.is_array(leaf)
    }
    for part in transforms(transform, state, params=model.params):
        known = {field.name for field in hyperparameter_fields(part.module)}
        numbers = {n: values.get(".".join((*part.path, n))) for n in _NUMBERS if n in known}
        for path in dict.fromkeys(map(dotted, map(whole, _key_paths(part.params)))):
            if path not in rows:
                continue  # inside a transform that changes the leaves, such as `.flatten()`
            row = dataclasses.replace(rows[path], **numbers)
            if part.group:
                row.group = ".".join(part.group)
            if not inner_transforms(part.module):
                row.transform = " | ".join(filter(None, (row.transform, part.name)))
            rows[path] = row
    places = slots(transform, state, list(rows))
    buffers = {
        part.name: part.module.shares(part.state, part.params)
        for part in transforms(transform, state, params=model.params)
        if isinstance(part.module, Flatten)
    }
    for slot, leaf in zip(places, jax.tree.leaves(state), strict=True):
        size = leaf.size * leaf.dtype.itemsize
        if slot.param in rows:
            rows[slot.param].state_bytes += size
        for path, fraction in _in_buffer(buffers, slot).items():
            rows[path].state_bytes += round(size * fraction)
    return Description(list(rows.values()))


def _in_buffer(buffers: Mapping[str, Any], slot: Slot) -> Mapping[str, float]:
    """The parameters that share a leaf of a flattened state, with the fraction of each."""
    for outer, shares in buffers.items():
        if slot.owner.startswith(f"{outer}.") and slot.param is not None:
            apart = slot.param.removeprefix("apart.")
            return {apart: 1.0} if apart != slot.param else shares.get(slot.param, {})
    return {}


def _key_paths(params: Params | None) -> list[tuple[Any, ...]]:
    return [key_path for key_path, _ in jax.tree_util.tree_leaves_with_path(params)]


def metrics(transform: AbstractTransform[Any], state: Any) -> dict[str, Array]:
    """The metrics of each transform's last update, by path."""
    return {
        ".".join(filter(None, (*part.path, name))): value
        for part in transforms(transform, state)
        for name, value in part.module.metrics(part.state).items()
    }


# --- the repr of an optimizer -----------------------------------------------------------------


def summary(
    transform: AbstractTransform[Any],
    state: Any,
    count: Any,
    parameters: int,
    trainable: Where | None,
) -> Call:
    """The `repr` of an optimizer."""
    arrays = jax.tree.leaves(state)
    size = sum(x.size * x.dtype.itemsize for x in arrays if hasattr(x, "dtype"))
    facts: dict[str, Any] = {} if trainable is None else {"trainable": trainable}
    facts["count"] = count
    facts["parameters"] = TextDoc(f"{parameters} arrays")
    facts["state"] = TextDoc(f"{len(arrays)} arrays, {bytes_as_text(size)}")
    return Call("Optimizer", (transform,), facts)


def bytes_as_text(size: int) -> str:
    """A size with three digits and its unit."""
    for power, unit in enumerate(("B", "kB", "MB")):
        if size < 1000 ** (power + 1):
            return f"{size / 1000**power:.3g} {unit}"
    return f"{size / 1000**3:.3g} GB"
