"""Transforms that clip the update of each unit."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from ... import tree
from ..._core.fields.declare import Hyperparameter, hyperparameter
from ..._core.protocol.context import Context
from ..._core.protocol.stateless import AbstractStatelessTransform
from ...tree.types import Params, Updates
from ...where.layout import LayoutLike
from ..shaping.clip import clip_factor
from ._layout import layout_field, map_by, unit_axes, warn_guessed


class _AbstractUnitwise(AbstractStatelessTransform):
    """A rule that needs the axes of each unit."""

    layout: eqx.AbstractVar[LayoutLike]

    keeps_zeros: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        tree.check_inexact(params)
        unit_axes(self, params)
        warn_guessed(self, params)

    def _map_units(
        self, rule: Callable[..., Array], trees: tuple[Any, ...], context: Context | None
    ) -> Updates:
        """`rule(axes, now, *leaves)` at every leaf, where `axes` are those of one unit."""
        axes = unit_axes(self, trees[0])
        (updates,) = map_by(axes, lambda *args: (rule(*args),), trees, self.at(context))
        return updates


class UnitwiseClip(_AbstractUnitwise):
    """Scales the update of each unit so that its norm is at most c: u ↦ u·min(1, c / ‖u‖).

    A unit is one output of a layer, with all the weights that lead to it. In Equinox's layers a
    unit is a row of a `Linear` (also in `MultiheadAttention`), a `GRUCell` or an `LSTMCell`, the
    kernels of one output channel of a `Conv` or `ConvTranspose`, or a column of an `Embedding`,
    also when `eqx.filter_vmap` stacks these layers. A bias, a scale and any other vector is one
    unit. Other arrays follow Optax, where inputs come first: a unit lies along axis 0 of an array
    with 2 or 3 axes, and along all axes but the last of one with 4 or 5. If such an array belongs
    to a module of your own, creating the optimizer warns about it. State the layout in its class:
    `__layout__ = {"weight": "oi"}`.

    **Arguments:**

    - `max_norm`: c, ≥ 0.
    - `layout`: the layout of arrays that are read wrongly otherwise: a mapping from selectors to
        strings with a letter for each axis, such as `{sl.where.path("w"): "oi"}`, or one such
        string for all arrays. `sl.where.matrix` explains the letters.

    ??? cite "Brock et al., [High-Performance Large-Scale Image Recognition Without
        Normalization](https://arxiv.org/abs/2102.06171), 2021"
    """

    max_norm: Hyperparameter = hyperparameter(within="[0, inf]")
    layout: LayoutLike = layout_field()

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params

        def rule(axes, now, u):
            return u * clip_factor(_norms(axes, u), now.max_norm)

        return self._map_units(rule, (updates,), context)


class AdaptiveGradClip(_AbstractUnitwise):
    """Clips the update of each unit relative to the norm of its weights.

        u ↦ u·min(1, c·max(‖p‖, ε) / ‖u‖)   with the norms of one unit

    A unit is one output of a layer, with all the weights that lead to it, as in `UnitwiseClip`.

    Differs from Optax in Equinox's layers, where outputs come first; Optax assumes that inputs
    come first everywhere.

    **Arguments:**

    - `clipping`: c, the largest ratio of the two norms, ≥ 0; 0.01 in the paper for large batches.
    - `eps`: ε, ≥ 0; lets weights leave zero.
    - `layout`: as for `UnitwiseClip`.

    ??? cite "Brock et al., [High-Performance Large-Scale Image Recognition Without
        Normalization](https://arxiv.org/abs/2102.06171), 2021"
    """

    clipping: Hyperparameter = hyperparameter(within="[0, inf]")
    eps: Hyperparameter = hyperparameter(1e-3, within="[0, inf)")
    layout: LayoutLike = layout_field()

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)

        def rule(axes, now, u, p):
            limit = now.clipping * jnp.maximum(_norms(axes, p), now.eps)
            return u * clip_factor(_norms(axes, u), limit)

        return self._map_units(rule, (updates, params), context)


def _norms(axes: tuple[int, ...], x: Array) -> Array:
    return tree.root(jnp.sum(tree.abs_squared(x), axes, keepdims=True))
