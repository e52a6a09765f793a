"""DoWG: DoG with squared gradients that are weighted by the distance traveled."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ..._core.protocol.chain import chain
from ..._core.protocol.context import Context
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.messages import advise_keywords
from ...rules.rate_free._sums import bounded
from ...rules.rate_free.dog import squares
from ...rules.shaping.decay import decayed
from ...rules.shaping.scale import ScaleByLearningRate
from ...tree.dtypes import sum_dtype
from ...tree.types import Hyperparameter, Params
from ...where.resolve import WhereLike


class ScaleByDowgState(eqx.Module):
    """The state of `ScaleByDowg`."""

    estim_sq_dist: Float[Array, ""] = fields.until_reset()
    weighted_sq_norm_grads: Float[Array, ""] = fields.until_reset()
    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class ScaleByDowg(AbstractRule[ScaleByDowgState]):
    """DoWG: the squared distance traveled over the root of a weighted sum of squared gradients.

        Dₜ = max(Dₜ₋₁, ‖pₜ − p₀‖²),   Vₜ = Vₜ₋₁ + Dₜ·‖gₜ‖²
        uₜ = Dₜ / (√Vₜ + ε) · gₜ

    The norms are those of all leaves together that this transform sees, so under `.partition` each
    group has its own step size. It replaces a learning rate:
    `sl.contrib.ScaleByDowg() | sl.Scale(-1.0)` descends.

    Sums are stored in at least float32, and p₀ in the parameter's own dtype, which is exact. The
    square of a huge norm stays finite, so later steps do not vanish.

    **Arguments:**

    - `init_estim_sq_dist`: D₋₁, a guess of the squared distance to the solution, > 0. Defaults to
        ε. It should be too small rather than too large.
    - `eps`: ε, > 0.

    ??? cite "Khaled, Mishchenko & Jin, [DoWG Unleashed](https://arxiv.org/abs/2305.16284), 2023"
    """

    init_estim_sq_dist: fields.OptionalNumber = fields.hyperparameter(None, within="(0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-4, within="(0, inf)")

    over: ClassVar[str] = "sums"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByDowgState:
        tree.check_inexact(params)
        dtype = sum_dtype(params)
        now = self.at(Context(step=0))
        first = now.eps if now.init_estim_sq_dist is None else now.init_estim_sq_dist
        return ScaleByDowgState(jnp.array(first, dtype), jnp.zeros((), dtype), tree.copy(params))

    def measure(self, g, leaf):
        return squares(g, self.p - leaf.init_params)

    def finish(self, sums, state):
        distance = state.estim_sq_dist = jnp.maximum(state.estim_sq_dist, bounded(sums["distance"]))
        total = tree.bounded(state.weighted_sq_norm_grads + distance * bounded(sums["square"]))
        state.weighted_sq_norm_grads = total
        self.factor = distance / (tree.root(total) + self.eps)

    def direction(self, g, leaf):
        return g * self.factor

    def metrics(self, state: ScaleByDowgState) -> dict[str, Array]:
        return {"estim_sq_dist": state.estim_sq_dist}


@advise_keywords
def dowg(
    learning_rate: Hyperparameter = 1.0,
    init_estim_sq_dist: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-4,
    weight_decay: Hyperparameter | None = None,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """DoWG: the squared distance traveled over the root of a weighted sum of squared gradients.

        p ↦ p − η·D / (√V + ε)·g

    D is the squared distance traveled, and V the sum of D·‖g‖².

    With weight decay, g is the gradient plus λ·p.

    **Arguments:**

    - `learning_rate`: η, a factor of the step size; 1 in the paper.
    - `init_estim_sq_dist`, `eps`: as in `ScaleByDowg`.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `AddDecayedWeights`, if there is a decay, `ScaleByDowg` and
    `ScaleByLearningRate`.

    ??? cite "Khaled, Mishchenko & Jin, [DoWG Unleashed](https://arxiv.org/abs/2305.16284), 2023"
    """
    links = [] if weight_decay is None else [decayed(weight_decay, decay_where)]
    return chain(*links, ScaleByDowg(init_estim_sq_dist, eps), ScaleByLearningRate(learning_rate))
