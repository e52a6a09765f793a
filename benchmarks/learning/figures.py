"""What the runs say, as Markdown."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import equinox as eqx
import jax

from ..docs import _table
from .data import Run
from .tasks import Task

REFERENCE = "adamw"
"""The optimizer that the others are compared with."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The runs of an optimizer with its best learning rate, one for each seed."""

    optimizer: str
    rate: float
    at_edge: bool
    milliseconds: float
    curves: list[tuple[float, ...]]

    @property
    def last(self) -> list[float]:
        """The last score of each seed, infinite for NaN."""
        return [_finite(curve[-1]) for curve in self.curves]

    @property
    def final(self) -> float:
        """The median of the last scores."""
        return statistics.median(self.last)

    def share_to(self, target: float) -> float:
        """The share of the steps until a score is at most the target, as a median over seeds."""
        return statistics.median(
            next((i / len(curve) for i, x in enumerate(curve, 1) if x <= target), float("inf"))
            for curve in self.curves
        )


def best(name: str, runs: Iterable[Run]) -> Best:
    """The learning rate with the lowest median score at the end."""
    by_rate: dict[float, list[Run]] = {}
    for run in sorted((run for run in runs if run.optimizer == name), key=lambda run: run.seed):
        by_rate.setdefault(run.rate, []).append(run)
    rates = sorted(by_rate)
    found = [
        Best(
            name,
            rate,
            rate in (rates[0], rates[-1]),
            min(run.milliseconds for run in by_rate[rate]),
            [run.scores for run in by_rate[rate]],
        )
        for rate in rates
    ]
    return min(found, key=lambda each: each.final)


class Result:
    """The best runs of each optimizer on a task, from the lowest median score to the highest."""

    def __init__(self, key: str, task: Task, runs: Sequence[Run]):
        self.key, self.task = key, task
        shapes = eqx.filter_eval_shape(task.model, jax.random.key(0))
        self.parameters = sum(x.size for x in jax.tree.leaves(shapes) if hasattr(x, "size"))
        names = dict.fromkeys(run.optimizer for run in runs)
        self.order = sorted((best(name, runs) for name in names), key=lambda each: each.final)
        reference = [run for run in runs if run.optimizer == REFERENCE]
        self.rates = len({run.rate for run in reference})
        self.seeds = len({run.seed for run in reference})

    def of(self, name: str) -> Best | None:
        """The best runs of an optimizer, if it has any."""
        return next((each for each in self.order if each.optimizer == name), None)

    @property
    def reference(self) -> Best:
        found = self.of(REFERENCE)
        if found is None:
            raise ValueError(f"'{self.key}' has no runs of {REFERENCE}. Train it first.")
        return found

    def ratios(self, name: str) -> list[float]:
        """The last scores over those of the reference with the same seed."""
        found = self.of(name)
        pairs = zip(found.last, self.reference.last, strict=True) if found else ()
        return [mine / its for mine, its in pairs]


def _finite(x: float) -> float:
    return x if x == x else float("inf")


