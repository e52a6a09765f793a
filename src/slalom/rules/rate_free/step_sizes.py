"""Step sizes from the distance traveled, DoG, and from the loss, Polyak's."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from .._base import AbstractRule, AbstractTransform, Context, State, advise_keywords, chain
from ..shaping.descent import ScaleByLearningRate, decayed
from ..shaping.scale import sign_of
from ._sums import bounded, number


class ScaleByDogState(eqx.Module):
    """The state of `ScaleByDog`."""

    max_dist: Float[Array, ""] = fields.until_reset()
    sum_sq_norm_grads: Float[Array, ""] = fields.until_reset()
    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class AbstractByDistance(AbstractRule[State]):
    """One step size for all leaves, from the distance traveled and the gradients."""

    over: ClassVar[str] = "sums"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def measure(self, g: Array, leaf: Any) -> dict[str, Array]:
        distance = jnp.sum(tree.abs_squared(self.p - leaf.init_params))
        return {"distance": distance, "square": jnp.sum(tree.abs_squared(g))}


class ScaleByDog(AbstractByDistance[ScaleByDogState]):
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


class ScaleByPolyak(AbstractRule[None]):
    """Polyak's step size: scales updates by the gap between the loss and its minimum.

        u ↦ u·min((f − f*) / (‖u‖² + ε), η_max)

    f is the loss of this step: pass `value=` to `opt.step`, or use `sl.train_step`. A loss below
    f* reverses the step in the variant `"sps"`, and stops it in `"sps+"`, where the gap is at least
    0. Zero updates stay zero.

    Differs from Optax, which scales updates only if ‖u‖² > 2e-16. Here all nonzero updates are
    scaled, even those whose ‖u‖² underflows or overflows.

    **Arguments:**

    - `f_min`: f*, a lower bound on the loss.
    - `max_learning_rate`: η_max, > 0, may be infinite.
    - `eps`: ε, ≥ 0.
    - `variant`: `"sps"` or `"sps+"`.

    ??? cite "Loizou et al., [Stochastic Polyak Step-size for
        SGD](https://arxiv.org/abs/2002.10542), 2020"
    """

    f_min: fields.Number = fields.hyperparameter(0.0)
    max_learning_rate: fields.Number = fields.hyperparameter(1.0, within="(0, inf]")
    eps: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    variant: str = fields.choice_field("sps", "sps+")

    over: ClassVar[str] = "sums"
    needs: ClassVar[tuple[str, ...]] = ("value",)
    keeps_zeros: ClassVar[bool] = True

    def measure(self, g, leaf):
        return {"norm": tree.NormOf(g), "square": jnp.sum(tree.abs_squared(g))}

    def finish(self, sums, state):
        gap = self.value - self.f_min
        if self.variant == "sps+":
            gap = jnp.maximum(gap, 0)
        zero = sums["norm"] == 0
        norm = jnp.where(zero, 1, sums["norm"])
        square = jnp.square(norm)
        # The length of the new update is (f − f*)·‖u‖ / (‖u‖² + ε), in which ‖u‖² may underflow.
        large_eps = self.eps > square
        length = jnp.where(
            large_eps,
            gap * (norm / jnp.where(large_eps, square + self.eps, 1)),
            tree.quotient(gap, norm + tree.quotient(jnp.where(large_eps, 0, self.eps), norm)),
        )
        length = jnp.minimum(length, self.max_learning_rate * norm)
        # As the formula is written, where nothing in it overflows or underflows.
        limits = jnp.finfo(norm.dtype)
        tiny, largest = float(limits.tiny), float(limits.max)
        usual = (sums["square"] > 1e10 * tiny) & (sums["square"] < largest)
        factor = gap / jnp.where(usual, sums["square"] + self.eps, 1)
        factor = jnp.minimum(factor, self.max_learning_rate)
        usual = usual & (jnp.abs(factor) > tiny)
        self.inverse = jnp.where(usual, 1, jnp.where(zero, 0, tree.quotient(1.0, norm)))
        self.length = jnp.where(usual, factor, length)

    def direction(self, g, leaf):
        return g * self.inverse * self.length


@advise_keywords
def polyak_sgd(
    max_learning_rate: Hyperparameter = 1.0,
    scaling: Hyperparameter = 1.0,
    f_min: Hyperparameter = 0.0,
    eps: Hyperparameter = 0.0,
    variant: str = "sps",
) -> AbstractTransform:
    """SGD with Polyak's step size.

        p ↦ p − s·min((f − f*) / (‖g‖² + ε), η_max)·g

    Each step needs the loss f: use `sl.train_step`, or pass `value=` to `opt.step`.

    Differs from Optax if s ≠ 1: Optax uses the norm of s·g, so a larger s makes the step smaller.

    **Arguments:**

    - `max_learning_rate`: η_max, > 0.
    - `scaling`: s.
    - `f_min`, `eps`, `variant`: as in `ScaleByPolyak`.

    **Returns:** a chain of `ScaleByPolyak` and `ScaleByLearningRate`.

    ??? cite "Loizou et al., [Stochastic Polyak Step-size for
        SGD](https://arxiv.org/abs/2002.10542), 2020"
    """
    return ScaleByPolyak(f_min, max_learning_rate, eps, variant) | ScaleByLearningRate(scaling)
