"""Shows transforms and optimizers in notebooks, as HTML trees that fold without scripts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

import jax

from ...tree.types import PyTree
from ..fields.schedule import AbstractSchedule, hyperparameter_fields
from ..protocol.parts import AbstractDeclared, Part
from .printing import bytes_as_text, code, shortest

# Without colors of its own: text, lines and shades work on light and dark pages.
_STYLE = """<style>
.slalom { font-family: ui-monospace, monospace; font-size: 0.85em; line-height: 1.6;
          overflow-x: auto; text-align: left; }
.slalom details, .slalom .slalom-fields { margin-left: 0.5em; padding-left: 0.8em;
          border-left: 1px solid rgba(128, 128, 128, 0.35); }
.slalom > details { margin-left: 0; padding-left: 0; border-left: none; }
.slalom summary { cursor: pointer; }
.slalom .slalom-quiet { opacity: 0.65; }
.slalom .slalom-fields { white-space: pre-wrap; }
.slalom table { border-collapse: collapse; font-size: inherit; color: inherit; }
.slalom th, .slalom td { padding: 0.1em 0.8em 0.1em 0; text-align: left; vertical-align: top;
          white-space: nowrap; }
.slalom tr > .slalom-number { text-align: right; }
.slalom thead th { border-bottom: 1px solid rgba(128, 128, 128, 0.6); }
.slalom td:last-child { white-space: normal; }
.slalom tfoot td { border-top: 1px solid rgba(128, 128, 128, 0.6); }
</style>"""


def document(body: str) -> str:
    """A piece of HTML together with the style that it needs."""
    return f'{_STYLE}<div class="slalom">{body}</div>'


def table(
    header: Iterable[str], rows: Iterable[Iterable[str]], footer: str, numbers: Iterable[str]
) -> str:
    """A table as HTML.

    **Arguments:**

    - `header`, `rows`: the cells.
    - `footer`: a line below them, or nothing.
    - `numbers`: the columns to align to the right.
    """
    header, numbers = list(header), set(numbers)

    def line(tag: str, cells: Iterable[str]) -> str:
        kinds = (' class="slalom-number"' if name in numbers else "" for name in header)
        pairs = zip(kinds, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{k}>{escape(c)}</{tag}>" for k, c in pairs) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    last = f'<tr><td colspan="{len(header)}">{escape(footer)}</td></tr>'
    foot = f"<tfoot>{last}</tfoot>" if footer else ""
    return f"<table><thead>{line('th', header)}</thead><tbody>{body}</tbody>{foot}</table>"


def transform_tree(
    transform: AbstractDeclared, state: PyTree = None, values: Mapping[str, Any] | None = None
) -> str:
    """A transform as HTML: an element that folds for each part, with all its fields.

    **Arguments:**

    - `transform`: the transform.
    - `state`: its state, to show the size of each part's own.
    - `values`: the next value of each hyperparameter by path, to show next to schedules.
    """
    root = Part.root(transform, state)
    return _node(root, root.path, values or {})


def folded(summary: str, body: str, *, is_open: bool) -> str:
    """An element with a summary, given as HTML, that shows and hides the rest."""
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{body}</details>"


def size_of(state: PyTree) -> tuple[int, int]:
    """The number of arrays in a state, and of their bytes."""
    arrays = [x for x in jax.tree.leaves(state) if hasattr(x, "dtype")]
    return len(arrays), sum(x.size * x.dtype.itemsize for x in arrays)


def _node(part: Part, path: tuple[str, ...], values: Mapping[str, Any]) -> str:
    module, children = part.module, part.children()
    inside = "".join(_node(child, path + child.path, values) for child in _named(children))
    name = ".".join(part.path)
    title = f"<b>{escape(name)}</b> " if name else ""
    kind = type(module).__name__ if children else _one_line(module)
    title += f'<span class="slalom-quiet">{escape(kind)}</span>'
    lines = [*_fields(module, children, path, values), *_own_state(part, children)]
    fields = f'<div class="slalom-fields">{escape(chr(10).join(lines))}</div>' if lines else ""
    return folded(title, fields + inside, is_open=bool(children))


def _one_line(module: object) -> str:
    line = " ".join(code(module, width=10**6).split())
    return line if len(line) <= 80 else f"{line[:79]}…"


def _named(children: Iterable[Part]) -> Iterator[Part]:
    """The parts. A chain inside a wrapper has no name, so its links take its place."""
    for child in children:
        if child.path:
            yield child
        else:
            yield from _named(child.children())


def _fields(
    module: AbstractDeclared,
    children: Iterable[Part],
    path: tuple[str, ...],
    values: Mapping[str, Any],
) -> list[str]:
    """The fields of a module that do not hold its parts, as code."""
    held = {id(child.get(module)) for child in children}
    numbers = {field.name for field in hyperparameter_fields(module)}
    lines = []
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        nodes = jax.tree.leaves(value, is_leaf=lambda x: id(x) in held)
        # The parts have elements of their own, whose titles are the names of the parts.
        if field.name == "names" or any(id(node) in held for node in nodes):
            continue
        line = f"{field.name} = {code(value)}"
        now = values.get(".".join((*path, field.name)))
        if field.name in numbers and now is not None and isinstance(value, AbstractSchedule):
            line += f"  (next step: {shortest(now)})"
        lines.append(line)
    return lines


def _own_state(part: Part, children: Iterable[Part]) -> list[str]:
    """The size of a part's own state, without the parts inside."""
    arrays, size = size_of(part.state)
    for child in children:
        inner = size_of(child.state)
        arrays, size = arrays - inner[0], size - inner[1]
    return [f"state: {arrays} arrays, {bytes_as_text(size)}"] if arrays > 0 else []
