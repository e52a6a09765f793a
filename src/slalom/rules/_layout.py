"""Units, pairs of axes and matrices of parameters, for rules with a layout.

A rule that reads layouts declares `layout: LayoutLike = layout_field()`, and asks the functions
below in `init`, where an array without meaning is refused, and in `plan`. All of them depend only
on the structure and the shapes of the parameters, and are memoized. A rule with `over = "matrix"`
is given matrices.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import numpy as np

from .._core.engine.matrices import matrices_or_none, refuse_unequal
from .._core.text.messages import warn
from .._core.text.printing import public_name
from ..tree.paths import leaf_paths
from ..tree.types import Params
from ..where.layout import HEADS, Layout, LayoutLike, Matrix, layouts
from ..where.resolve import Cases
from ..where.selectors import path as path_, type as type_
from ._base import AbstractRule, State

# --- matrices -------------------------------------------------------------------------------


def matrices_as_text(
    rule: object, params: Params, text: Callable[[Matrix], str] = str
) -> tuple[str | None, ...]:
    """The matrices of each leaf for `opt.describe`, such as `"12 of 64 × 32"`."""
    views = matrices_or_none(rule, params)
    return tuple(None if matrix is None else text(matrix) for matrix in views)


def _layouts(rule: Any, params: Params) -> tuple[Layout, ...]:
    return layouts(params, rule.layout)


# --- how large an orthogonal update is ------------------------------------------------------


def scale_of(scale: str | None, rows: int, columns: int, rank: int | None = None) -> float:
    """The factor s of a matrix, as `Orthogonalize` describes it.

    **Arguments:**

    - `scale`: its name.
    - `rows`, `columns`: the numbers of outputs and inputs.
    - `rank`: how many singular values are 1. Defaults to all.
    """
    if scale is None or 0 in (rows, columns):
        return 1.0
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(rows * columns / (rank or min(rows, columns)))
    return math.sqrt(rows / columns if scale == "spectral" else max(1.0, rows / columns))


# --- units and factors ----------------------------------------------------------------------


class AbstractByLayout(AbstractRule[State]):
    """A rule whose `plans` read layouts, and raise an error for an array without a meaning."""

    layout: eqx.AbstractVar[LayoutLike]

    over: ClassVar[str] = "leaf"
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> State:
        state = super().init(params)
        self.plans(params)
        warn_guessed(self, params)
        return state


def unit_axes(rule: object, params: Params) -> tuple[tuple[int, ...], ...]:
    """For each leaf the axes along which its numbers belong to one unit.

    **Arguments:**

    - `rule`: a transform with the field `layout`.
    - `params`: the parameters, or updates.
    """
    return tuple(layout.unit or () for layout in _known_layouts(rule, params, "units"))


def columns(rule: object, params: Params) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """For each leaf a shape and its axes along which the numbers belong to one input.

    It is the shape of the leaf, but with an axis for the groups of a convolution. Arguments as in
    `unit_axes`.
    """
    results = []
    for layout in _known_layouts(rule, params, "columns"):
        shape, axes = layout.shape, layout.axes("o")
        if layout.is_grouped:
            shape = tuple(size for _, size in layout.split)
            axes = tuple(a for a, (letter, _) in enumerate(layout.split) if letter == "o")
        results.append((shape, axes))
    return tuple(results)


def row_axes(rule: object, params: Params) -> tuple[tuple[int, ...], ...]:
    """For each leaf the axes along which its numbers belong to one output, or to one token.

    None where there is only one number. If the layout is unknown, all axes but the first.
    """
    results: list[tuple[int, ...]] = []
    for layout in _layouts(rule, params):
        if layout.guessed or layout.letters is None:
            results.append(tuple(range(1, len(layout.shape))))
        elif layout.axes("v"):
            results.append(layout.axes("o"))
        else:
            results.append(layout.axes("ik") if layout.axes("o") else ())
    return tuple(results)


def inputs(rule: object, params: Params) -> tuple[int, ...]:
    """For each leaf the number of inputs, which is 1 for a vector; as in `unit_axes`."""
    numbers = []
    for layout in _known_layouts(rule, params, "inputs"):
        axes = zip(layout.shape, layout.letters or (), strict=True)
        sizes = [n // blocks for n, (letter, blocks) in axes if letter in "ikv"]
        numbers.append(max(1, math.prod(sizes)))
    return tuple(numbers)


def _known_layouts(rule: object, params: Params, what: str) -> tuple[Layout, ...]:
    """The layouts. Raises an error if one is unknown."""
    who, result = type(rule).__name__, _layouts(rule, params)
    for path, layout in zip(leaf_paths(params), result, strict=True):
        if layout.letters is None:
            letters = "i" * (len(layout.shape) - 1) + "o"
            raise ValueError(
                f"{who} does not know the {what} of '{path}', which has {len(layout.shape)} axes. "
                "Say which axes are outputs (o) and inputs (i), for this array only: "
                f"`{public_name(type(rule))}(..., layout={{sl.where.path({path!r}): "
                f"{letters!r}}})`."
            )
    return result


def warn_guessed(rule: object, params: Params) -> None:
    """Warns about modules whose layout the rule has to guess."""
    for path, layout in zip(leaf_paths(params), _layouts(rule, params), strict=True):
        if layout.axes("i"):
            warn_if_guessed(type(rule).__name__, public_name(type(rule)), path, layout)


def warn_if_guessed(who: str, code: str, path: str, layout: Layout) -> None:
    """Warns about a module whose layout is guessed, and says what to write, also in this call."""
    if layout.module is None:
        return
    name = path.rpartition(".")[2]
    letters = "".join(letter for letter, _ in layout.letters or ())
    warn(
        f"{who} does not know how {layout.module} stores '{path}', and assumes, as Optax does, the "
        f"layout {letters!r}: inputs before outputs. Equinox's own layers store outputs first. To "
        "state the layout and silence this warning, write `__layout__ = "
        f"{{{name!r}: {letters!r}}}` into the class {layout.module}, or `{code}(..., "
        f"layout={{sl.where.type({layout.module}): {letters!r}}})`."
    )


def factored_axes(
    rule: object, params: Params, min_size: int
) -> tuple[tuple[int, int] | None, ...]:
    """For each leaf the two axes to factor, or `None` if one is too short.

    They are axes of outputs and inputs, and the two longest axes where the layout is guessed.
    """
    results: list[tuple[int, int] | None] = []
    for x, layout in zip(jax.tree.leaves(params), _layouts(rule, params), strict=True):
        axes = layout.pair
        if layout.guessed and x.ndim > 1:
            second, longest = (int(a) for a in np.argsort(x.shape, kind="stable")[-2:])
            axes = (longest, second)
        long_enough = axes is not None and min(x.shape[a] for a in axes) >= min_size
        results.append(axes if long_enough else None)
    return tuple(results)


# --- blocks that share a mean of squares ----------------------------------------------------


def block_counts(rule: Any, params: Params) -> tuple[tuple[int, ...], ...]:
    """For each leaf the number of blocks along each axis, where a block is one unit.

    An embedding has a block for each row, the queries and keys of an attention layer one for each
    head, and outputs in blocks one for each of them. A stack has blocks of its own for each layer.
    """
    unit_axes(rule, params)  # raises an error for what has no known units
    cases = () if rule.layout is None else rule.layout.cases
    in_heads = layouts(params, Cases((*cases, (_QUERIES_AND_KEYS, HEADS))))
    refuse_unequal(type(rule).__name__, params, in_heads)
    return tuple(_block_counts(layout) for layout in in_heads)


def _block_counts(layout: Layout) -> tuple[int, ...]:
    letters = layout.letters or ()
    whole = layout.is_grouped or all(n == 1 for letter, n in letters if letter == "o")
    # The rows of an embedding are its tokens, and vectors have no inputs to average over.
    units = "v" if layout.axes("v") else "o" if layout.axes("ik") else ""
    return tuple(
        size if letter == "s" else 1 if letter not in units else size if whole else n
        for size, (letter, n) in zip(layout.shape, letters, strict=True)
    )


_QUERIES_AND_KEYS = type_(eqx.nn.MultiheadAttention) & (
    path_("**.query_proj.weight") | path_("**.key_proj.weight")
)
