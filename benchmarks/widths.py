"""Looks for the best learning rate of one network at several widths, with and without μP.

    pip install -e ".[bench]" && python -m benchmarks.widths --docs docs/guides/parameter-groups.md

The runs are stored in `benchmarks/widths.csv`, and only those that are missing there
are trained. With `--minutes`, no training begins after that time.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .one_thread import use_one_thread

if __name__ == "__main__":
    use_one_thread()

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import slalom as sl

from .docs import _table, replace_between
from .learning import data
from .learning.recipes import Recipe
from .learning.runs import Budget, Runs
from .learning.tasks import Task, digits
from .learning.tasks.task import cross_entropy

BEGIN = "<!-- widths: python -m benchmarks.widths --docs docs/guides/parameter-groups.md -->"
END = "<!-- end of widths -->"
WIDTHS = (32, 64, 128, 256, 512)
RULES: dict[str, Recipe] = {
    "adam": Recipe(2.0**-6),
    "muon": Recipe(2.0**-4, lambda rate: sl.muon(rate, adam_learning_rate=rate)),
    "soap": Recipe(2.0**-6),
    "shampoo": Recipe(2.0**-6),
}
BUDGET = Budget(rates=13, seeds=3, evaluations=1, factor=2**0.5)
QUICK = Budget(rates=3, seeds=2, evaluations=1, share=0.1, factor=2**0.5)


def network(width: int, key: Any) -> eqx.nn.MLP:
    """Three hidden layers. The last layer starts at zero, as μP asks."""
    model = eqx.nn.MLP(64, 10, width, depth=3, key=key)
    return eqx.tree_at(lambda m: m.layers[-1].weight, model, replace_fn=jnp.zeros_like)


@dataclasses.dataclass(frozen=True)
class Method:
    """A rule, with or without the factors from the smallest width to the one that is trained."""

    rule: str
    factors: bool

    @property
    def title(self) -> str:
        return f"sl.{self.rule}" + (" with transfer" if self.factors else "")

    @property
    def cell(self) -> str:
        plain = f"sl.{self.rule}"
        return f"`sl.contrib.transfer({plain}(...), ...)`" if self.factors else f"`{plain}`"


def methods(rules: Sequence[str]) -> list[Method]:
    return [Method(rule, factors) for rule in rules for factors in (False, True)]


def transform(method: Method, width: int, learning_rate: Any) -> sl.AbstractTransform:
    """The optimizer for a network of this width."""
    tx = RULES[method.rule].transform(method.rule, learning_rate)
    if not method.factors:
        return tx
    shapes = [eqx.filter_eval_shape(network, n, jax.random.key(0)) for n in (width, WIDTHS[0])]
    return sl.contrib.transfer(tx, *shapes)


def task(width: int) -> Task:
    """The digits, as vectors, for such a network."""
    images = digits()

    def flat(model: Any) -> Any:
        return lambda image: model(image.ravel())

    return dataclasses.replace(
        images,
        model=lambda key: network(width, key),
        loss=lambda model, batch: cross_entropy(jax.vmap(flat(model))(batch[0]), batch[1]),
        evaluate=lambda model: images.evaluate(flat(model)),
        steps=60,
        rate=1.0,
    )


def name_of(method: Method, width: int) -> str:
    return f"{method.title}, width {width}"


def train(
    path: Path, budget: Budget, rules: Sequence[str], widths: Sequence[int], minutes: float
) -> None:
    """Trains what is missing in the file."""
    end = time.monotonic() + 60 * minutes
    for width in widths:
        known = {run.optimizer for run in data.read(path)}
        missing = [method for method in methods(rules) if name_of(method, width) not in known]
        if not missing or time.monotonic() >= end:
            continue
        runs = Runs(task(width), budget)
        for method in missing:
            recipe = Recipe(RULES[method.rule].middle, functools.partial(transform, method, width))
            data.append(path, runs.train(name_of(method, width), recipe))
            print(f"width {width}: {method.title}", flush=True)


# --- the best rate ------------------------------------------------------------------------------


def losses(runs: list[data.Run], method: Method, width: int) -> dict[float, float]:
    """The mean last score over the seeds, for each learning rate."""
    mine = [run for run in runs if run.optimizer == name_of(method, width)]
    return {
        rate: float(np.mean([run.scores[-1] for run in mine if run.rate == rate]))
        for rate in sorted({run.rate for run in mine})
    }


def trained(runs: list[data.Run], rule: str, widths: Sequence[int]) -> list[int]:
    """The widths at which a rule has been trained with and without factors."""
    known = {run.optimizer for run in runs}
    return [n for n in widths if all(name_of(method, n) in known for method in methods([rule]))]


def optimum(by_rate: dict[float, float]) -> float:
    """The lowest point of a parabola in log rate, through the best rate and two on either side."""
    rates, values = np.array(list(by_rate)), np.array(list(by_rate.values()))
    values = np.where(np.isfinite(values), values, np.inf)
    best = int(np.argmin(values))
    near = [i for i in range(best - 2, best + 3) if 0 <= i < len(rates) and values[i] < np.inf]
    if best in (0, len(rates) - 1) or len(near) < 3:
        return float(rates[best])
    a, b, _ = np.polyfit(np.log2(rates[near]), values[near], 2)
    inside = np.clip(-b / (2 * a), *np.log2(rates[[near[0], near[-1]]])) if a > 0 else None
    return float(rates[best] if inside is None else 2.0**inside)


def moved(rates: list[float]) -> float:
    """The factor between the largest and the smallest of some rates."""
    return max(rates) / min(rates)


# --- coordinates --------------------------------------------------------------------------------


def coordinates(method: Method, width: int, steps: int = 3, seeds: int = 3) -> list[float]:
    """The size of the change of each layer's outputs after some steps, in the mean over seeds."""
    runs = task(width)
    x = runs.batch(jax.random.key(9))[0].reshape(-1, 64)

    @jax.jit
    def changes(seed: Any) -> Any:
        start = model = runs.model(jax.random.key(seed))
        opt = sl.Optimizer(transform(method, width, 2.0**-9), model)
        for i in range(steps):
            grads = eqx.filter_grad(runs.loss)(model, runs.batch(jax.random.key(i)))
            model, opt = opt.step(model, grads)
        pairs = zip(outputs(model, x), outputs(start, x), strict=True)
        return jnp.stack([sl.tree.rms(a - b) for a, b in pairs])

    # One after the other: programs that run at a time on a single thread can wait for each other.
    each = [np.asarray(changes(seed)) for seed in range(seeds)]
    return np.mean(each, axis=0).tolist()


