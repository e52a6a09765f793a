"""Clipping by the norm, relative to recent norms."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from ... import fields, tree
from ..._core.protocol.rule import AbstractRule
from ...tree.dtypes import canonical_float
from ...tree.types import Params, Scalar
from .clip import clip_factor


class ZClipState(eqx.Module):
    """The state of `ZClip`."""

    age: Int[Array, "*runs"] = fields.until_reset()
    """The number of finite norms so far."""
    mean: Scalar = fields.until_reset()
    """The mean of recent norms."""
    std: Scalar = fields.until_reset()
    """Their standard deviation."""
    z: Scalar = fields.until_reset()
    """The distance of the last norm from the mean, in standard deviations."""


class ZClip(AbstractRule[ZClipState]):
    """Scales all updates by one factor where their norm is high among recent norms.

    With the norm g, and the mean μ and standard deviation σ of the previous norms,

        z = (g − μ) / (σ + ε)
        c = μ + z₀²·σ / z   if z > z₀,   else g
        u ↦ u·c / g
        μ ← α·μ + (1 − α)·c
        σ² ← α·σ² + (1 − α)·(c − μ)²      with the new μ

    The first steps are not clipped, and μ and σ are the mean and the standard deviation of their
    norms. The norm is summed in at least float32. A norm that is not finite makes the updates not
    finite, and leaves μ and σ as they are. `opt.metrics` contains `z`.

    This is the "adaptive scaling" of the authors' code, which also clips by a fixed norm: write
    `sl.ZClip() | sl.ClipByGlobalNorm(1.0)`.

    **Arguments:**

    - `threshold`: z₀, > 0.
    - `decay`: α, in [0, 1).
    - `warmup_steps`: the number of first steps, an int ≥ 1.
    - `eps`: ε, ≥ 0.

    ??? cite "Kumar et al., [ZClip: Adaptive Spike Mitigation for LLM
        Pre-Training](https://arxiv.org/abs/2504.02507), 2025"
    """

    threshold: fields.Number = fields.hyperparameter(2.5, within="(0, inf]")
    decay: fields.Number = fields.hyperparameter(0.97, within="[0, 1)")
    warmup_steps: int = fields.count_field(25, least=1)
    eps: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)")

    over: ClassVar[str] = "sums"
    clips: ClassVar[bool] = True

    def init(self, params: Params) -> ZClipState:
        tree.no_state(params)
        return ZClipState(tree.fresh_count(), *(jnp.zeros((), canonical_float()) for _ in range(3)))

    def measure(self, g, leaf):
        return {"norm": tree.NormOf(g)}

    def finish(self, sums, state):
        norm = sums["norm"]
        is_warm = state.age >= self.warmup_steps
        above, unit = norm - state.mean, state.std + self.eps
        # Compared without a quotient: after equal norms, with ε = 0, any rise is high.
        is_high = is_warm & (above > self.threshold * unit)
        inverse = 1 / jnp.where(above == 0, 1, above)
        lowered = state.mean + self.threshold * state.std * (self.threshold * unit * inverse)
        z = above / jnp.where(unit == 0, 1, unit)
        limit = jnp.where(is_high, lowered, norm)
        self.factor = clip_factor(norm, limit)
        state.z = jnp.where(is_warm, z, 0)
        new = self._moved(state, limit, is_warm, self.decay)
        is_finite = jnp.isfinite(norm)
        for name, x in zip(("age", "mean", "std"), new, strict=True):
            setattr(state, name, jnp.where(is_finite, x, getattr(state, name)))

    def direction(self, g, leaf):
        return g * self.factor

    def _moved(
        self, state: Any, norm: Scalar, is_warm: Array, decay: Scalar
    ) -> tuple[Array, Array, Array]:
        """The age, mean and standard deviation with one more norm."""
        age = tree.increment(state.age)
        n = age.astype(norm.dtype)
        weight = jnp.where(is_warm, 1 - decay, 1 / n)
        change = norm - state.mean
        # Both variances are (1 − w)·(σ² + f·d²), where d is the distance from the old mean.
        factor = jnp.where(is_warm, decay * (1 - decay), 1 / n)
        std = tree.root(1 - weight) * _hypot(state.std, tree.root(factor) * change)
        return age, state.mean + weight * change, std

    def metrics(self, state: ZClipState) -> dict[str, Array]:
        return {"z": state.z}


def _hypot(a: Array, b: Array) -> Array:
    """√(a² + b²) without overflow of the squares."""
    largest = jnp.maximum(a, jnp.abs(b))
    scale = jnp.where(largest == 0, 1, largest)
    return scale * tree.root((a / scale) ** 2 + (b / scale) ** 2)
