"""Transforms that bound the update of each unit, by itself or by the size of its weights."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import tree
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import Context
from .._types import Params, Scalar, Updates
from ._layout import Axis, unit_axes, warn_unknown
from .clip import shrinking


class _AbstractUnitwise(AbstractStatelessTransform):
    """What looks at the numbers of one unit together."""

    axis: eqx.AbstractVar[Axis | None]

    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        tree.check_inexact(params)
        unit_axes(type(self).__name__, params, self.axis)
        if self.axis is None:
            warn_unknown(type(self).__name__, params)

    def _map_units(
        self, rule: Callable[..., Array], trees: tuple[Any, ...], scalars: tuple[Scalar, ...]
    ) -> Updates:
        """`rule(axes, *leaves, *scalars)` at every leaf, `axes` being those of one unit."""
        axes = unit_axes(type(self).__name__, trees[0], self.axis)
        made: list[Any] = [None] * len(axes)
        for own in dict.fromkeys(axes):
            keep = tuple(a == own for a in axes)
            cut = tuple(tree.cut(t, keep) for t in trees)
            new = tree.map_leaves(functools.partial(rule, own), cut, scalars)
            chosen = (i for i, k in enumerate(keep) if k)
            for i, leaf in zip(chosen, jax.tree.leaves(new), strict=True):
                made[i] = leaf
        return jax.tree.structure(trees[0]).unflatten(made)


class UnitwiseClip(_AbstractUnitwise):
    """Scales the update of each unit so that its norm is at most c: u ↦ u·min(1, c / ‖u‖).

    A unit is one output of a layer, with all the weights that lead to it. For Equinox's layers
    its weights are those of one output: rows of a `Linear` (`MultiheadAttention` is made of
    these), a `GRUCell` or an `LSTMCell`, the kernels of one output channel of a `Conv` or
    `ConvTranspose`, and columns of an `Embedding`, also in a stack of layers that
    `eqx.filter_vmap` made. A bias, a scale and any other vector is one unit. Other arrays are
    taken as Optax takes them, inputs first: a unit lies along axis 0 of an array with 2 or 3
    axes, along all axes but the last of one with 4 or 5. Where such an array belongs to a module
    of your own, a warning at binding says so.

    **Arguments:**

    - `max_norm`: c, ≥ 0.
    - `axis`: the axis or axes along which the numbers of one unit lie instead, in every array
        that this transform sees.

    ??? cite "Brock et al., [High-Performance Large-Scale Image Recognition Without
        Normalization](https://arxiv.org/abs/2102.06171), 2021"
    """

    max_norm: Hyperparameter = hyperparameter(within="[0, inf]")
    axis: Axis | None = eqx.field(default=None, static=True)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params

        def rule(axes, u, max_norm):
            return u * shrinking(_norms(axes, u), max_norm)

        return self._map_units(rule, (updates,), (self.at(context).max_norm,))


class AdaptiveGradClip(_AbstractUnitwise):
    """Bounds the update of each unit by the size of its weights.

        u ↦ u·min(1, c·max(‖p‖, ε) / ‖u‖)   with the norms of one unit

    A unit is one output of a layer, with all the weights that lead to it, as `UnitwiseClip` has
    it: the layers of Equinox are known, other arrays are taken as Optax takes them, and `axis`
    says otherwise.

    Differs from Optax, which assumes inputs first everywhere, in Equinox's layers only: there the
    outputs come first.

    **Arguments:**

    - `clipping`: c, ≥ 0: the greatest ratio of the two norms; 0.01 in the paper for large batches.
    - `eps`: ε, ≥ 0: what lets weights leave zero.
    - `axis`: the axis or axes along which the numbers of one unit lie, in every array that this
        transform sees.

    ??? cite "Brock et al., [High-Performance Large-Scale Image Recognition Without
        Normalization](https://arxiv.org/abs/2102.06171), 2021"
    """

    clipping: Hyperparameter = hyperparameter(within="[0, inf]")
    eps: Hyperparameter = hyperparameter(1e-3, within="[0, inf)")
    axis: Axis | None = eqx.field(default=None, static=True)

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)
        now = self.at(context)

        def rule(axes, u, p, clipping, eps):
            # Of one unit one factor: what is divided is as small as the norms are.
            limit = clipping * jnp.maximum(_norms(axes, p), eps)
            return u * shrinking(_norms(axes, u), limit)

        return self._map_units(rule, (updates, params), (now.clipping, now.eps))


def _norms(axes: tuple[int, ...], x: Array) -> Array:
    return tree.root(jnp.sum(tree.abs_squared(x), axes, keepdims=True))
