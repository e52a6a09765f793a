"""Figures of schedules, of recorded metrics, and of sweeps."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Real

from ..._core.fields.schedule import AbstractSchedule, AbstractStatefulSchedule
from ..._core.protocol.context import Context
from ..._core.protocol.parts import parts
from ..._core.text.figures import make_figure
from ...tree.paths import glob_pattern, named, not_one

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_schedules(opt: Any, steps: int) -> "Figure":
    """Draws each schedule of an optimizer over its first steps."""
    if jnp.ndim(opt.count):
        raise ValueError(
            f"This optimizer was created under `vmap` and holds {opt.count.shape[0]} runs. Plot "
            "one of them: `jax.tree.map(lambda leaf: leaf[0], opt).plot_schedules(steps)`."
        )
    held = list(_schedules(opt))
    if not held:
        raise ValueError(
            "There is nothing to plot: this optimizer has no schedules. Pass one in place of a "
            "number, such as `sl.adam(sl.schedules.cosine_decay(1e-3, decay_steps=1000))`."
        )
    size = (6.4, 1.0 + 2.2 * len(held))
    figure, grid = make_figure("opt.plot_schedules", len(held), size=size, share_x=True)
    for axes, (path, schedule, step) in zip(grid, held, strict=True):
        axes.plot(np.arange(steps), np.asarray(schedule.values(steps)))
        axes.set_title(path, loc="left", fontsize="medium")
        if 0 < (now := int(step)) < steps:
            axes.axvline(now, color="gray", linestyle="--", linewidth=1, label="next step")
    grid[-1].set_xlabel("step")
    return figure


def _schedules(opt: Any) -> Iterator[tuple[str, AbstractSchedule, Any]]:
    """The path of each schedule, the schedule, and the step on its clock. One with state is
    refused."""
    transform, context = opt.transform, Context(step=opt.count)
    clocks = {part.name: part.context.step for part in parts(transform, opt.state, context)}
    for part in parts(transform):
        for field in dataclasses.fields(part.module):
            value = getattr(part.module, field.name)
            many = value if isinstance(value, tuple) else (value,)
            path = ".".join((*part.path, field.name))
            for i, one in enumerate(many):
                if isinstance(one, AbstractStatefulSchedule):
                    raise ValueError(
                        f"'{path}' is driven by {one!r}, whose values depend on the losses of the "
                        "run. Record them with `tx.record()`, and plot `opt.metrics` with "
                        "`sl.plot_metrics(history)`. `schedule.plot(steps)` plots a schedule "
                        "without state."
                    )
                if isinstance(one, AbstractSchedule):
                    name = f"{path}.{i}" if many is value else path
                    yield name, one, clocks.get(part.name, jnp.zeros((), jnp.int32))


STEP = "step"
"""The entry of a history that holds the positions on the horizontal axis."""


def plot_metrics(
    history: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> "Figure":
    """Plots metrics over the steps of a run with matplotlib, each in axes of its own.

    An axis is logarithmic if all values are positive and the largest is more than 100 times the
    smallest. Values that are not finite are left out.

    ```python
    >>> model = {"w": jnp.ones(3)}
    >>> opt, history = sl.Optimizer(sl.adam(1e-2).record(), model), []
    >>> for _ in range(5):
    ...     model, opt = opt.step(model, model)
    ...     history.append({**opt.metrics, "sum": model["w"].sum()})
    >>> figure = sl.plot_metrics(history, ["grad_norm", "sum"])
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['record.grad_norm', 'sum']

    ```

    **Arguments:**

    - `history`: a list with a dict of numbers for each step, such as `opt.metrics` or
        `opt.metrics.to_dict()`, or a dict of arrays whose first axis is the steps, as a
        `jax.lax.scan` that returns `opt.metrics` stacks them. Steps may leave out names. Numbers of
        several runs, as under `vmap`, are drawn as a line each. An entry `"step"` is used as the
        horizontal axis.
    - `names`: the numbers to plot: paths, unambiguous suffixes of them, or globs. Defaults to
        everything that changes.

    **Returns:** a `matplotlib.figure.Figure`. `.savefig(path)` saves it, and a notebook shows it.

    **Raises:** `ImportError` without matplotlib; `KeyError` for a name that is not in the history;
    `ValueError` for an empty history, or one that holds anything but numbers.
    """
    series = _series(history)
    chosen = _chosen({name: v for name, (_, v) in series.items() if name != STEP}, names)
    columns = 1 if len(chosen) < 4 else 2
    rows = -(-len(chosen) // columns)
    size = (1.0 + 5.4 * columns, 0.6 + 2.0 * rows)
    figure, grid = make_figure("sl.plot_metrics", rows, columns, size=size, share_x=True)
    for axes, name in zip(grid, chosen, strict=False):
        steps, values = series[name]
        if STEP in series:
            step_at = dict(zip(*series[STEP], strict=True))
            there = [i for i, step in enumerate(steps) if step in step_at]
            steps, values = np.array([step_at[steps[i]] for i in there]), values[there]
        _draw(axes, steps, values)
        axes.set_title(name, loc="left", fontsize="medium")
    for i, axes in enumerate(grid):
        if i >= len(chosen):
            axes.remove()
        elif i + columns >= len(chosen):
            axes.set_xlabel("step")
            axes.xaxis.set_tick_params(labelbottom=True)
    return figure


def _draw(axes: "Axes", steps: Any, values: Real[np.ndarray, "steps ..."]) -> None:
    lines = values.reshape(len(values), -1)
    finite = lines[np.isfinite(lines)]
    marker = "." if len(steps) < 30 else None
    axes.plot(steps, np.where(np.isfinite(lines), lines, np.nan), marker=marker, linewidth=1.2)
    if finite.size and finite.min() > 0 and finite.max() > 100 * finite.min():
        axes.set_yscale("log")


def _series(history: Any) -> dict[str, tuple[Any, Real[np.ndarray, "steps ..."]]]:
    """The positions and the values of each name."""
    is_stacked = isinstance(history, Mapping)
    entries = [history] if is_stacked else list(history)
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise TypeError(
                "A history is a list of dicts of numbers, or a dict of arrays, got "
                f"{entry!r} of type {type(entry).__name__} in it."
            )
    # In one transfer. JAX would sort dicts.
    rows = jax.device_get([list(entry.values()) for entry in entries])
    series: dict[str, tuple[list[int], list[Any]]] = {}
    for i, (entry, row) in enumerate(zip(entries, rows, strict=True)):
        for name, value in zip(entry, row, strict=True):
            steps, values = series.setdefault(name, ([], []))
            steps.extend(range(len(value)) if is_stacked else [i])
            values.extend(value if is_stacked else [value])
    if not any(name != STEP and values for name, (_, values) in series.items()):
        raise ValueError(
            "There is nothing to plot: the history is empty. Collect `opt.metrics` in every step; "
            "`tx.record()` reports norms and hyperparameters."
        )
    return {name: (steps, _numbers(name, values)) for name, (steps, values) in series.items()}


def _numbers(name: str, values: list[Any]) -> Real[np.ndarray, "steps ..."]:
    try:
        return np.asarray(values).astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"The history of '{name}' does not consist of numbers of one shape: {values[0]!r}, …"
        ) from None


def _chosen(series: Mapping[str, np.ndarray], names: Sequence[str] | None) -> list[str]:
    """The names to plot."""
    if names is None:
        changing = [name for name, values in series.items() if np.any(values != values[0])]
        return changing or list(series)
    if isinstance(names, str):
        names = [names]
    chosen: list[str] = []
    for name in names:
        is_glob = "*" in name
        matches = (
            [*filter(glob_pattern(name).fullmatch, series)] if is_glob else named(name, series)
        )
        if not matches or (len(matches) > 1 and not is_glob):
            raise not_one(name, matches, series, "is not in the history")
        chosen += matches
    return list(dict.fromkeys(chosen))


MOST_COLORS = 6
"""The number of colors that a legend explains."""

MOST_LABELS = 64
"""The number of cells of a heat map up to which each shows its number."""


def draw_sweep_losses(axes: "Axes", result: Any) -> None:
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


def draw_final_losses(axes: "Axes", result: Any) -> None:
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


def draw_heat_map(figure: "Figure", axes: "Axes", result: Any) -> None:
    from matplotlib.colors import LogNorm

    (first, rows), (second, columns), *others = result.grid.items()
    final = np.where(np.isfinite(result.final), result.final, np.inf)
    best_of_others = np.min(final, axis=tuple(range(2, final.ndim)))
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
