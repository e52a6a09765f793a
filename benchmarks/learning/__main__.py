"""Trains small tasks with all optimizers, and compares what they reach.

    pip install -e ".[bench]" && python -m benchmarks.learning --minutes 10
    python -m benchmarks.learning --minutes 0 --docs docs/small-tasks.md

Every optimizer gets the same tasks, steps, seeds, schedule and number of learning rates. All runs
are stored in `benchmarks/learning/data`, and only those that are missing there are trained. So the
work can be done in pieces, and an optimizer be added without running the others again.
"""

import argparse
import dataclasses
import time
from pathlib import Path

from ..one_thread import use_one_thread

if __name__ == "__main__":
    use_one_thread()

from rich.console import Console

from ..docs import END, replace_between
from . import data, figures, pictures
from .recipes import RECIPES
from .runs import FULL, QUICK, Runs
from .tasks import TASKS

BEGIN = "<!-- figures: python -m benchmarks.learning --docs docs/small-tasks.md -->"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no training after that time"
    )
    parser.add_argument("--quick", action="store_true", help="take only a few steps")
    parser.add_argument("--tasks", help="only these comma-separated tasks")
    parser.add_argument("--optimizers", help="only these, separated by semicolons")
    parser.add_argument("--data", type=Path, default=data.FOLDER, help="the folder of the runs")
    parser.add_argument("--docs", type=Path, help="write tables and pictures for this page")
    args = parser.parse_args(argv)
    if args.quick and args.data == data.FOLDER:
        parser.error("--quick needs a folder of its own: --data FOLDER")
    return args


def run(args: argparse.Namespace, console: Console) -> None:
    """Trains each task with each optimizer that `sl` has and that is not in the data yet."""
    end = time.monotonic() + 60 * args.minutes
    names = args.optimizers.split(";") if args.optimizers else list(RECIPES)
    budget = QUICK if args.quick else FULL
    for key in args.tasks.split(",") if args.tasks else TASKS:
        path, task = args.data / f"{key}.csv", TASKS[key]()
        known = {run.optimizer for run in data.read(path)}
        compared = [n for n in names if task.optimizers is None or n in task.optimizers]
        missing = [n for n in compared if n not in known and RECIPES[n].exists(n)]
        if not missing or time.monotonic() >= end:
            continue
        runs = Runs(task, dataclasses.replace(budget, seeds=min(budget.seeds, task.seeds)))
        for name in missing:
            if time.monotonic() >= end:
                break
            data.append(path, runs.train(name, RECIPES[name]))
            best = figures.best(name, data.read(path))
            console.print(
                f"{key}: {name}: {best.final:.4g} with learning rate {best.rate:.2g}"
                f"{' (edge)' if best.at_edge else ''}, {best.milliseconds:.3g} ms per step"
            )


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    run(args, Console())
    if args.docs:
        kept = [key for key in TASKS if (args.data / f"{key}.csv").exists()]
        results = [
            figures.Result(key, TASKS[key](), data.read(args.data / f"{key}.csv")) for key in kept
        ]
        stem = args.docs.stem
        scores, curves = (args.docs.with_name(f"{stem}{end}.png") for end in ("", "-curves"))
        pictures.draw_scores(results, scores)
        pictures.draw_curves(results, curves)
        text = figures.markdown(results, scores.name, curves.name)
        replace_between(args.docs, BEGIN, END, lambda: text)


if __name__ == "__main__":
    main()
