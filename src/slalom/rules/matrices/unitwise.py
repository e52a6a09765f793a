"""Transforms that clip the update of each unit."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from ... import fields, tree
from ..._core.protocol.rule import AbstractRule
from ...tree.types import Params
from ...where.layout import LayoutLike
from .._layout import unit_axes, warn_guessed
from ..shaping.clip import clip_factor


class _AbstractUnitwise(AbstractRule[None]):
    """A rule that needs the axes of each unit."""

    layout: eqx.AbstractVar[LayoutLike]

    over: ClassVar[str] = "leaf"
    keeps_zeros: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        tree.check_inexact(params)
        unit_axes(self, params)
        warn_guessed(self, params)

    def plans(self, params):
        return unit_axes(self, params)


class UnitwiseClip(_AbstractUnitwise):
    """Scales the update of each unit so that its norm is at most c: u ↦ u·min(1, c / ‖u‖).

    A unit is one output of a layer, with all the weights that lead to it. In Equinox's layers a
    unit is a row of a `Linear` (including those in `MultiheadAttention`), a `GRUCell` or an
    `LSTMCell`, the kernels of one output channel of a `Conv` or `ConvTranspose`, or a column of an
    `Embedding`, even when `eqx.filter_vmap` stacks these layers. A bias, a scale and any other
    vector is one unit. Other arrays follow Optax, where inputs come first: a unit lies along axis 0
    of an array with 2 or 3 axes, and along all axes but the last of one with 4 or 5. If such an
    array belongs to a module of your own, creating the optimizer warns about it. State the layout
    in its class: `__layout__ = {"weight": "oi"}`.

    **Arguments:**

    - `max_norm`: c, ≥ 0.
    - `layout`: the layout of arrays that would otherwise be read wrongly: a mapping from selectors
        to strings with a letter for each axis, such as `{sl.where.path("w"): "oi"}`, or one such
        string for all arrays. `sl.where.matrix` explains the letters.

    ??? cite "Brock et al., [High-Performance Large-Scale Image Recognition Without
        Normalization](https://arxiv.org/abs/2102.06171), 2021"
    """

    max_norm: fields.Number = fields.hyperparameter(within="[0, inf]")
    layout: LayoutLike = fields.layout_field()

    def direction(self, g, leaf):
        return g * clip_factor(tree.norm(g, self.plan), self.max_norm)


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

    clipping: fields.Number = fields.hyperparameter(within="[0, inf]")
    eps: fields.Number = fields.hyperparameter(1e-3, within="[0, inf)")
    layout: LayoutLike = fields.layout_field()

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def direction(self, g, leaf):
        # Not `tree.norm`, which would read them twice for sizes that weights do not have.
        size = tree.root(jnp.sum(tree.abs_squared(self.p), self.plan, keepdims=True))
        limit = self.clipping * jnp.maximum(size, self.eps)
        return g * clip_factor(tree.norm(g, self.plan), limit)