def outputs(model: eqx.nn.MLP, h: Any) -> list[Any]:
    """What each layer makes of a batch, in front of its activation."""
    found = []
    for layer in model.layers:
        found.append(jax.vmap(layer)(h))
        h = jax.nn.relu(found[-1])
    return found


# --- picture and text ---------------------------------------------------------------------------


def draw(runs: list[data.Run], rules: Sequence[str], widths: Sequence[int], path: Path) -> None:
    """Plots a row for each rule: the coordinate check, and the losses over learning rates."""
    figure = Figure(figsize=(12, 2.6 * len(rules)), layout="constrained")
    panels = figure.subplots(len(rules), 4, squeeze=False)
    for i, method in enumerate(methods(rules)):
        row, column = divmod(i, 2)
        check, curves = panels[row, column], panels[row, 2 + column]
        own = trained(runs, method.rule, widths)
        sizes = np.array([coordinates(method, width) for width in own]).T
        for number, layer in enumerate(sizes, 1):
            check.plot(own, layer, "o-", markersize=3, label=f"layer {number}")
        check.set(title=method.title, xlabel="width", xscale="log", yscale="log")
        check.set_xticks(own, [str(width) for width in own])
        check.minorticks_off()
        for color, width in enumerate(own):
            by_rate = losses(runs, method, width)
            curves.plot(*zip(*by_rate.items(), strict=True), f"C{color}", label=f"width {width}")
            curves.axvline(optimum(by_rate), color=f"C{color}", linewidth=0.8, linestyle=":")
        curves.set(title=method.title, xlabel="learning rate", xscale="log", yscale="log")
    for row in panels:
        row[1].sharey(row[0])
        row[3].sharey(row[2])
        row[0].set_ylabel("change after 3 steps")
        row[2].set_ylabel("held-out loss")
    for axes in panels.ravel():
        axes.title.set_fontsize(9)
        axes.legend(frameon=False, fontsize=6)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def markdown(
    runs: list[data.Run], rules: Sequence[str], widths: Sequence[int], picture: str
) -> str:
    """The picture, the best rates, and how far they move."""
    heads = ["best learning rate", *(f"width {width}" for width in widths), "moves by"]
    heads.append("lowest loss of the widest")
    rows: list[list[str]] = []
    moves: list[float] = []
    for method in methods(rules):
        by_width = [losses(runs, method, n) for n in trained(runs, method.rule, widths)]
        best = [optimum(by_rate) for by_rate in by_width]
        cells = [f"{rate:.2g}" for rate in best] + [""] * (len(widths) - len(best))
        lowest = min(by_width[-1].values())
        moves.append(moved(best))
        rows.append([method.cell, *cells, f"{moves[-1]:.1f}", f"{lowest:.2g}"])
    number = len(losses(runs, methods(rules)[0], widths[0]))
    pairs = list(zip(moves[::2], moves[1::2], rules, strict=True))
    less = [f"`sl.{rule}`" for plain, factored, rule in pairs if factored < plain]
    more = [f"`sl.{rule}`" for plain, factored, rule in pairs if factored >= plain]
    seeds = len({run.seed for run in runs})
    return (
        "A network with three hidden layers learns the digits of scikit-learn, for "
        f"{task(WIDTHS[0]).steps} steps of 32 images, with {number} learning rates a factor of √2 "
        f"apart and {seeds} seeds. The base has width {WIDTHS[0]}. Left: how much the first steps "
        "change the outputs of each layer. Right: the mean held-out loss over learning rates. The "
        "dotted lines are the lowest points of parabolas through the best rate and two on either "
        "side.\n\n"
        f"![Changes of the layers, and losses over learning rates]({picture})\n\n"
        f"{_table(heads, rows)}\n"
        f"With the factors the best rate moves less for {', '.join(less) or 'no rule'}"
        f"{', and not less for ' + ', '.join(more) if more else ''}. They carry a rate over, but "
        "do not make it the best one at each width: see the last column.\n"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.widths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--quick", action="store_true", help="two widths and a few steps")
    parser.add_argument("--rules", default=",".join(RULES), help="only these, with commas")
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).with_suffix(".csv"), help="the runs"
    )
    parser.add_argument("--docs", type=Path, help="write table and picture for this page")
    parser.add_argument("--picture", type=Path, default=Path("docs/assets/widths.png"))
    args = parser.parse_args(argv)
    rules = args.rules.split(",")
    widths, budget = (WIDTHS[:2], QUICK) if args.quick else (WIDTHS, BUDGET)
    train(args.data, budget, rules, widths, args.minutes)
    if args.docs:
        runs = data.read(args.data)
        draw(runs, rules, widths, args.picture)
        picture = f"../assets/{args.picture.name}"
        replace_between(args.docs, BEGIN, END, lambda: markdown(runs, rules, widths, picture))


if __name__ == "__main__":
    main()
