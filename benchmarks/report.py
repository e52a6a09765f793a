"""The results as tables and JSON, and comparisons with earlier results."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from . import torch_rival

SCHEMA = 1
Report = dict[str, Any]
Entry = dict[str, Any]


def processor() -> str:
    """The name of the processor or accelerator, if the system knows it."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """The machine and the versions that results depend on."""
    packages = ("slalom", "jax", "jaxlib", "equinox", "optax")
    return {
        "backend": jax.default_backend(),
        "devices": jax.device_count(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"torch": torch_rival.version()},
    }


def new(title: str) -> Report:
    """An empty report."""
    return {"schema": SCHEMA, "title": title, "machine": machine(), "steps": [], "host": []}


# --- tables ---------------------------------------------------------------------------------


def number(value: float) -> str:
    """Formats a number with three significant digits and no exponent."""
    return f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f}"


def times(ratio: dict[str, float]) -> str:
    """Formats a ratio with its quartiles."""
    return f"{number(ratio['median'])} ({number(ratio['low'])}–{number(ratio['high'])})"


def verdict(entry: Entry) -> str:
    """Whether the target is reached: ✓ by the median, ≈ by the upper quartile, ✗ by neither."""
    rival = entry["ratios"].get("optax") or entry["ratios"].get(next(iter(entry["ratios"])))
    if rival["median"] >= entry["target"]:
        return "✓"
    return "≈" if rival["high"] >= entry["target"] else "✗"


def step_tables(report: Report) -> Iterator[Table]:
    """Per tree of parameters: times, then what the programs cost."""
    for title in dict.fromkeys(entry["shape"] for entry in report["steps"]):
        entries = [entry for entry in report["steps"] if entry["shape"] == title]
        sizes = f"{entries[0]['leaves']} leaves, {entries[0]['parameters'] / 1e6:.3g} M float32"
        rivals = list(dict.fromkeys(who for entry in entries for who in entry["ratios"]))
        table = _table(f"{title}: {sizes}", "slalom ns/p", "of the limit", "step ms")
        for who in rivals:
            table.add_column(f"{who} /slalom", justify="right")
        table.add_column("target", justify="right")
        for entry in entries:
            own = entry["contenders"]["slalom"]
            table.add_row(
                entry["row"],
                f"{own['ns_per_parameter']:.2f}",
                f"{own['share_of_limit']:.0%}",
                number(1e3 * own["seconds"]["median"]),
                *(times(entry["ratios"][who]) if who in entry["ratios"] else "" for who in rivals),
                f"{entry['target']} {verdict(entry)}",
            )
        yield table
        yield _cost_table(title, entries)


def _cost_table(title: str, entries: list[Entry]) -> Table:
    columns = ("scratch", "peak MB", "trace s", "compile s", "fusions", "copies")
    table = _table(f"{title}: program costs, slalom | optax", *columns)
    for entry in entries:
        pair = [entry["contenders"][who] for who in ("slalom", "optax")]
        table.add_row(
            entry["row"],
            *(
                " | ".join(cells)
                for cells in (
                    [f"{scratch(entry, each):.1%}" for each in pair],
                    [f"{each['peak_bytes'] / 1e6:.0f}" for each in pair],
                    [number(each["trace_s"]) for each in pair],
                    [number(each["compile_s"]) for each in pair],
                    [str(each["fusions"]) for each in pair],
                    [str(each["copies"]) for each in pair],
                )
            ),
        )
    return table


def scratch(entry: Entry, contender: dict[str, Any]) -> float:
    """Scratch memory as a fraction of the parameters."""
    return contender["scratch_bytes"] / entry["parameter_bytes"]


def host_table(report: Report) -> Table:
    """Microseconds per call."""
    table = _table("Host time per call, µs", "dispatch", "total", "ratio", "target")
    for entry in report["host"]:
        own, *_ = entry["contenders"]
        for who, each in entry["contenders"].items():
            name = f"{entry['row']}, {entry['leaves']} leaves" if who == own else ""
            table.add_row(
                f"{name}  {who}".strip() if who == own else f"  {who}",
                f"{1e6 * each['returned']['median']:.0f}",
                f"{1e6 * each['done']['median']:.0f}",
                times(entry["ratios"][who]) if who != own else "",
                f"{entry['target']} {verdict(entry)}" if who == own and entry["target"] else "",
            )
    return table


def tables(report: Report) -> Iterator[Table]:
    """All tables of a report."""
    yield from step_tables(report)
    if report["host"]:
        yield host_table(report)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


# --- comparison -----------------------------------------------------------------------------


def figures(report: Report) -> dict[tuple[str, str], float]:
    """The figures that can be compared between runs, by row and name, without absolute times."""
    found = {}
    for entry in report["steps"]:
        where = f"{entry['shape']}: {entry['row']}"
        own = entry["contenders"]["slalom"]
        for who, ratio in entry["ratios"].items():
            found[where, f"{who} / slalom"] = ratio["median"]
        found[where, "scratch"] = scratch(entry, own)
        found[where, "fusions"] = own["fusions"]
        found[where, "copies"] = own["copies"]
        for cost in ("trace_s", "compile_s"):
            rival = entry["contenders"]["optax"][cost]
            found[where, f"{cost[:-2]}, optax / slalom"] = rival / own[cost]
    for entry in report["host"]:
        for who, ratio in entry["ratios"].items():
            found[f"host: {entry['row']}", f"{who} / slalom"] = ratio["median"]
    return found


def compare(old: Report, new: Report, threshold: float = 0.05) -> Table:
    """A table of relative changes above `threshold`, and of rows that are new or gone."""
    if old.get("schema") != SCHEMA:
        raise ValueError(
            f"The earlier report has schema {old.get('schema')}, this one has {SCHEMA}. Measure it "
            "again with this version of the benchmarks."
        )
    before, after = figures(old), figures(new)
    table = _table("Changes", "figure", "before", "now", "change")
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key), after.get(key)
        if was is None or now is None:
            cells = ["–" if x is None else number(x) for x in (was, now)]
            table.add_row(*key, *cells, "gone" if now is None else "new")
        elif abs(now - was) > threshold * max(abs(was), 1e-3):
            change = f"{now / was - 1:+.0%}" if was else "was 0"
            table.add_row(*key, number(was), number(now), change)
    return table
