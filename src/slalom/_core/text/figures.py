"""Matplotlib figures without pyplot: no global state, no choice of backend, no windows."""

import functools
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def make_figure(
    who: str, rows: int = 1, columns: int = 1, *, size: tuple[float, float], share_x: bool = False
) -> "tuple[Figure, Sequence[Axes]]":
    """An empty figure and its axes, row by row.

    **Arguments:**

    - `who`: the name of the public function that draws, for the error without matplotlib.
    - `rows`, `columns`: the layout.
    - `size`: the width and height in inches.
    - `share_x`: whether the axes of a column share their horizontal axis.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"`{who}` needs matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex="col" if share_x else "none")
    for axes in grid.flat:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    # Notebooks only know how to display figures once pyplot has been imported.
    vars(figure)["_repr_png_"] = functools.partial(_png, figure)
    return figure, list(grid.flat)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
