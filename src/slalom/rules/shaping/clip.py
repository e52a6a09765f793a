"""Transforms that clip or normalize updates."""

import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ... import fields, tree
from ...tree.types import Params, Scalar
from ...where.layout import LayoutLike
from .._base import AbstractRule
from .._layout import AbstractByLayout, row_axes, unit_axes
from .scale import sign_of


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
        norm = jnp.zeros((), tree.canonical_float())
        return ClipByGlobalNormState(norm) if self.delayed else None

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


class _AbstractUnitwise(AbstractByLayout[None]):
    """A rule that needs the axes of each unit."""

    clips: ClassVar[bool] = True

    def plans(self, params):
        return unit_axes(self, params)


class UnitwiseClip(_AbstractUnitwise):
    """Scales the update of each unit so that its norm is at most c: u ↦ u·min(1, c / ‖u‖).

    A unit is one output of a layer, with all the weights that lead to it. In Equinox's layers a
    unit is a row of a `Linear` (including those in `MultiheadAttention`), a `GRUCell` or an
    `LSTMCell`, the kernels of one output channel of a `Conv` or `ConvTranspose`, or a column of an
    `Embedding`, even when `eqx.filter_vmap` stacks these layers. A bias, a scale and any other
    vector is one unit. Other arrays follow Optax, where inputs come first: a unit lies along axis 0
    of an array with 2 or 3 axes, and along all axes but the last of one with 4 or 5. If such an
    array belongs to a module of your own, creating the optimizer warns about it. State the layout
    in its class: `__layout__ = {"weight": "oi"}`.

    **Arguments:**

    - `max_norm`: c, ≥ 0.
    - `layout`: the layout of arrays that would otherwise be read wrongly: a mapping from selectors
        to strings with a letter for each axis, such as `{sl.where.path("w"): "oi"}`, or one such
        string for all arrays. `sl.where.matrix` explains the letters.

    ??? cite "Brock et al., [High-Performance Large-Scale Image Recognition Without
        Normalization](https://arxiv.org/abs/2102.06171), 2021"
    """

    max_norm: fields.Number = fields.hyperparameter(within="[0, inf]")
    layout: LayoutLike = fields.layout_field()

    def direction(self, g, leaf):
        return g * clip_factor(tree.norm(g, self.plan), self.max_norm)


class AdaptiveGradClip(_AbstractUnitwise):
    """Clips the update of each unit relative to the norm of its weights.

        u ↦ u·min(1, c·max(‖p‖, ε) / ‖u‖)   with the norms of one unit

    A unit is one output of a layer, with all the weights that lead to it, as in `UnitwiseClip`.

    Differs from Optax in Equinox's layers, where outputs come first; Optax assumes that inputs
    come first everywhere.

    **Arguments:**

    - `clipping`: c, the largest ratio of the two norms, ≥ 0; 0.01 in the paper for large batches.
    - `eps`: ε, ≥ 0; lets weights leave zero.
    - `layout`: as for `UnitwiseClip`.

    ??? cite "Brock et al., [High-Performance Large-Scale Image Recognition Without
        Normalization](https://arxiv.org/abs/2102.06171), 2021"
    """

    clipping: fields.Number = fields.hyperparameter(within="[0, inf]")
    eps: fields.Number = fields.hyperparameter(1e-3, within="[0, inf)")
    layout: LayoutLike = fields.layout_field()

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def direction(self, g, leaf):
        # Not `tree.norm`, which would read them twice for sizes that weights do not have.
        size = tree.root(jnp.sum(tree.abs_squared(self.p), self.plan, keepdims=True))
        limit = self.clipping * jnp.maximum(size, self.eps)
        return g * clip_factor(tree.norm(g, self.plan), limit)