def interval(wins: int, number: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for the probability of a win."""
    z = 1.96
    share, scale = wins / number, 1 + z**2 / number
    middle = (share + z**2 / (2 * number)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    return max(0.0, middle - half), min(1.0, middle + half)


# --- Markdown -----------------------------------------------------------------------------------


def markdown(results: Sequence[Result], scores: str, curves: str) -> str:
    """The wins on all tasks, the pictures, and a table and a sentence for each task."""
    first = results[0]
    sections = [
        f"Each optimizer was given {first.rates} learning rates, a factor of √10 apart, and "
        "several seeds, which determine the start and the batches. Its learning rate is the one "
        "with the lowest median score at the end of the runs; (edge) means that it is the "
        "smallest or largest one that was tried. So the scores of all of them are a little too "
        "good, to the same extent.\n",
        "### Wins against AdamW\n",
        "A win is a lower final score than AdamW's with the same seed. The interval is "
        "Wilson's, at 95%, as if all runs were independent. Runs of one task resemble each other, "
        "so it is probably too narrow. The columns of the tasks have the median score divided by "
        "AdamW's, in bold if every seed is a win.\n",
        wins(results),
        f"![Scores of all optimizers]({scores})\n",
        f"![Scores over steps and over seconds]({curves})\n",
        "Milliseconds are the CPU time of a step on one thread, with the gradient: the smallest "
        f"of {len(first.reference.curves[0])} parts of the runs, since other work on the machine "
        "slows it down. Seconds are steps times this. They say more about large steps than about "
        "these small ones, in which the cost of calling each operation counts most.\n",
    ]
    for result in results:
        sections += [
            f"### {result.task.title}\n",
            f"{result.task.steps} steps, {result.parameters} parameters, {_seeds(result.seeds)}. "
            f"The score is the {result.task.score}. The last two columns say when it "
            "reaches AdamW's final score.\n",
            table(result),
            f"{verdict(result)}\n",
        ]
    return "\n".join(sections)


def wins(results: Sequence[Result]) -> str:
    """A row for each optimizer, and the number of its wins on all tasks."""
    rows: list[tuple[float, list[str]]] = []
    for name in dict.fromkeys(each.optimizer for result in results for each in result.order):
        ratios = [result.ratios(name) for result in results]
        cells = [_relative(found) for found in ratios]
        every = [x for found in ratios for x in found]
        won, (low, high) = (
            sum(x < 1 for x in every),
            interval(sum(x < 1 for x in every), len(every)),
        )
        shown = [f"{won} of {len(every)}", f"{low:.0%}–{high:.0%}"]
        if name == REFERENCE:
            rows.append((0.5, [f"**{name}**", "", "", *("1" for _ in results)]))
        else:
            rows.append((won / len(every), [name, *shown, *cells]))
    heads = ["", "wins", "interval", *(result.key for result in results)]
    return _table(heads, [cells for _, cells in sorted(rows, key=lambda row: -row[0])])


def _relative(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    middle = statistics.median(ratios)
    shown = f"{middle:.2f}" if middle < 100 else "diverged"
    return f"**{shown}**" if max(ratios) < 1 else shown


def table(result: Result) -> str:
    """A row for each optimizer."""
    heads = ["", "score", "range", "learning rate", "ms per step", "steps", "seconds"]
    return _table(heads, [_row(each, result) for each in result.order])


def _row(each: Best, result: Result) -> list[str]:
    share = each.share_to(result.reference.final)
    steps = share * result.task.steps
    reached = share <= 1
    return [
        f"**{each.optimizer}**" if each.optimizer == REFERENCE else each.optimizer,
        _number(each.final),
        f"{_number(min(each.last))}–{_number(max(each.last))}",
        f"{each.rate:.2g}{' (edge)' if each.at_edge else ''}",
        _number(each.milliseconds),
        f"{steps:.0f}" if reached else "–",
        _number(steps * each.milliseconds / 1e3) if reached else "–",
    ]


def verdict(result: Result) -> str:
    """What a table says about the reference."""
    order = [each.optimizer for each in result.order]
    place = order.index(REFERENCE) + 1
    # Where the ranges of the seeds overlap, the order may be chance.
    scores = result.reference.last
    better = [each.optimizer for each in result.order if max(each.last) < min(scores)]
    worse = sum(min(each.last) > max(scores) for each in result.order)
    return (
        f"By the median score, AdamW is number {place} of {len(order)}. "
        f"{_listed(better) if better else 'None'} {_is(len(better))} better with every seed than "
        f"AdamW with any, and {worse or 'none'} {_is(worse)} worse with every seed."
    )


def _seeds(number: int) -> str:
    return "one seed" if number == 1 else f"{number} seeds"


def _is(number: int) -> str:
    return "are" if number > 1 else "is"


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _number(x: float) -> str:
    return f"{x:.3g}" if x < float("inf") else "diverged"
