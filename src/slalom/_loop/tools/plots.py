"""Figures of recorded metrics."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Real

from ..._core.text.figures import make_figure
from ...tree.paths import glob_pattern, named, not_one

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
            known = dict(zip(*series[STEP], strict=True))
            there = [i for i, step in enumerate(steps) if step in known]
            steps, values = np.array([known[steps[i]] for i in there]), values[there]
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
    found: dict[str, tuple[list[int], list[Any]]] = {}
    if isinstance(history, Mapping):
        found = {
            name: (list(range(len(values))), list(values))
            for name, values in _read([history])[0].items()
        }
    else:
        for i, entry in enumerate(_read(list(history))):
            for name, value in entry.items():
                steps, values = found.setdefault(name, ([], []))
                steps.append(i)
                values.append(value)
    if not any(name != STEP and values for name, (_, values) in found.items()):
        raise ValueError(
            "There is nothing to plot: the history is empty. Collect `opt.metrics` in every step; "
            "`tx.record()` reports norms and hyperparameters."
        )
    return {name: (steps, _numbers(name, values)) for name, (steps, values) in found.items()}


def _read(entries: list[Any]) -> list[dict[str, Any]]:
    """The entries as dicts of numbers on the host, in one transfer and in their own order."""
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise TypeError(
                "A history is a list of dicts of numbers, or a dict of arrays, got "
                f"{entry!r} of type {type(entry).__name__} in it."
            )
    values = jax.device_get([list(entry.values()) for entry in entries])
    return [dict(zip(entry, own, strict=True)) for entry, own in zip(entries, values, strict=True)]


def _numbers(name: str, values: list[Any]) -> Real[np.ndarray, "steps ..."]:
    try:
        numbers = np.asarray(values)
        if numbers.dtype.kind not in "biuf":
            numbers = numbers.astype(np.float64)  # such as bfloat16, whose kind is void
    except (TypeError, ValueError):
        raise ValueError(
            f"The history of '{name}' does not consist of numbers of one shape: {values[0]!r}, …"
        ) from None
    return numbers.astype(np.float64)


def _chosen(known: Mapping[str, np.ndarray], names: Sequence[str] | None) -> list[str]:
    """The names to plot."""
    if names is None:
        changing = [name for name, values in known.items() if np.any(values != values[0])]
        return changing or list(known)
    if isinstance(names, str):
        names = [names]
    chosen: list[str] = []
    for name in names:
        if "*" in name:
            found = [path for path in known if glob_pattern(name).fullmatch(path)]
        else:
            found = named(name, known)
        if not found or ("*" not in name and len(found) > 1):
            raise not_one(name, found, known, "is not in the history")
        chosen += found
    return list(dict.fromkeys(chosen))
