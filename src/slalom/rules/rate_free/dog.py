"""One step size for all leaves from the distance traveled: DoG and DoWG."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from .._base import AbstractRule, AbstractTransform, Context, advise_keywords, chain
from ..shaping.descent import ScaleByLearningRate, decayed
from ..shaping.scale import sign_of
from ._sums import bounded, number


class ScaleByDogState(eqx.Module):
    """The state of `ScaleByDog`."""

    max_dist: Float[Array, ""] = fields.until_reset()
    sum_sq_norm_grads: Float[Array, ""] = fields.until_reset()
    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class ScaleByDog(AbstractRule[ScaleByDogState]):
    """DoG: the distance traveled over the root of the sum of squared gradients.

        rₜ = max(rₜ₋₁, ‖pₜ − p₀‖),   Gₜ = Gₜ₋₁ + ‖gₜ‖²
        uₜ = rₜ / √(Gₜ + ε) · gₜ

    with r₋₁ = r·(1 + ‖p₀‖). The norms are those of all leaves together that this transform sees, so
    under `.partition` each group has its own step size; `sl.ScaleByDistanceOverGradients` applies
    the rule to each leaf separately. It replaces a learning rate:
    `sl.ScaleByDog() | sl.Scale(-1.0)` descends. The authors recommend evaluating an average of the
    parameters: `.average()`.

    Sums are stored in at least float32, and p₀ in the parameter's own dtype, which is exact. The
    square of a huge norm stays finite, so later steps do not vanish.

    **Arguments:**

    - `init_step`: r, which determines the first step, > 0. The paper uses 1e-4 for models with
        batch normalization and 1e-6 for others.
    - `eps`: ε, ≥ 0.
    - `init_step_type`: the meaning of r. `"heuristic"` is the formula above; `"distance"` means r₋₁
        = r; with `"learning_rate"` the first step is u = r·g, and r₋₁ = 0.

    ??? cite "Ivgi et al., [DoG is SGD's Best Friend](https://arxiv.org/abs/2302.12022), 2023"
    """

    init_step: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    init_step_type: str = fields.choice_field("heuristic", "distance", "learning_rate")

    over: ClassVar[str] = "sums"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True
    metric_fields: ClassVar[tuple[str, ...]] = ("max_dist",)

    def init(self, params: Params) -> ScaleByDogState:
        tree.check_inexact(params)
        dtype = tree.sum_dtype(params)
        first = self.at(Context(step=0)).init_step
        if self.init_step_type == "heuristic":
            norm = tree.global_norm(params)
            first = number(first, norm) * (1 + norm)
        elif self.init_step_type == "learning_rate":
            first = 0 * first
        return ScaleByDogState(jnp.array(first, dtype), jnp.zeros((), dtype), tree.copy(params))

    def measure(self, g, leaf):
        return squares(g, self.p - leaf.init_params)

    def finish(self, sums, state):
        distance = tree.root(bounded(sums["distance"]))
        state.max_dist = tree.running_maximum(state.max_dist, distance)
        before = state.sum_sq_norm_grads
        squares = state.sum_sq_norm_grads = tree.bounded(before + bounded(sums["square"]))
        self.factor = state.max_dist / tree.root(tree.positive(squares + self.eps))
        if self.init_step_type == "learning_rate":
            # While all gradients were zero, nothing has moved.
            self.factor = jnp.where(before == 0, self.init_step, self.factor)

    def direction(self, g, leaf):
        return g * self.factor


def squares(g: Array, way: Array) -> dict[str, Array]:
    """The squares of the distance traveled and of the gradient."""
    distance = jnp.sum(tree.abs_squared(way))
    return {"distance": distance, "square": jnp.sum(tree.abs_squared(g))}


@advise_keywords
def dog(
    learning_rate: Hyperparameter = 1.0,
    init_step: Hyperparameter = 1e-6,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter | None = None,
    decay_where: WhereLike | None = None,
    *,
    init_step_type: str = "heuristic",
) -> AbstractTransform:
    """DoG: the distance traveled over the root of the sum of squared gradients.

        p ↦ p − η·r / √(G + ε)·g

    r is the distance traveled, and G the sum of ‖g‖².

    With weight decay, g is the gradient plus λ·p. The authors recommend evaluating an average of
    the parameters: `sl.dog().average()`.

    **Arguments:**

    - `learning_rate`: η, a factor of the step size; 1 in the paper.
    - `init_step`, `eps`: as in `ScaleByDog`.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `init_step_type`: as in `ScaleByDog`.

    **Returns:** a chain of `AddDecayedWeights`, if there is a decay, `ScaleByDog` and
    `ScaleByLearningRate`.

    ??? cite "Ivgi et al., [DoG is SGD's Best Friend](https://arxiv.org/abs/2302.12022), 2023"
    """
    links = [] if weight_decay is None else [decayed(weight_decay, decay_where)]
    return chain(
        *links, ScaleByDog(init_step, eps, init_step_type), ScaleByLearningRate(learning_rate)
    )


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
            grad_sum_of_squares=jax.tree.map(lambda p: jnp.zeros((), tree.sum_dtype(p)), params),
            init_params=tree.copy(params, self._start_dtype),
        )

    def measure(self, g, leaf):
        return {"distance": tree.NormOf(self.p - leaf.init_params)}

    def finish(self, sums, state):
        self.distance = sums.each("distance")

    def advance(self, g, leaf):
        leaf.max_dist = tree.running_maximum(leaf.max_dist, self.distance)
        square = jnp.sum(tree.abs_squared(g))
        leaf.grad_sum_of_squares = tree.bounded(leaf.grad_sum_of_squares + square)

    def direction(self, g, leaf):
        inverse = jax.lax.rsqrt(leaf.grad_sum_of_squares + self.eps)
        return g * (self.global_scale * leaf.max_dist * inverse)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.global_scale),) * len(jax.tree.leaves(params))

    def _start_dtype(self, dtype: np.dtype) -> np.dtype:
        return dtype if self.param_dtype is None else tree.storage_dtype(dtype, self.param_dtype)
