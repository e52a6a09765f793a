"""Writes the tables of the docs page between two markers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .report import Entry, number, scratch

BEGIN = "<!-- figures: python -m benchmarks --docs -->"
END = "<!-- end of figures -->"


def write(report: dict[str, Any], page: Path, picture: str) -> None:
    """Writes the figures into a page."""
    replace_between(page, BEGIN, END, lambda: markdown(report, picture))


def replace_between(page: Path, begin: str, end: str, figures: Callable[[], str]) -> None:
    """Replaces the text between two markers of a page."""
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} must have one line '{begin}' and, below it, one '{end}'.")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{begin}\n\n{figures()}\n{end}{tail}")


NAMES = {
    "optax": "Optax",
    "torch fused": "PyTorch fused",
    "torch foreach": "PyTorch foreach",
}
"""The rivals, as the tables call them."""


def markdown(report: dict[str, Any], picture: str) -> str:
    """The results as Markdown: a sentence, a plot and tables."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    sections = [
        f"Measured on {machine['cores']} cores of {machine['processor']} (backend "
        f"{machine['backend']}) with {versions}.\n",
        f"![Time relative to Slalom]({picture})\n",
    ]
    for shape in dict.fromkeys(entry["shape"] for entry in report["steps"]):
        entries = [entry for entry in report["steps"] if entry["shape"] == shape]
        sections += [_steps(shape, entries), _costs(entries)]
    if report["host"]:
        sections.append(_host(report["host"]))
    return "\n".join(sections)


def _steps(shape: str, entries: list[Entry]) -> str:
    rivals = list(dict.fromkeys(who for entry in entries for who in entry["ratios"]))
    size = f"{entries[0]['leaves']} leaves, {entries[0]['parameters'] / 1e6:.3g} M parameters"
    rows = [
        [
            entry["row"],
            f"{entry['contenders']['slalom']['ns_per_parameter']:.2f}",
            f"{entry['contenders']['slalom']['share_of_limit']:.0%}",
            *(_ratio(entry, who) for who in rivals),
        ]
        for entry in entries
    ]
    heads = [
        "",
        "ns per parameter",
        "of the limit",
        *(f"{NAMES.get(who, who)} ÷ Slalom" for who in rivals),
    ]
    return f"### {shape}: {size}\n\n" + _table(heads, rows)


def _ratio(entry: Entry, who: str) -> str:
    ratio = entry["ratios"].get(who)
    if ratio is None:
        return ""
    return f"**{number(ratio['median'])}×** ({number(ratio['low'])}–{number(ratio['high'])})"


def _costs(entries: list[Entry]) -> str:
    def pair(entry: Entry, show: Any) -> list[str]:
        return [show(entry["contenders"][who]) for who in ("slalom", "optax")]

    rows = [
        [
            entry["row"],
            *pair(entry, lambda c, entry=entry: f"{scratch(entry, c):.1%}"),
            *pair(entry, lambda c: number(c["trace_s"])),
            *pair(entry, lambda c: number(c["compile_s"])),
            *pair(entry, lambda c: f"{c['fusions']}, {c['copies']}"),
        ]
        for entry in entries
        if "idle" not in entry["row"]
    ]
    heads = [""]
    for head in ("scratch", "trace s", "compile s", "kernels, copies"):
        heads += [head, "Optax"]
    return _table(heads, rows)


def _host(entries: list[Entry]) -> str:
    rows = []
    for entry in entries:
        for who, each in entry["contenders"].items():
            row = f"{entry['row']}, {entry['leaves']} leaves: {who}"
            spent = [f"{1e6 * each[when]['median']:.0f}" for when in ("returned", "done")]
            rows.append([row, *spent, _ratio(entry, who)])
    heads = ["", "dispatch µs", "total µs", "÷ Slalom"]
    return "### Host time of a call\n\n" + _table(heads, rows)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
