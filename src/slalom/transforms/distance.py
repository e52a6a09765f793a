"""Transforms that find the step size from the distance gone: DoG."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like, per_param
from .._core.transform import AbstractTransform, Context
from .._types import Params, Updates
from .scale import sign_of


class ScaleByDistanceOverGradientsState(eqx.Module):
    """What `ScaleByDistanceOverGradients` remembers."""

    max_dist: PyTree[Float[Array, ""]] = per_param()
    grad_sum_of_squares: PyTree[Float[Array, ""]] = per_param()
    init_params: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleByDistanceOverGradients(AbstractTransform):
    """DoG, layer by layer: a step as long as the way gone, over the gradients seen.

        rₜ = max(rₜ₋₁, ‖pₜ − p₀‖)   with   r₋₁ = r·(1 + ‖p₀‖)
        Gₜ = Gₜ₋₁ + ‖gₜ‖²
        uₜ = s·rₜ / √(Gₜ + ε) · gₜ

    with the norms of one leaf, which is what the paper calls a layer. It replaces a learning
    rate: `sl.ScaleByDistanceOverGradients() | sl.Scale(-1.0)` descends. Its authors recommend to
    evaluate an average of the parameters: `.average()`.

    Differs from Optax: p₀ is kept in the parameters' own dtype, which holds it exactly, and not
    in float32; of complex parameters the distance is that of the absolute values.

    **Arguments:**

    - `reps_rel`: r, the first step in proportion to the parameter, > 0; 1e-4 in models with batch
        norm, else 1e-6.
    - `eps`: ε, > 0.
    - `param_dtype`: how p₀ is stored; the parameter's own dtype without it.
    - `global_scale`: s; −1 to descend without a further link.

    ??? cite "Ivgi et al., [DoG is SGD's Best Friend](https://arxiv.org/abs/2302.12022), 2023
        (L-DoG)"
    """

    reps_rel: Hyperparameter = hyperparameter(1e-6, within="(0, inf)")
    eps: Hyperparameter = hyperparameter(1e-8, within="(0, inf)")
    param_dtype: np.dtype | None = dtype_field()
    global_scale: Hyperparameter = hyperparameter(1.0)

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByDistanceOverGradientsState:
        tree.check_inexact(params)
        first = self.at(Context(step=0)).reps_rel
        return ScaleByDistanceOverGradientsState(
            max_dist=tree.map_leaves(lambda p, r: r * (1 + tree.norm(p)), (params,), (first,)),
            grad_sum_of_squares=jax.tree.map(_zero, params),
            init_params=tree.copy(params, self._stored),
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByDistanceOverGradientsState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByDistanceOverGradientsState]:
        params = self.demand("params", params)
        now = self.at(context)

        def rule(g, p, start, before, seen, eps, scale):
            distance = jnp.maximum(before[0], tree.norm(p - start))
            total = seen[0] + jnp.sum(tree.abs_squared(g))
            return g * (scale * distance * jax.lax.rsqrt(total + eps)), distance, total

        updates, distance, total = tree.map_leaves(
            rule,
            (updates, params, state.init_params),
            (now.eps, now.global_scale),
            per_param=(_alone(state.max_dist), _alone(state.grad_sum_of_squares)),
        )
        return updates, ScaleByDistanceOverGradientsState(
            tree.cast_like(distance, state.max_dist),
            tree.cast_like(total, state.grad_sum_of_squares),
            state.init_params,
        )

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.global_scale),) * len(jax.tree.leaves(params))

    def _stored(self, own: Any) -> np.dtype:
        return own if self.param_dtype is None else tree.storage_dtype(own, self.param_dtype)


def _zero(x: Any) -> Array:
    return jnp.zeros((), tree.real_dtype(tree.accumulation_dtype(tree.canonical(x.dtype))))


def _alone(numbers: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (x,), numbers)
