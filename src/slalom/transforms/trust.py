"""Transforms that size the update of each leaf by the size of the parameter there."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from .. import tree
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import Context
from .._types import Params, Updates


class ScaleByTrustRatio(AbstractStatelessTransform):
    """Gives the update of each leaf a norm in proportion to the parameter's.

        u ↦ u·c·‖p‖ / (‖u‖ + ε)   with the norms of one leaf, each at least `min_norm`

    Where one of the two norms is 0 the update is kept as it is, so that parameters that start at
    zero can leave it. Norms are summed in at least float32.

    **Arguments:**

    - `min_norm`: the least value of both norms, ≥ 0.
    - `trust_coefficient`: c, ≥ 0.
    - `eps`: ε, ≥ 0.

    ??? cite "You et al., [Large Batch Training of Convolutional
        Networks](https://arxiv.org/abs/1708.03888), 2017"
    """

    min_norm: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    trust_coefficient: Hyperparameter = hyperparameter(1.0, within="[0, inf)")
    eps: Hyperparameter = hyperparameter(0.0, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)
        now = self.at(context)

        def rule(u, p, min_norm, coefficient, eps):
            of_update = jnp.maximum(tree.norm(u), min_norm)
            of_param = jnp.maximum(tree.norm(p), min_norm)
            zero = (of_update == 0) | (of_param == 0)
            ratio = coefficient * of_param / jnp.where(zero, 1, of_update + eps)
            return u * jnp.where(zero, 1, ratio)

        return tree.map_leaves(
            rule, (updates, params), (now.min_norm, now.trust_coefficient, now.eps)
        )


class ScaleByParamBlockNorm(AbstractStatelessTransform):
    """Multiplies the update of each leaf by the parameter's norm: u ↦ u·max(‖p‖, s).

    **Arguments:**

    - `min_scale`: s, ≥ 0; what lets a parameter leave zero.
    """

    min_scale: Hyperparameter = hyperparameter(1e-3, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)

        def rule(u, p, min_scale):
            return u * jnp.maximum(tree.norm(p), min_scale)

        return tree.map_leaves(rule, (updates, params), (self.at(context).min_scale,))


class ScaleByParamBlockRMS(AbstractStatelessTransform):
    """Multiplies the update of each leaf by the parameter's root mean square.

        u ↦ u·max(√(mean |p|²), s)

    **Arguments:**

    - `min_scale`: s, ≥ 0; what lets a parameter leave zero.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """

    min_scale: Hyperparameter = hyperparameter(1e-3, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)

        def rule(u, p, min_scale):
            return u * jnp.maximum(tree.rms(p), min_scale)

        return tree.map_leaves(rule, (updates, params), (self.at(context).min_scale,))


class ScaleByFromage(AbstractStatelessTransform):
    """Fromage's step: descends, then shrinks what descent alone would make grow.

        p + u' = (p − η·u) / √(1 + η²)

    With ‖u‖ = ‖p‖, as `ScaleByTrustRatio` makes it, and u orthogonal to p the norm of p is kept.
    It is a last link, with the sign and the learning rate inside.

    **Arguments:**

    - `learning_rate`: η.

    ??? cite "Bernstein et al., [On the distance between two neural networks and the stability of
        learning](https://arxiv.org/abs/2002.03432), 2020"
    """

    learning_rate: Hyperparameter = hyperparameter()

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)
        rate = self.at(context).learning_rate
        square = jnp.square(rate)
        root = jnp.sqrt(1 + square)
        # 1/√(1 + η²) − 1 without cancellation: subtracted, 3 digits are left at η = 0.01.
        shrink = -square / (root * (1 + root))

        def rule(u, p, rate, shrink):
            return shrink * p - rate * u

        return tree.map_leaves(rule, (updates, params), (rate / root, shrink))

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (-1,) * len(jax.tree.leaves(params))
