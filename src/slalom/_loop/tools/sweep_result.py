"""The result of a sweep, and its picture."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Real

from ..._core.text import notebook
from ..._core.text.figures import make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_COLORS = 6
"""The number of colors that a legend explains."""

MOST_LABELS = 64
"""The number of cells of a heat map up to which each shows its number."""

MOST_ROWS = 20
"""The number of runs that a notebook lists."""


@dataclasses.dataclass(frozen=True, eq=False)
class SweepResult:
    """The losses of a sweep, as `sl.sweep` returns them.

    **Arguments:**

    - `grid`: the values of each hyperparameter, by the name that was passed.
    - `losses`: the loss of each run in each step, before its update. The axes follow `grid`, in
        order, and the steps.
    """

    grid: dict[str, Real[np.ndarray, " values"]]
    losses: Float[np.ndarray, "*grid steps"]

    @property
    def final(self) -> Float[np.ndarray, "*grid"]:
        """The mean of the last losses of each run, over a tenth of all steps."""
        last = max(1, self.losses.shape[-1] // 10)
        return self.losses[..., -last:].mean(axis=-1)

    @property
    def best_index(self) -> tuple[int, ...]:
        """The position in the grid of the run with the lowest final loss.

        A run whose final loss is not finite never wins. If there is no other, this raises a
        `ValueError`.
        """
        final = self.final
        if not np.isfinite(final).any():
            raise ValueError(
                "No run of this sweep has a finite final loss. Sweep smaller learning rates, or "
                "clip the gradients with `sl.ClipByGlobalNorm(1.0)`."
            )
        lowest = np.argmin(np.where(np.isfinite(final), final, np.inf))
        return tuple(int(i) for i in np.unravel_index(lowest, final.shape))

    @property
    def best(self) -> dict[str, Any]:
        """The hyperparameters of the run with the lowest final loss, as Python numbers.

        `opt.with_hyperparams(result.best)` sets them.
        """
        pairs = zip(self.grid.items(), self.best_index, strict=True)
        return {name: values[i].item() for (name, values), i in pairs}

    def plot(self) -> "Figure":
        """Plots the loss of each run, and the final losses over the grid, with matplotlib.

        The colors of the losses show the first hyperparameter. The final losses are a line for one
        hyperparameter, and a heat map of the first two otherwise, of the best values of the others.

        **Returns:** a `matplotlib.figure.Figure`. `.savefig(path)` saves it, and a notebook shows
        it.

        **Raises:** `ImportError` without matplotlib.
        """
        figure, (left, right) = make_figure("SweepResult.plot", columns=2, size=(10.5, 4.0))
        _draw_losses(left, self)
        if len(self.grid) == 1:
            _draw_line(right, self)
        else:
            _draw_heat_map(figure, right, self)
        return figure

    def __repr__(self) -> str:
        *runs, steps = self.losses.shape
        axes = ", ".join(f"{name}: {n}" for name, n in zip(self.grid, runs, strict=True))
        text = f"sweep of {np.prod(runs)} runs ({axes}) with {steps} steps"
        if not np.isfinite(self.final).any():
            return f"{text}, none with a finite loss"
        best = ", ".join(f"{name}={value:.4g}" for name, value in self.best.items())
        return f"{text}, best: {best} with loss {self.final[self.best_index]:.4g}"

    def _repr_html_(self) -> str:
        final = self.final
        best_first = np.argsort(np.where(np.isfinite(final), final, np.inf), axis=None)
        rows = []
        for run in best_first[:MOST_ROWS]:
            index = np.unravel_index(run, final.shape)
            pairs = zip(self.grid.values(), index, strict=True)
            rows.append([*(f"{values[i]:.4g}" for values, i in pairs), f"{final[index]:.4g}"])
        header = [*self.grid, "final loss"]
        return notebook.document(notebook.table(header, rows, repr(self), header))


# --- the picture ------------------------------------------------------------------------------


def _draw_losses(axes: "Axes", result: SweepResult) -> None:
    from matplotlib import colormaps

    first, values = next(iter(result.grid.items()))
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, len(values)))
    *_, steps = result.losses.shape
    window = max(1, steps // 20)
    smooth = np.lib.stride_tricks.sliding_window_view(result.losses, window, axis=-1).mean(axis=-1)
    middles = np.arange(steps - window + 1) + (window - 1) / 2
    every = math.ceil(len(values) / MOST_COLORS)
    for i, (runs, value, color) in enumerate(zip(smooth, values, colors, strict=True)):
        for j, run in enumerate(runs.reshape(-1, len(middles))):
            label = f"{value:.3g}" if j == 0 and i % every == 0 else None
            axes.plot(middles, run, color=color, linewidth=1, label=label)
    finite = smooth[np.isfinite(smooth)]
    if finite.size:
        # The losses of diverging runs would flatten all others.
        start = smooth[..., 0][np.isfinite(smooth[..., 0])]
        low, high = finite.min(), finite.max()
        high = min(high, np.median(start)) if start.size else high
        if _spreads(np.array([low, high])):
            axes.set_yscale("log")
            axes.set_ylim(low / 1.2, high * 1.2)
        elif high > low:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    averaged = f", mean of {window} steps" if window > 1 else ""
    axes.set(xlabel="step", ylabel=f"loss{averaged}")
    axes.legend(title=first, fontsize="small", loc="lower left")


def _draw_line(axes: "Axes", result: SweepResult) -> None:
    ((name, values),) = result.grid.items()
    finite = np.isfinite(result.final)
    axes.plot(values[finite], result.final[finite], "o-", color="tab:blue")
    if not finite.all():
        # At the top of the picture, whatever the losses are.
        top = axes.get_xaxis_transform()
        axes.plot(
            values[~finite], np.ones((~finite).sum()), "x", color="tab:red", transform=top,
            clip_on=False, label="not finite",
        )  # fmt: skip
    if finite.any():
        best = result.best_index
        label = f"best: {values[best]:.3g}"
        axes.plot(values[best], result.final[best], "*", color="tab:orange", ms=14, label=label)
        axes.legend(frameon=False)
    if _spreads(values):
        axes.set_xscale("log")
    if finite.any() and _spreads(result.final[finite]):
        axes.set_yscale("log")
    axes.set(xlabel=name, ylabel="final loss")


def _draw_heat_map(figure: "Figure", axes: "Axes", result: SweepResult) -> None:
    from matplotlib.colors import LogNorm

    (first, rows), (second, columns), *others = result.grid.items()
    final = np.where(np.isfinite(result.final), result.final, np.nan)
    others_axes = tuple(range(2, final.ndim))
    best_of_others = np.nanmin(np.where(np.isnan(final), np.inf, final), axis=others_axes)
    shown = np.ma.masked_invalid(best_of_others)
    norm = LogNorm() if shown.count() and _spreads(shown.compressed()) else None
    image = axes.imshow(shown.T, origin="lower", aspect="auto", cmap="viridis_r", norm=norm)
    axes.set_facecolor("lightgray")
    axes.grid(False)
    axes.set_xticks(range(len(rows)), [f"{v:.3g}" for v in rows], rotation=45)
    axes.set_yticks(range(len(columns)), [f"{v:.3g}" for v in columns])
    figure.colorbar(image, ax=axes, label="final loss")
    if shown.size <= MOST_LABELS:
        for (i, j), value in np.ndenumerate(best_of_others):
            text = f"{value:.2g}" if np.isfinite(value) else "×"
            shade = float(np.asarray(image.norm(value))) if np.isfinite(value) else 0.0
            color = "white" if shade > 0.5 else "black"
            size = "small" if len(rows) <= 8 else "x-small"
            axes.text(i, j, text, ha="center", va="center", fontsize=size, color=color)
    if shown.count():
        i, j = result.best_index[:2]
        axes.plot(i, j, "s", ms=26, mfc="none", mec="tab:orange", mew=2)
    rest = f" (best of {', '.join(name for name, _ in others)})" if others else ""
    axes.set(xlabel=first, ylabel=second, title=f"final loss{rest}")


def _spreads(values: np.ndarray) -> bool:
    """Whether positive numbers differ so much that a logarithmic axis shows them better."""
    return bool(np.min(values) > 0 and np.max(values) >= 10 * np.min(values))
