"""Benchmarks Slalom against Optax, PyTorch and the memory bandwidth, interleaved in one process.

    pip install -e ".[bench]" && python -m benchmarks

A ratio is the time of another library divided by Slalom's, so Slalom is faster if it is above 1.
Absolute times drift: compare ratios, measured on an otherwise idle machine.
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


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="an eighth of the parameters")
    size.add_argument("--tiny", action="store_true", help="only a few parameters")
    parser.add_argument("--rows", help="measure only rows whose name contains this")
    parser.add_argument("--shapes", help="measure only these comma-separated shapes")
    parser.add_argument("--repetitions", type=int, default=24, help="a multiple of 4")
    parser.add_argument("--no-torch", action="store_true", help="exclude PyTorch")
    parser.add_argument("--no-host", action="store_true", help="exclude host times")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--load", type=Path, help="load results instead of measuring")
    parser.add_argument("--png", type=Path, help="plot the ratios to this file")
    parser.add_argument("--docs", type=Path, help="write tables and plot for this page")
    parser.add_argument("--compare", type=Path, help="show changes relative to this file")
    args = parser.parse_args(argv)
    if args.repetitions < 4 or args.repetitions % 4:
        parser.error("--repetitions must be a multiple of 4, the length of an accumulation window")
    return args


def run(args: argparse.Namespace, console: Console) -> report.Report:
    """Measures the selected rows and prints each ratio as it is measured."""
    size, shapes = _shapes(args)
    results = report.new(size)
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
                console.print(f"{shape.title}: {entry['row']}: optax / slalom {ratio}")
            results["steps"] += [{"shape": shape.title, "key": key, **entry} for entry in entries]
            if not args.tiny:
                jax.clear_caches()  # so that rows do not share traces
    if not args.no_host and not args.rows:
        calls, leaves = (8, 4) if args.tiny else (200, 100)
        results["host"] = compare_host(calls, leaves)
    return results


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


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args, console = arguments(argv), Console()
    if not console.is_terminal:
        console = Console(width=160)
    results = json.loads(args.load.read_text()) if args.load else run(args, console)
    for table in report.tables(results):
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.png or args.docs:
        from . import chart

        chart.draw(results, args.png or args.docs.with_suffix(".png"))
    if args.docs:
        docs.write(results, args.docs, (args.png or args.docs.with_suffix(".png")).name)
    if args.compare:
        console.print(report.compare(json.loads(args.compare.read_text()), results))
    return results


if __name__ == "__main__":
    main()
