"""Trains small tasks with all optimizers, and compares what they reach.

    pip install -e ".[bench]" && python -m benchmarks.learning --docs docs/choosing.md

Every optimizer gets the same tasks, steps, seeds, schedule and number of learning rates.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from ..docs import END, replace_between
from ..report import machine
from . import figures
from .recipes import RECIPES
from .runs import FULL, QUICK, Budget, Runs
from .tasks import TASKS

BEGIN = "<!-- figures: python -m benchmarks.learning --docs docs/choosing.md -->"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="take only a few steps")
    parser.add_argument("--tasks", help="only these comma-separated tasks")
    parser.add_argument("--optimizers", help="only these, separated by semicolons")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--load", type=Path, help="load these results, and train what is missing")
    parser.add_argument("--png", type=Path, help="plot the scores to this file")
    parser.add_argument("--docs", type=Path, help="write tables and plot for this page")
    parser.add_argument(
        "--seconds", action="store_true", help="add seconds, which a busy machine falsifies"
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Trains each task with each optimizer that `sl` has and that is not in the results yet."""
    budget = QUICK if args.quick else FULL
    results = {"machine": machine(), "budget": vars(budget), "tasks": {}}
    if args.load:
        results = json.loads(args.load.read_text())
        budget = Budget(**results["budget"])
    names = args.optimizers.split(";") if args.optimizers else list(RECIPES)
    for key in args.tasks.split(",") if args.tasks else TASKS:
        entries = results["tasks"].setdefault(key, {}).setdefault("entries", [])
        known = [entry["optimizer"] for entry in entries]
        missing = [n for n in names if n not in known and RECIPES[n].exists(n)]
        if not missing:
            continue
        runs = Runs(TASKS[key](), budget)
        for name in missing:
            entry = runs.train(name, RECIPES[name])
            entries.append(entry)
            console.print(
                f"{key}: {name}: {figures.final(entry):.4g} with learning rate "
                f"{entry['rate']:.2g}, {1e3 * entry['seconds_per_step']:.2f} ms per step"
            )
            if args.json:  # in between, because all of it takes minutes
                args.json.write_text(json.dumps(results, indent=1) + "\n")
        task = runs.task
        about = {"title": task.title, "score": task.score, "target": task.target}
        results["tasks"][key] |= {**about, "steps": runs.steps}
    return results


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args, console = arguments(argv), Console()
    results = run(args, console)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    picture = args.png or (args.docs and args.docs.with_suffix(".png"))
    if picture:
        figures.draw(results, picture)
    if args.docs:
        text = figures.markdown(results, picture.name, seconds=args.seconds)
        replace_between(args.docs, BEGIN, END, lambda: text)
    return results


if __name__ == "__main__":
    main()
