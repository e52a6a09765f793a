"""Combinations that weigh losses without their gradients."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from .. import fields, tree
from .._core.fields.keys import AbstractKeyed, key_field
from ..tree.dtypes import canonical_float
from ._combination import AbstractCombination, Terms


def _as_weights(weights: Any) -> Any:
    if isinstance(weights, dict):
        raise TypeError(
            "Fixed.weights must be numbers in the order of the terms, such as `[1.0, 0.1]`, got a "
            "dict."
        )
    return jnp.asarray(weights, canonical_float())


class Fixed(AbstractCombination):
    """Fixed weights: w.

    They are an array of the optimizer, so that other weights do not recompile.

    **Arguments:**

    - `weights`: w, one real number per term, in the order of the terms.
    """

    weights: Float[Array, " terms"] = eqx.field(converter=_as_weights)

    uses_gram: ClassVar[bool] = False

    def check(self, number: int) -> None:
        if self.weights.shape != (number,):
            raise ValueError(
                f"Fixed.weights has shape {self.weights.shape}, and there are {number} terms."
            )

    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: Any
    ) -> tuple[Float[Array, " terms"], Any]:
        return self.weights, state


class ReLoBRaLoState(eqx.Module):
    """The state of `ReLoBRaLo`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next draw."""
    age: Int[Array, "*runs"] = fields.until_reset()
    """The number of steps with finite losses."""
    first: Float[Array, "*terms"] = fields.until_reset()
    """The losses of the first step."""
    last: Float[Array, "*terms"] = fields.until_reset()
    """The losses of the last step."""
    weights: Float[Array, "*terms"] = fields.until_reset()
    """The weights of the last step."""


class ReLoBRaLo(AbstractKeyed, AbstractCombination):
    """Larger weights for the terms that have fallen least, relative to a random earlier step.

    With λ̂(s) = K·softmax(L(t) / (T·L(s))) of the K losses L,

        w ← α·(ρ·w + (1 − ρ)·λ̂(0)) + (1 − α)·λ̂(t − 1)

    where ρ is 1 with the probability `rho`, else 0. The first weights are 1, and the second ones
    λ̂(0). A step with a loss that is not finite keeps the weights.

    **Arguments:**

    - `alpha`: α, in [0, 1].
    - `temperature`: T, > 0. A smaller one makes the weights differ more.
    - `rho`: the probability with which the old weights are kept instead of looking back to the
        first losses, in [0, 1].
    - `key`: the key of the draws, an int in [0, 2³¹), or a PRNG key.

    ??? cite "Bischof & Kraus, [Multi-Objective Loss Balancing for Physics-Informed Deep
        Learning](https://arxiv.org/abs/2110.09813), 2021"
    """

    alpha: fields.Number = fields.hyperparameter(0.999, within="[0, 1]")
    temperature: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")
    rho: fields.Number = fields.hyperparameter(1.0, within="[0, 1]")
    key: Any = key_field(default=0)

    uses_gram: ClassVar[bool] = False

    def init(self, number: int) -> ReLoBRaLoState:
        # Three arrays of their own, which can be donated.
        first, last, weights = (jnp.full(number, x, canonical_float()) for x in (1, 1, 1))
        key = self._fresh_key_data()
        return ReLoBRaLoState(key, tree.fresh_count(), first, last, weights)

    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: ReLoBRaLoState
    ) -> tuple[Float[Array, " terms"], ReLoBRaLoState]:
        losses = terms.losses
        number = losses.shape[0]
        is_finite = jnp.all(jnp.isfinite(losses))
        first = jnp.where(state.age == 0, losses, state.first)

        def relative_to(earlier: Array) -> Array:
            return number * jax.nn.softmax(losses / (now.temperature * earlier + 1e-12))

        key, drawn = jax.random.split(self._typed_key(state.key))
        keeps = jax.random.uniform(drawn, (), losses.dtype) < now.rho
        old = jnp.where(keeps, state.weights, relative_to(first))
        alpha = jnp.where(state.age == 1, 0, now.alpha)
        new = alpha * old + (1 - alpha) * relative_to(state.last)
        new = jnp.where(state.age == 0, 1, new)
        age, key = tree.increment(state.age), jax.random.key_data(key)
        moved = ReLoBRaLoState(key, age, first, losses, new)
        kept = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), moved, state)
        return kept.weights, kept
