"""The results as Markdown and as a picture."""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

REFERENCE = "adamw"
"""The optimizer that the others are compared with."""

Entry = dict[str, Any]


def markdown(results: dict[str, Any], picture: str, *, seconds: bool = False) -> str:
    """What was measured, the picture, and a table and a sentence for each task."""
    budget, machine = results["budget"], results["machine"]
    sections = [
        f"Each optimizer was given {budget['rates']} learning rates, neighboring ones a factor of "
        f"√10 apart, and {budget['seeds']} seeds. The table has the learning rate with the lowest "
        "training loss at the end of the run; (edge) means that it is the smallest or largest one "
        "that was tried. Scores and steps are medians over the seeds, and the range is that of the "
        f"seeds. The runs were evaluated {budget['evaluations']} times, and reach the target when "
        "the score is at most that.\n",
        f"![Scores of all optimizers]({picture})\n",
    ]
    if seconds:
        sections.append(
            "Seconds are the steps times the mean time of a step, with the gradient and without "
            f"compilation, of all runs of the optimizer, on {machine['cores']} cores of "
            f"{machine['processor']}.\n"
        )
    for task in results["tasks"].values():
        entries = ranked(task["entries"])
        sections.append(f"### {task['title']}\n")
        sections.append(
            f"{task['steps']} steps; the score is the {task['score']}, and the target "
            f"{task['target']:g}.\n"
        )
        sections.append(table(entries, seconds=seconds))
        sections.append(verdict(entries) + "\n")
    return "\n".join(sections)


def ranked(entries: Iterable[Entry]) -> list[Entry]:
    """From the lowest median score to the highest; runs that diverged come last."""
    return sorted(entries, key=final)


def final(entry: Entry) -> float:
    """The median of the last scores, infinite for NaN."""
    return statistics.median(_finite(entry["final"]))


def to_target(entry: Entry) -> float:
    """The median number of steps to the target; infinite if most seeds never reach it."""
    return statistics.median(float("inf") if n is None else n for n in entry["to_target"])


def table(entries: list[Entry], *, seconds: bool = False) -> str:
    """A row for each optimizer."""
    heads = ["", "score", "range", "learning rate", "steps to target"]
    heads += ["seconds to target"] if seconds else []
    rows = [_row(entry)[: len(heads)] for entry in entries]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(entry: Entry) -> list[str]:
    scores, steps = _finite(entry["final"]), to_target(entry)
    reached = steps < float("inf")
    return [
        f"**{entry['optimizer']}**" if entry["optimizer"] == REFERENCE else entry["optimizer"],
        _number(final(entry)),
        f"{_number(min(scores))}–{_number(max(scores))}",
        f"{entry['rate']:.2g}{' (edge)' if entry['at_edge'] else ''}",
        f"{steps:.0f}" if reached else "–",
        f"{steps * entry['seconds_per_step']:.2f}" if reached else "–",
    ]


def verdict(entries: list[Entry]) -> str:
    """What a table, in order, says about the reference."""
    order = [entry["optimizer"] for entry in entries]
    place, reference = order.index(REFERENCE) + 1, entries[order.index(REFERENCE)]
    # Where the ranges of the seeds overlap, the order may be chance.
    scores = _finite(reference["final"])
    better = [e["optimizer"] for e in entries if max(_finite(e["final"])) < min(scores)]
    worse = sum(min(_finite(e["final"])) > max(scores) for e in entries)
    sooner = sum(to_target(e) < to_target(reference) for e in entries)
    return (
        f"By the median score, AdamW is number {place} of {len(order)}. "
        f"{_listed(better) if better else 'None'} {_is(len(better))} better with every seed than "
        f"AdamW with any, and {worse or 'none'} {_is(worse)} worse with every seed. "
        f"{sooner or 'None'} {'reach' if sooner > 1 else 'reaches'} the target in fewer steps."
    )


def _is(number: int) -> str:
    return "are" if number > 1 else "is"


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _finite(scores: Iterable[float]) -> list[float]:
    return [x if x == x else float("inf") for x in scores]


def _number(x: float) -> str:
    return f"{x:.3g}" if x < float("inf") else "diverged"


# --- picture ------------------------------------------------------------------------------------


def draw(results: dict[str, Any], path: Path) -> None:
    """Plots the score of each seed, with a panel for each task."""
    tasks = list(results["tasks"].values())
    number = max(len(task["entries"]) for task in tasks)
    figure = Figure(figsize=(3.6 * len(tasks), 0.22 * number + 1.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        entries = ranked(task["entries"])[::-1]
        names = [entry["optimizer"] for entry in entries]
        worst = max(_shown(entries))
        for i, entry in enumerate(entries):
            is_reference = entry["optimizer"] == REFERENCE
            scores = [min(x, worst) for x in _finite(entry["final"])]
            color = "tab:orange" if is_reference else "tab:blue"
            axes.plot(scores, [i] * len(scores), "o", color=color, markersize=3.5, alpha=0.7)
            if is_reference:
                axes.axvline(min(final(entry), worst), color=color, linewidth=0.8)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.tick_params(axis="x", which="both", labelsize=7)
        axes.set_title(task["title"].partition(":")[0], fontsize=9)
        axes.set_xlabel(task["score"], fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _shown(entries: list[Entry]) -> Iterator[float]:
    """Scores that set the scale: those that have not diverged."""
    for entry in entries:
        yield from (x for x in entry["final"] if x < 1e3)
    yield 1e-3
