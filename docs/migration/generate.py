"""Writes the tables of names in `docs/` from the data in this folder.

    python docs/migration/generate.py

Each file of `optax/` and `torch/` is a table. A row is a list of texts: the names, separated by
commas; what to write instead; and what differs. The second is code in backticks, `not yet`,
`use ...`, or empty if nothing takes its place. A fourth text is a call of the other library that
does the same. `tests/io/test_migration.py` checks that no name is missing or stale, that the code
runs, that the calls do the same, and that the pages are up to date.
"""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
START = "<!-- tables: python docs/migration/generate.py -->"
END = "<!-- end of tables -->"
HEADINGS = {"optax": "Optax", "torch": "PyTorch"}
PAGES = {
    "optax": HERE.parent / "every-name-of-optax.md",
    "torch": HERE.parent / "coming-from-pytorch.md",
}
LEVELS = {"optax": "##", "torch": "###"}
"""Headings of tables: those of Optax have a page of their own."""


class Row(NamedTuple):
    """Names of another library, and what takes their place."""

    names: tuple[str, ...]
    slalom: str
    differs: str
    call: str = ""


class Table(NamedTuple):
    """Rows with a title."""

    title: str
    text: str
    rows: tuple[Row, ...]


def tables(library):
    """The tables of a library, in the order of the names of their files."""
    return [_read(path) for path in sorted((HERE / library).glob("*.toml"))]


def _read(path):
    data = tomllib.loads(path.read_text())
    rows = [Row(tuple(names.split(", ")), *rest) for names, *rest in data["rows"]]
    return Table(data["title"], data.get("text", ""), tuple(rows))


def code(text):
    """The code in a text, which stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def page(library):
    """The whole page: its prose, and the tables between the marks."""
    text = PAGES[library].read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    written = "\n\n".join(_table(table, library) for table in tables(library))
    return f"{before}{START}\n\n{written}\n\n{END}{after}"


def _table(table, library):
    lines = [f"{LEVELS[library]} {table.title}", ""]
    if table.text:
        lines += [table.text, ""]
    headings = [HEADINGS[library], "Slalom", "what differs"]
    differs = any(row.differs for row in table.rows)
    lines += [_line(headings if differs else headings[:2])]
    lines += ["|" + " --- |" * (3 if differs else 2)]
    for names, slalom, text, call in table.rows:
        first = ", ".join(f"`{name}`" for name in names) + (f": `{call}`" if call else "")
        cells = [first, slalom or "–"]
        lines.append(_line([*cells, text] if differs else cells))
    return "\n".join(lines)


def _line(cells):
    # GitHub and mkdocs disagree about how to write a pipe in a code span of a table.
    assert not any("|" in cell for cell in cells), cells
    return "| " + " | ".join(cells) + " |"


def main():
    for library, path in PAGES.items():
        path.write_text(page(library))


if __name__ == "__main__":
    main()
