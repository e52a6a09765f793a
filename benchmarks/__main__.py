"""Slalom beside Optax, PyTorch and the hardware, in one process, interleaved.

    pip install -e ".[bench]" && python -m benchmarks

Ratios are the rival's time over Slalom's: above 1, Slalom is ahead. Absolute times drift with the
machine; compare ratios, and only those taken on a quiet machine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from . import docs, measure, report, torch_rival
from .host import compare_host
from .rows import ROWS
from .shapes import FULL, QUICK, TINY, Shape


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="an eighth of the parameters")
    size.add_argument("--tiny", action="store_true", help="only to see that everything runs")
    parser.add_argument("--rows", help="measure only the rows with this in their name")
    parser.add_argument("--shapes", help="measure only these trees, separated by commas")
    parser.add_argument("--repetitions", type=int, default=24, help="a multiple of 4")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--no-host", action="store_true", help="leave the host's time out")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--load", type=Path, help="show these figures instead of measuring")
    parser.add_argument("--png", type=Path, help="draw the ratios here")
    parser.add_argument("--docs", type=Path, help="write tables into this page, the chart beside")
    parser.add_argument("--compare", type=Path, help="show what changed since these figures")
    args = parser.parse_args(given)
    if args.repetitions < 4 or args.repetitions % 4:
        parser.error("--repetitions must be a multiple of 4: a window of accumulation")
    return args


def run(args: argparse.Namespace, console: Console) -> report.Report:
    """Measures what was asked for, showing each row as it comes."""
    size, shapes = _shapes(args)
    made = report.new(size)
    for key, shape in shapes.items():
        params = shape.make()
        for name in shape.rows or ROWS:
            if name not in ROWS or (args.rows and args.rows not in name):
                continue
            with console.status(f"{shape.title}: {name}"):
                entries = measure.compare_steps(
                    name,
                    shape.fit(name, ROWS[name]),
                    params,
                    args.repetitions,
                    with_torch=torch_rival.FOUND and not args.no_torch,
                )
            for entry in entries:
                ratio = report.times(entry["ratios"]["optax"])
                console.print(f"{shape.title}: {entry['row']}: optax takes {ratio} as long")
            made["steps"] += [{"shape": shape.title, "key": key, **entry} for entry in entries]
            if not args.tiny:
                jax.clear_caches()  # so that the next row is traced as if it were the only one
    if not args.no_host and not args.rows:
        calls, leaves = (8, 4) if args.tiny else (200, 100)
        made["host"] = compare_host(calls, leaves)
    return made


def _shapes(args: argparse.Namespace) -> tuple[str, dict[str, Shape]]:
    size, shapes = "full", FULL
    if args.quick:
        size, shapes = "quick", QUICK
    elif args.tiny:
        size, shapes = "tiny", TINY
    if args.shapes:
        every = TINY | QUICK | FULL
        shapes = {key: every[key] for key in args.shapes.split(",")}
    return size, shapes


def main(given: list[str] | None = None) -> dict[str, Any]:
    args, console = arguments(given), Console()
    if not console.is_terminal:
        console = Console(width=160)
    made = json.loads(args.load.read_text()) if args.load else run(args, console)
    for table in report.tables(made):
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(made, indent=1) + "\n")
    if args.png or args.docs:
        from . import chart

        chart.draw(made, args.png or args.docs.with_suffix(".png"))
    if args.docs:
        docs.write(made, args.docs, (args.png or args.docs.with_suffix(".png")).name)
    if args.compare:
        console.print(report.compare(json.loads(args.compare.read_text()), made))
    return made


if __name__ == "__main__":
    main()
