"""What people look at: a table of what happens to each parameter, and what steps report."""

from typing import Any

from . import tree
from ._model import Split
from ._paths import ByPath, leaf_paths
from ._transform import AbstractTransform, parts


class Description:
    """A table with a row for each array of a model."""

    def __init__(self, rows: list[dict[str, Any]]):
        self._rows = rows

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows by path, each with `path`, `group`, `transform` and `trainable`."""
        return {row["path"]: dict(row) for row in self._rows}

    def __repr__(self) -> str:
        columns = ("path", "group", "transform", "trainable")
        table = [columns] + [
            tuple("yes" if row[c] is True else str(row[c] or "–") for c in columns)
            for row in self._rows
        ]
        widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        )


def describe(transform: AbstractTransform, model: Split) -> Description:
    """What happens to each array of a model."""
    links: dict[str, list[str]] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for part in parts(transform, params=model.params):
        for path in leaf_paths(part.params):
            if len(part.group) > len(groups.get(path, ())):
                groups[path] = part.group
            if not part.transform.inside():
                links.setdefault(path, []).append(part.name)
    rows = []
    for path, leaf, trained in zip(model.paths, model.leaves, model.trained, strict=True):
        if tree.is_array(leaf):
            rows.append(
                {
                    "path": path,
                    "group": ".".join(groups.get(path, ())),
                    "transform": " | ".join(links.get(path, [])),
                    "trainable": trained,
                }
            )
    return Description(rows)


def metrics(transform: AbstractTransform, state: Any) -> ByPath:
    """What each transform reports of its last update, by path."""
    return ByPath(
        (".".join(filter(None, (*part.path, name))), value)
        for part in parts(transform, state)
        for name, value in part.transform.metrics(part.state).items()
    )