def clip_factor(size: Array, limit: Array | float) -> Array:
    """min(1, limit / size), or NaN if the size is not finite."""
    # `size <= limit` is false for a NaN. An infinite size, which may be a norm of finite updates
    # that no float holds, becomes NaN because a factor of 0 would silently stop the training.
    fits = size <= limit
    divisor = jnp.where(fits, 1, jnp.where(jnp.isinf(size), jnp.nan, size))
    return jnp.where(fits, 1, tree.quotient(limit, divisor))


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
    metric_fields: ClassVar[tuple[str, ...]] = ("z",)

    def init(self, params: Params) -> ZClipState:
        tree.no_state(params)
        zeros = (jnp.zeros((), tree.canonical_float()) for _ in range(3))
        return ZClipState(tree.fresh_count(), *zeros)

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
        new = self._moved(state, limit, is_warm)
        is_finite = jnp.isfinite(norm)
        for name, x in zip(("age", "mean", "std"), new, strict=True):
            setattr(state, name, jnp.where(is_finite, x, getattr(state, name)))

    def direction(self, g, leaf):
        return g * self.factor

    def _moved(self, state: Any, norm: Scalar, is_warm: Array) -> tuple[Array, Array, Array]:
        """The age, mean and standard deviation with one more norm."""
        age = tree.increment(state.age)
        n = age.astype(norm.dtype)
        weight = jnp.where(is_warm, 1 - self.decay, 1 / n)
        change = norm - state.mean
        # Both variances are (1 − w)·(σ² + f·d²), where d is the distance from the old mean.
        factor = jnp.where(is_warm, self.decay * (1 - self.decay), 1 / n)
        std = tree.root(1 - weight) * _hypot(state.std, tree.root(factor) * change)
        return age, state.mean + weight * change, std


def _hypot(a: Array, b: Array) -> Array:
    """√(a² + b²) without overflow of the squares."""
    largest = jnp.maximum(a, jnp.abs(b))
    scale = jnp.where(largest == 0, 1, largest)
    return scale * tree.root((a / scale) ** 2 + (b / scale) ** 2)


# --- normalized updates ----------------------------------------------------------------------


class Centralize(AbstractRule[None]):
    """Subtracts the mean of the weights of each output: u ↦ u − mean over the inputs.

    The inputs of a convolution include its kernel, and the layers of a stack are separate. In an
    embedding the vector of each token is centered. Leaves without inputs pass through unchanged:
    vectors, scalars, the weights of norms, and the biases of `eqx.nn.Conv`, whose shape is
    (outputs, 1, …). An array of unknown layout has its outputs on the first axis, as in Optax and
    PyTorch.

    Differs from Optax, where the updates of the biases of `eqx.nn.Conv` become zero.

    **Arguments:**

    - `layout`: the layout of arrays that would otherwise be read wrongly, as in `sl.where.matrix`.

    ??? cite "Yong et al., [Gradient Centralization](https://arxiv.org/abs/2004.01461), 2020"
    """

    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "leaf"
    keeps_zeros: ClassVar[bool] = True

    def plans(self, params):
        return row_axes(self, params)

    def direction(self, g, leaf):
        if math.prod(g.shape[a] for a in self.plan) <= 1:
            return g
        mean = jnp.mean(g, self.plan, keepdims=True)
        return g - jnp.broadcast_to(mean, g.shape)


class NormalizeByUpdateNorm(AbstractRule[None]):
    """Scales all updates by one factor to a fixed norm: u ↦ u·s / (‖u‖ + ε).

    The Euclidean norm is summed in at least float32 over all leaves that this transform sees. Zero
    updates stay zero, even with ε = 0.

    Differs from Optax where the sum of squares overflows or underflows: the norm is right there
    too. If the norm itself is not finite, the updates are NaN, which does not hide the error.

    **Arguments:**

    - `scale_factor`: s.
    - `eps`: ε, ≥ 0.
    """

    scale_factor: fields.Number = fields.hyperparameter(1.0)
    eps: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)")

    over: ClassVar[str] = "sums"
    keeps_zeros: ClassVar[bool] = True

    def measure(self, g, leaf):
        return {"norm": tree.NormOf(g)}

    def finish(self, sums, state):
        divisor = sums["norm"] + self.eps
        # The quotient s / (‖u‖ + ε) may overflow or underflow where the updates do not.
        self.inverse = 1 / jnp.where(divisor == 0, 1, divisor)

    def direction(self, g, leaf):
        return g * self.inverse * self.scale_factor

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.scale_factor),) * len(jax.tree.leaves(params))
