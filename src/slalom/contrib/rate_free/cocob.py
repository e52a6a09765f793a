"""Coin betting: COCOB."""

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
from ...rules.shaping.decay import decayed
from ...rules.shaping.scale import ScaleByLearningRate
from ...tree.types import Hyperparameter, Params
from ...where.resolve import WhereLike


class ScaleByCocobState(eqx.Module):
    """The state of `ScaleByCocob`."""

    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")
    cumulative_gradients: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The sum of the negative gradients."""
    scale: PyTree[Float[Array, "..."]] = fields.param_like("exact")
    """The largest absolute gradient."""
    subgradients: PyTree[Float[Array, "..."]] = fields.param_like("exact")
    """The sum of the absolute gradients."""
    reward: PyTree[Float[Array, "..."]] = fields.param_like("exact")


class ScaleByCocob(AbstractRule[ScaleByCocobState]):
    """COCOB: each element bets on the sign of its next gradient; no learning rate.

        Lₜ = max(Lₜ₋₁, |gₜ|),   Gₜ = Gₜ₋₁ + |gₜ|,   θₜ = θₜ₋₁ − gₜ
        Rₜ = max(Rₜ₋₁ − gₜ·(p − p₀), 0)
        p + uₜ = p₀ + θₜ·(Lₜ + Rₜ) / (Lₜ·max(Gₜ + Lₜ, α·Lₜ))

    with L₀ = ε. The first steps have the size 1/α. This is Algorithm 2 of the paper,
    COCOB-Backprop. Use this as the last link: the updates already descend. Complex numbers bet as
    vectors: |g| is the absolute value and g·(p − p₀) the real part of the inner product.

    The sums are stored in at least float32, and p₀ in the parameter's own dtype, which is exact.

    Differs from Optax, where the sums are stored in the parameter's dtype: in bfloat16 they stop
    growing after a few hundred steps.

    **Arguments:**

    - `alpha`: α, > 0; a larger one makes the first steps smaller.
    - `eps`: ε, > 0, the scale of the gradients before the first one.

    ??? cite "Orabona & Tommasi, [Training Deep Networks without Learning Rates Through Coin
        Betting](https://arxiv.org/abs/1705.07795), 2017"
    """

    alpha: fields.Number = fields.hyperparameter(100.0, within="(0, inf)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="(0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    update_sign: ClassVar[int | None] = -1

    def init(self, params: Params) -> ScaleByCocobState:
        eps = self.at(Context(step=0)).eps
        return ScaleByCocobState(
            init_params=tree.copy(params),
            cumulative_gradients=tree.zeros_like(params, tree.accumulation_dtype),
            scale=tree.second_moment(params, value=eps),
            subgradients=tree.second_moment(params),
            reward=tree.second_moment(params),
        )

    def advance(self, g, leaf):
        size, change = jnp.abs(g), self.p - leaf.init_params
        gain = (jnp.conj(g) * change).real if jnp.iscomplexobj(g) else g * change
        leaf.cumulative_gradients = leaf.cumulative_gradients - g
        leaf.scale = jnp.maximum(leaf.scale, size)
        leaf.subgradients = leaf.subgradients + size
        # XLA would move a last maximum with 0 into `direction`, which would read the old one.
        leaf.reward = jnp.maximum(leaf.reward, gain) - gain

    def direction(self, g, leaf):
        bound = jnp.maximum(leaf.subgradients + leaf.scale, self.alpha * leaf.scale)
        wealth = (leaf.scale + leaf.reward) / bound
        return (leaf.init_params - self.p) + leaf.cumulative_gradients / leaf.scale * wealth


@advise_keywords
def cocob(
    learning_rate: Hyperparameter = 1.0,
    alpha: Hyperparameter = 100.0,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """COCOB: each element bets on the sign of its next gradient, without a learning rate.

        p ↦ p₀ + θ·(L + R) / (L·max(G + L, α·L))

    L is the largest |g| so far, G the sum of |g|, θ that of −g, and R the reward.

    With weight decay, the gradient is g plus λ·p.

    **Arguments:**

    - `learning_rate`: a factor of the gradients; 1 in the paper. The step size does not depend on
        it as long as ε is small compared with the gradients; a schedule weights them.
    - `alpha`, `eps`: as in `ScaleByCocob`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `AddDecayedWeights`, `ScaleByLearningRate` and `ScaleByCocob`.

    ??? cite "Orabona & Tommasi, [Training Deep Networks without Learning Rates Through Coin
        Betting](https://arxiv.org/abs/1705.07795), 2017"
    """
    return chain(
        decayed(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate, flip_sign=False),
        ScaleByCocob(alpha, eps),
    )
