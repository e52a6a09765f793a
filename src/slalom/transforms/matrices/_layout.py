"""What rules ask of a layout: units, pairs of axes, and matrices.

A rule that reads layouts declares `layout: LayoutLike = layout_field()`, and asks the functions
below in `init` and in `update`. All of them depend only on the structure and the shapes of the
parameters, and are memoized.

A rule for matrices calls `matrices` in `init`, where an array without meaning is refused, and in
`update`:

    for m, g in zip(matrices(self, updates), jax.tree.leaves(updates), strict=True):
        u = m.write(rule(m.read(g)))       # (batch, outputs, inputs)

Where an array may also be something else than a matrix, it calls `matrices_or_none`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ... import tree
from ..._core.protocol.parts import CHECK
from ..._core.text.messages import warn
from ...tree.paths import leaf_paths
from ...tree.types import Params
from ...where.layout import HEADS, Layout, Matrix, as_layout, check_layout, layouts
from ...where.resolve import Cases
from ...where.selectors import path as path_, type as type_


def layout_field() -> Any:
    """Declares the keyword `layout` of a rule: `LayoutLike`, `None` by default."""
    return eqx.field(
        default=None,
        static=True,
        converter=as_layout,
        kw_only=True,
        metadata={CHECK: check_layout},
    )


# --- matrices -------------------------------------------------------------------------------


def matrices(rule: Any, params: Params) -> tuple[Matrix, ...]:
    """How to read each leaf, in order, as matrices.

    **Arguments:**

    - `rule`: a transform with the field `layout`.
    - `params`: the parameters, or updates.

    **Returns:** a `Matrix` for each leaf.

    **Raises:** `ValueError` for a leaf that is not a matrix of a layer, such as a vector.
    """
    found = _layouts(rule, params)
    for path, layout in zip(leaf_paths(params), found, strict=True):
        if layout.matrix is None:
            raise ValueError(_not_a_matrix(type(rule).__name__, path, layout))
    return tuple(layout.matrix for layout in found if layout.matrix is not None)


def matrices_or_none(rule: Any, params: Params) -> tuple[Matrix | None, ...]:
    """How to read each leaf, in order, as matrices; `None` for what is not a matrix of a layer."""
    return tuple(layout.matrix for layout in _layouts(rule, params))


def matrices_as_text(rule: Any, params: Params) -> tuple[str | None, ...]:
    """The matrices of each leaf for `opt.describe`, such as `"12 of 64 × 32"`."""
    found = matrices_or_none(rule, params)
    return tuple(None if matrix is None else str(matrix) for matrix in found)


def _layouts(rule: Any, params: Params) -> tuple[Layout, ...]:
    return layouts(params, rule.layout)


def _not_a_matrix(who: str, path: str, layout: Layout) -> str:
    reason = layout.not_a_matrix
    message = f"{who} takes matrices, and '{path}' is {reason}. "
    letters = {2: "io", 3: "sio", 4: "oikk", 5: "oikkk"}.get(len(layout.shape))
    where = f"sl.where.path({path!r})" if path else "sl.where.everything()"
    if letters is not None and (layout.letters is None or layout.guessed or layout.axes("v")):
        message += (
            "If it is a matrix to you, say which axes are outputs (o), inputs (i), a kernel (k) "
            f"and a stack (s): `sl.{who}(..., layout={{{where}: {letters!r}}})`. Otherwise g"
        )
    else:
        message += "G"
    return (
        f"{message}ive it another rule: "
        f"`sl.adamw(1e-3).partition({{sl.where.matrix(): sl.{who}(...) | "
        "sl.ScaleByLearningRate(1e-3)})`."
    )


def map_by(
    keys: tuple[Any, ...],
    rule: Callable[..., tuple[Any, ...]],
    trees: tuple[Any, ...],
    now: Any = None,
    *,
    per_param: tuple[Any, ...] = (),
    results: int = 1,
) -> tuple[Any, ...]:
    """Applies `rule(key, now, *leaves, *tuples)` at every leaf, as `tree.map_leaves` does.

    **Arguments:**

    - `keys`: something hashable for each leaf, such as its `Matrix`. Leaves of equal shape and
        dtype with the same key share one trace.
    - `rule`, `trees`, `now`, `per_param`: as for `tree.map_leaves`, but the rule always returns a
        tuple, and the numbers in `now` are scalars.
    - `results`: the number of entries of that tuple.

    **Returns:** as many trees.
    """
    structure = jax.tree.structure(trees[0])
    columns: list[list[Any]] = [[None] * len(keys) for _ in range(results)]
    for key in dict.fromkeys(keys):
        keep = tuple(k == key for k in keys)
        cut = tuple(tree.cut(t, keep) for t in trees)
        within = jax.tree.structure(cut[0])
        tuples = tuple(
            within.unflatten(
                [x for x, k in zip(structure.flatten_up_to(t), keep, strict=True) if k]
            )
            for t in per_param
        )
        new = tree.map_leaves(functools.partial(rule, key), cut, now, per_param=tuples)
        places = [i for i, k in enumerate(keep) if k]
        for column, tree_of_results in zip(columns, new, strict=True):
            for i, x in zip(places, within.flatten_up_to(tree_of_results), strict=True):
                column[i] = x
    return tuple(map(structure.unflatten, columns))


# --- units and factors ----------------------------------------------------------------------


def unit_axes(rule: Any, params: Params) -> tuple[tuple[int, ...], ...]:
    """For each leaf the axes along which its numbers belong to one unit.

    **Arguments:**

    - `rule`: a transform with the field `layout`.
    - `params`: the parameters, or updates.
    """
    return tuple(layout.unit or () for layout in _known(rule, params, "units"))


def column_axes(rule: Any, params: Params) -> tuple[tuple[int, ...], ...]:
    """For each leaf the axes along which its numbers belong to one input, as in `unit_axes`."""
    return tuple(layout.axes("o") for layout in _known(rule, params, "columns"))


def row_axes(rule: Any, params: Params) -> tuple[tuple[int, ...], ...]:
    """For each leaf the axes along which its numbers belong to one output, or to one token.

    None where there is only one number. If the layout is unknown, all axes but the first.
    """
    found: list[tuple[int, ...]] = []
    for layout in _layouts(rule, params):
        if layout.guessed or layout.letters is None:
            found.append(tuple(range(1, len(layout.shape))))
        elif layout.axes("v"):
            found.append(layout.axes("o"))
        else:
            found.append(layout.axes("ik") if layout.axes("o") else ())
    return tuple(found)


def inputs(rule: Any, params: Params) -> tuple[int, ...]:
    """For each leaf the number of inputs, which is 1 for a vector; as in `unit_axes`."""
    found = []
    for layout in _known(rule, params, "inputs"):
        axes = zip(layout.shape, layout.letters or (), strict=True)
        sizes = [n // blocks for n, (letter, blocks) in axes if letter in "ikv"]
        found.append(max(1, math.prod(sizes)))
    return tuple(found)


def _known(rule: Any, params: Params, what: str) -> tuple[Layout, ...]:
    """The layouts, none of which is unknown."""
    who, found = type(rule).__name__, _layouts(rule, params)
    for path, layout in zip(leaf_paths(params), found, strict=True):
        if layout.letters is None:
            letters = "i" * (len(layout.shape) - 1) + "o"
            raise ValueError(
                f"{who} does not know the {what} of '{path}', which has {len(layout.shape)} axes. "
                "Say which axes are outputs (o) and inputs (i), for this array only: "
                f"`sl.{who}(..., layout={{sl.where.path({path!r}): {letters!r}}})`."
            )
    return found


def warn_guessed(rule: Any, params: Params) -> None:
    """Warns about modules whose layout the rule has to guess."""
    who = type(rule).__name__
    for path, layout in zip(leaf_paths(params), _layouts(rule, params), strict=True):
        if layout.module is not None and layout.axes("i"):
            name = path.rpartition(".")[2]
            letters = "".join(letter for letter, _ in layout.letters or ())
            warn(
                f"{who} does not know how {layout.module} stores '{path}', and assumes, as Optax "
                f"does, the layout {letters!r}: inputs before outputs. Equinox's own layers store "
                "outputs first. To state the layout and silence this warning, write "
                f"`__layout__ = {{{name!r}: {letters!r}}}` into the class {layout.module}, or "
                f"`sl.{who}(..., layout={{sl.where.type({layout.module}): {letters!r}}})`."
            )


def factored_axes(rule: Any, params: Params, min_size: int) -> tuple[tuple[int, int] | None, ...]:
    """For each leaf the two axes to factor, or `None` if one is too short.

    They are axes of outputs and inputs, and the two longest axes where the layout is guessed.
    """
    found: list[tuple[int, int] | None] = []
    for x, layout in zip(jax.tree.leaves(params), _layouts(rule, params), strict=True):
        axes = layout.pair
        if layout.guessed and x.ndim > 1:
            second, longest = (int(a) for a in np.argsort(x.shape, kind="stable")[-2:])
            axes = (longest, second)
        long_enough = axes is not None and min(x.shape[a] for a in axes) >= min_size
        found.append(axes if long_enough else None)
    return tuple(found)


# --- blocks that share a mean of squares ----------------------------------------------------


def block_counts(rule: Any, params: Params) -> tuple[tuple[int, ...], ...]:
    """For each leaf the number of blocks along each axis, where a block is one unit.

    An embedding has a block for each row, the queries and keys of an attention layer one for each
    head, and outputs in blocks one for each of them. A stack has blocks of its own for each layer.
    """
    unit_axes(rule, params)  # raises an error for what has no known units
    given = () if rule.layout is None else rule.layout.cases
    found = layouts(params, Cases((*given, (_QUERIES_AND_KEYS, HEADS))))
    return tuple(_block_counts(layout) for layout in found)


def _block_counts(layout: Layout) -> tuple[int, ...]:
    letters = layout.letters or ()
    blocks = max((n for letter, n in letters if letter == "o"), default=1)
    # The rows of an embedding are its tokens, and vectors have no inputs to average over.
    units = "v" if layout.axes("v") else "o" if layout.axes("ik") else ""
    return tuple(
        size if letter == "s" else 1 if letter not in units else _count(size, blocks, n)
        for size, (letter, n) in zip(layout.shape, letters, strict=True)
    )


def _count(size: int, blocks: int, here: int) -> int:
    return size if blocks == 1 else here


_QUERIES_AND_KEYS = type_(eqx.nn.MultiheadAttention) & (
    path_("**.query_proj.weight") | path_("**.key_proj.weight")
)
