"""Transforms that clip updates."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from ... import fields, tree
from ..._core.protocol.rule import AbstractRule
from ...tree.dtypes import canonical_float
from ...tree.types import Params, Scalar


class Clip(AbstractRule[None]):
    """Clips each element of the updates: u ↦ min(max(u, −δ), δ).

    The real and imaginary parts of complex updates are clipped separately.

    **Arguments:**

    - `max_delta`: δ, ≥ 0.
    """

    max_delta: fields.Number = fields.hyperparameter(within="[0, inf]")

    keeps_zeros: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def direction(self, g, leaf):
        if jnp.iscomplexobj(g):
            return _clipped(g.real, self.max_delta) + 1j * _clipped(g.imag, self.max_delta)
        return _clipped(g, self.max_delta)


def _clipped(u: Array, limit: Scalar) -> Array:
    # `jnp.clip` has half the derivative with respect to a limit of 0.
    return jnp.where(u > limit, limit, jnp.where(u < -limit, -limit, u))


class ClipByGlobalNormState(eqx.Module):
    """The state of `ClipByGlobalNorm` with `delayed=True`."""

    norm: Scalar = fields.until_reset()
    """The last norm that was finite."""


class ClipByGlobalNorm(AbstractRule[ClipByGlobalNormState | None]):
    """Scales all updates by one factor so that their norm is at most c: u ↦ u·min(1, c / ‖u‖).

    The Euclidean norm is summed in at least float32 over all leaves that this transform sees:
    inside a mask or a group of a partition, over its leaves. A norm that is not finite makes the
    updates not finite, which does not hide the error.

    No update can be written before the norm of all is known, so all gradients are in memory at
    once. With `delayed=True` the factor comes from the norm of the previous step,

        uₜ ↦ uₜ·min(1, c / ‖uₜ₋₁‖)

    and each gradient can be freed as soon as its update is written. This bounds the norm only where
    it changes slowly. The first step is not clipped, so begin with a small learning rate. Neither
    is the first step of a spike; the step after it is made too short instead. A norm that is not
    finite is ignored, and the last finite one is used again. Steps that a wrapper around this
    transform skips do not count.

    **Arguments:**

    - `max_norm`: c, ≥ 0.
    - `delayed`: whether to use the norm of the previous step.

    ??? cite "Pascanu et al., [On the difficulty of training recurrent neural
        networks](https://arxiv.org/abs/1211.5063), 2012"
    """

    max_norm: fields.Number = fields.hyperparameter(within="[0, inf]")
    delayed: bool = eqx.field(default=False, static=True, kw_only=True)

    over: ClassVar[str] = "sums"
    keeps_zeros: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def init(self, params: Params) -> ClipByGlobalNormState | None:
        tree.no_state(params)
        return ClipByGlobalNormState(jnp.zeros((), canonical_float())) if self.delayed else None

    def measure(self, g, leaf):
        # `NormOf` may read the gradients again, so all of them would be kept until then.
        return {"norm": tree.norm(g) if self.delayed else tree.NormOf(g)}

    def finish(self, sums, state):
        if not self.delayed or state is None:
            self.factor = clip_factor(sums["norm"], self.max_norm)
            return
        self.factor = clip_factor(state.norm, self.max_norm)
        norm = tree.norm(sums.each("norm"))
        state.norm = jnp.where(jnp.isfinite(norm), norm, state.norm)

    def direction(self, g, leaf):
        # A factor, since XLA would write updates that were divided leaf by leaf to memory.
        return g * self.factor


class ClipByBlockRms(AbstractRule[None]):
    """Scales the update of each leaf so that its root mean square is at most c.

        u ↦ u·min(1, c / rms(u))   with   rms(u) = √(mean |u|²)

    The mean is taken in at least float32. A root mean square that is not finite makes the update
    of that leaf not finite, which does not hide the error.

    **Arguments:**

    - `threshold`: c, ≥ 0.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """

    threshold: fields.Number = fields.hyperparameter(within="[0, inf]")

    over: ClassVar[str] = "leaf"
    keeps_zeros: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def direction(self, g, leaf):
        return g * clip_factor(tree.rms(g), self.threshold)


def clip_factor(size: Any, limit: Any) -> Any:
    """min(1, limit / size), or NaN if the size is not finite."""
    # `size <= limit` is false for a NaN. An infinite size, which may be a norm of finite updates
    # that no float holds, becomes NaN because a factor of 0 would silently stop the training.
    divisor = jnp.where(size == 0, 1, jnp.where(jnp.isinf(size), jnp.nan, size))
    return jnp.where(size <= limit, 1, limit / divisor)
