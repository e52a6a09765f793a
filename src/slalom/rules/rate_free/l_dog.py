"""A step size from the distance traveled: DoG."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ..._core.protocol.context import Context
from ..._core.protocol.rule import AbstractRule
from ...tree.dtypes import sum_dtype
from ...tree.types import Params
from ..shaping.scale import sign_of


class ScaleByDistanceOverGradientsState(eqx.Module):
    """The state of `ScaleByDistanceOverGradients`."""

    max_dist: PyTree[Float[Array, ""]] = fields.per_param()
    grad_sum_of_squares: PyTree[Float[Array, ""]] = fields.per_param()
    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class ScaleByDistanceOverGradients(AbstractRule[ScaleByDistanceOverGradientsState]):
    """Layer-wise DoG: the distance traveled over the root of the sum of squared gradients.

        rₜ = max(rₜ₋₁, ‖pₜ − p₀‖)   with   r₋₁ = r·(1 + ‖p₀‖)
        Gₜ = Gₜ₋₁ + ‖gₜ‖²
        uₜ = s·rₜ / √(Gₜ + ε) · gₜ

    The norms are taken of one leaf, which the paper calls a layer. It replaces a learning rate:
    `sl.ScaleByDistanceOverGradients() | sl.Scale(-1.0)` descends. The authors recommend evaluating
    an average of the parameters: `.average()`.

    Differs from Optax: p₀ is stored in the parameter's own dtype, which is exact, instead of
    float32; for complex parameters it is the norm of the absolute values.

    **Arguments:**

    - `reps_rel`: r, the length of the first step relative to the parameter's norm, > 0. The paper
        uses 1e-4 for models with batch normalization and 1e-6 for others.
    - `eps`: ε, > 0.
    - `param_dtype`: the dtype in which p₀ is stored. Defaults to the parameter's dtype.
    - `global_scale`: s; with −1 the rule descends without a further link.

    ??? cite "Ivgi et al., [DoG is SGD's Best Friend](https://arxiv.org/abs/2302.12022), 2023
        (L-DoG)"
    """

    reps_rel: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="(0, inf)")
    param_dtype: np.dtype | None = fields.dtype_field()
    global_scale: fields.Number = fields.hyperparameter(1.0)

    over: ClassVar[str] = "leaf"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByDistanceOverGradientsState:
        tree.check_inexact(params)

        def first_distance(now, p):
            return now.reps_rel * (1 + tree.norm(p))

        return ScaleByDistanceOverGradientsState(
            max_dist=tree.map_leaves(first_distance, (params,), self.at(Context(step=0))),
            grad_sum_of_squares=jax.tree.map(_zero, params),
            init_params=tree.copy(params, self._start_dtype),
        )

    def advance(self, g, leaf):
        leaf.max_dist = jnp.maximum(leaf.max_dist, tree.norm(self.p - leaf.init_params))
        square = jnp.sum(tree.abs_squared(g))
        leaf.grad_sum_of_squares = tree.bounded(leaf.grad_sum_of_squares + square)

    def direction(self, g, leaf):
        inverse = jax.lax.rsqrt(leaf.grad_sum_of_squares + self.eps)
        return g * (self.global_scale * leaf.max_dist * inverse)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.global_scale),) * len(jax.tree.leaves(params))

    def _start_dtype(self, own: Any) -> np.dtype:
        return own if self.param_dtype is None else tree.storage_dtype(own, self.param_dtype)


def _zero(x: Any) -> Array:
    return jnp.zeros((), sum_dtype(x))
