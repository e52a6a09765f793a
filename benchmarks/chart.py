"""A bar plot of the ratios."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLORS = {"optax": "#4c72b0", "torch fused": "#dd8452", "torch foreach": "#c9b08f"}


def draw(report: dict[str, Any], path: Path, shape: str | None = None) -> None:
    """Plots the time of each library relative to Slalom, by default for the first shape."""
    shape = shape or report["steps"][0]["shape"]
    entries = [entry for entry in report["steps"] if entry["shape"] == shape][::-1]
    figure = Figure(figsize=(8, 0.45 * len(entries) + 1.6), layout="constrained")
    axes = figure.subplots()
    labeled = set()
    for i, entry in enumerate(entries):
        height = 0.8 / len(entry["ratios"])
        for j, (who, ratio) in enumerate(entry["ratios"].items()):
            middle = ratio["median"]
            at = i + 0.4 - (j + 0.5) * height
            axes.barh(
                at,
                middle - 1,
                height,
                left=1,
                color=COLORS[who],
                label=None if who in labeled else who,
                xerr=[[middle - ratio["low"]], [ratio["high"] - middle]],
                error_kw={"elinewidth": 0.8},
            )
            axes.text(ratio["high"] * 1.02, at, f" {middle:.2g}", va="center", fontsize=7)
            labeled.add(who)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["½", "1", "2", "4", "8", "16"])
    axes.set_yticks(range(len(entries)), [entry["row"] for entry in entries])
    axes.set_xlabel("time relative to Slalom (above 1: Slalom is faster)")
    axes.set_title(f"{shape}, {report['machine']['processor']}, float32")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)
