"""Which axes of an array are outputs and which are inputs: by layer type, or as Optax assumes.

Equinox stores matrices as out × in, and Flax, for which Optax was written, as in × out.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._core.messages import warn
from .._paths import leaf_paths
from .._types import Params
from ..where.resolve import Leaf, resolve

Axis = int | tuple[int, ...]
"""One axis or several; negative ones count from the end."""


class Layout(NamedTuple):
    """The axes of one array, without the leading axes of a stack of layers, as `eqx.filter_vmap`
    creates it."""

    ndim: int
    known: bool
    """Whether the array belongs to a layer of known layout."""
    matrix: tuple[int, int] | None
    """The axes of outputs and inputs, if a known layer has both."""
    unit: tuple[int, ...] | None
    """The axes along which the numbers belong to one output; `None` if unknown."""
    module: str | None
    """The class of the module that owns this array, if its layout is unknown and matters."""


_RNN = {"weight_ih": "oi", "weight_hh": "oi", "bias": "o", "bias_n": "o"}

# A letter per axis of the arrays of a layer: o for outputs, i for inputs, k for a kernel.
_LAYERS: dict[type, Any] = {
    eqx.nn.Linear: lambda layer: {"weight": "oi", "bias": "o"},
    eqx.nn.Conv: lambda layer: _convolution(layer),
    eqx.nn.ConvTranspose: lambda layer: _convolution(layer),
    # A linear layer for one-hot vectors, stored as in × out.
    eqx.nn.Embedding: lambda layer: {"weight": "io"},
    eqx.nn.GRUCell: lambda layer: _RNN,
    eqx.nn.LSTMCell: lambda layer: _RNN,
    eqx.nn.LayerNorm: lambda layer: _elementwise(layer.shape),
    eqx.nn.RMSNorm: lambda layer: _elementwise(layer.shape),
    eqx.nn.GroupNorm: lambda layer: _elementwise((layer.channels,)),
    eqx.nn.BatchNorm: lambda layer: _elementwise((layer.input_size,)),
}


def _convolution(layer: Any) -> dict[str, str]:
    kernel = "k" * layer.num_spatial_dims
    return {"weight": "oi" + kernel, "bias": "o" + kernel}


def _elementwise(shape: tuple[int, ...]) -> dict[str, str]:
    return {"weight": "o" * len(shape), "bias": "o" * len(shape)}


def layouts(params: Params) -> tuple[Layout, ...]:
    """The layout of each leaf, in order. Memoized."""
    return resolve(_layouts, None, params)


def _layouts(_: None, leaves: list[Leaf]) -> list[Layout]:
    return [_layout(leaf) for leaf in leaves]


def _layout(leaf: Leaf) -> Layout:
    ndim = len(leaf.struct.shape)
    owner = leaf.ancestors()[-1]
    letters = None
    for cls, arrays in _LAYERS.items():
        if isinstance(owner, cls):
            letters = arrays(owner).get(leaf.path.rpartition(".")[2])
    if letters is not None and ndim >= len(letters):
        axes = range(ndim - len(letters), ndim)
        if set("oi") <= set(letters):
            out, into = (axes[letters.index(letter)] for letter in "oi")
            return Layout(ndim, True, (out, into), tuple(a for a in axes if a != out), None)
        return Layout(ndim, True, None, tuple(axes), None)
    unknown = isinstance(owner, eqx.Module) and sum(n != 1 for n in leaf.struct.shape) > 1
    module = type(owner).__name__ if unknown else None
    return Layout(ndim, False, None, _as_optax(leaf.struct.shape), module)


def _as_optax(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of one unit of an array stored as in × out, by rank, as in Optax."""
    if sum(n != 1 for n in shape) <= 1:
        return tuple(range(len(shape)))
    return {2: (0,), 3: (0,), 4: (0, 1, 2), 5: (0, 1, 2, 3)}.get(len(shape))


# --- for rules ------------------------------------------------------------------------------


def unit_axes(who: str, params: Params, axis: Axis | None) -> tuple[tuple[int, ...], ...]:
    """For each leaf the axes along which its numbers belong to one unit.

    **Arguments:**

    - `who`: the name of the rule, for errors.
    - `params`: the parameters, or updates.
    - `axis`: the axes that the user passed for all leaves, if any.
    """
    found = []
    for path, layout in zip(leaf_paths(params), layouts(params), strict=True):
        if axis is not None:
            found.append(_from_front(who, path, layout.ndim, axis))
        elif layout.unit is None:
            raise ValueError(
                f"{who} does not know the units of '{path}', which has {layout.ndim} axes. Pass "
                "the axes along which the numbers of one unit lie, for this array only: "
                f"`sl.{who}(..., axis=...).mask(sl.where.path({path!r}))`."
            )
        else:
            found.append(layout.unit)
    return tuple(found)


def warn_unknown(who: str, params: Params) -> None:
    """Warns about modules whose layout the rule has to guess."""
    for path, layout in zip(leaf_paths(params), layouts(params), strict=True):
        if layout.module is not None:
            warn(
                f"{who} does not know how {layout.module} stores '{path}', and assumes, as Optax "
                f"does, that the numbers of one unit lie along {_axes(layout.unit)}. Equinox's own "
                "layers store out × in. To choose the axes and silence this warning: "
                f"`sl.{who}(..., axis=...).mask(sl.where.type({layout.module}))`."
            )


def factored_axes(
    who: str, params: Params, axis: tuple[int, int] | None, min_size: int
) -> tuple[tuple[int, int] | None, ...]:
    """For each leaf the two axes to factor, or `None` if one is too short.

    They are the axes of outputs and inputs in known layers, and the two longest axes otherwise.
    """
    found: list[tuple[int, int] | None] = []
    leaves = jax.tree.leaves(params)
    for path, x, layout in zip(leaf_paths(params), leaves, layouts(params), strict=True):
        axes = layout.matrix
        if axis is not None:
            first, last = _from_front(who, path, layout.ndim, axis)
            axes = (first, last)
        elif not layout.known and layout.ndim > 1:
            second, longest = (int(a) for a in np.argsort(x.shape, kind="stable")[-2:])
            axes = (longest, second)
        long_enough = axes is not None and min(x.shape[a] for a in axes) >= min_size
        found.append(axes if long_enough else None)
    return tuple(found)


def _from_front(who: str, path: str, ndim: int, axis: Axis) -> tuple[int, ...]:
    """The axes that the user passed, counted from the front."""
    axes = (axis,) if isinstance(axis, int) else axis
    if any(not -ndim <= a < ndim for a in axes):
        raise ValueError(
            f"{who} has axis={axis!r}, but '{path}' has ndim={ndim}. Apply it only to parameters "
            "that have this axis, for example with `.mask(sl.where.ndim(min=2))`."
        )
    return tuple(sorted({a % ndim for a in axes}))


def _axes(axes: Axis | None) -> str:
    if axes is None:
        return "none of its axes"
    if isinstance(axes, int) or len(axes) == 1:
        return f"axis {axes if isinstance(axes, int) else axes[0]}"
    return f"axes {', '.join(map(str, axes))}"
