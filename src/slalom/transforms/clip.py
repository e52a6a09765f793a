"""Transforms that bound updates."""

from typing import Any, ClassVar

import jax.numpy as jnp

from .. import tree
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import Context
from .._types import Params, Updates


class Clip(AbstractStatelessTransform):
    """Bounds each number of the updates: u ↦ min(max(u, −δ), δ).

    For complex leaves real and imaginary part are bounded each.

    **Arguments:**

    - `max_delta`: δ, ≥ 0.
    """

    max_delta: Hyperparameter = hyperparameter(within="[0, inf]")

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params

        def rule(u: Any, delta: Any) -> Any:
            if jnp.iscomplexobj(u):
                return jnp.clip(u.real, -delta, delta) + 1j * jnp.clip(u.imag, -delta, delta)
            return jnp.clip(u, -delta, delta)

        return tree.map_leaves(rule, (updates,), (self.at(context).max_delta,))


class ClipByGlobalNorm(AbstractStatelessTransform):
    """Scales all updates together so that their Euclidean norm is at most c: u ↦ u·min(1, c / ‖u‖).

    The norm is summed in at least float32 over all leaves that this transform sees: inside a
    mask or a group of a partition, over those of the mask or group. A norm that is not finite
    makes the updates not finite, so that it can be seen.

    **Arguments:**

    - `max_norm`: c, ≥ 0.

    ??? cite "Pascanu et al., [On the difficulty of training recurrent neural
        networks](https://arxiv.org/abs/1211.5063), 2012"
    """

    max_norm: Hyperparameter = hyperparameter(within="[0, inf]")

    keeps_zeros: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params
        norm = tree.global_norm(updates)
        max_norm = jnp.asarray(self.at(context).max_norm, norm.dtype)
        # One division of scalars: divided leaf by leaf, XLA would write the clipped updates to
        # memory.
        scale = shrinking(norm, max_norm)
        return tree.map_leaves(lambda u, s: u * s, (updates,), (scale,))


class ClipByBlockRms(AbstractStatelessTransform):
    """Scales the update of each leaf so that its root mean square is at most c.

        u ↦ u·min(1, c / rms(u))   with   rms(u) = √(mean |u|²)

    The mean is taken in at least float32. A root mean square that is not finite makes the update
    of that leaf not finite, so that it can be seen.

    **Arguments:**

    - `threshold`: c, ≥ 0.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """

    threshold: Hyperparameter = hyperparameter(within="[0, inf]")

    keeps_zeros: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params

        def rule(u: Any, threshold: Any) -> Any:
            return u * shrinking(tree.rms(u), threshold)

        return tree.map_leaves(rule, (updates,), (self.at(context).threshold,))


def shrinking(size: Any, limit: Any) -> Any:
    """The factor that brings a size down to a limit."""
    # Compared this way round, a NaN size is not mistaken for a small one; and an infinite one,
    # which may have overflowed from finite updates, not for a reason to stop.
    divisor = jnp.where(size == 0, 1, jnp.where(jnp.isinf(size), jnp.nan, size))
    return jnp.where(size <= limit, 1, limit / divisor)
