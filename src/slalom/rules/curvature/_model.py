"""The linearized loss, and how well it predicts the loss."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import tree
from ..._core.protocol.linearization import Linearization
from ..._core.protocol.residuals import Residuals
from ...tree.types import Params, Scalar
from ._box import Box
from ._system import System

ROUNDINGS = 10.0
"""By how many roundings of the loss both decreases may be wrong (Conn, Gould & Toint, Trust-Region
Methods, 17.4.2)."""


class Outcome(NamedTuple):
    step: Array
    actual: Scalar
    predicted: Scalar
    ratio: Scalar


class Model(NamedTuple):
    """The linearized loss, and the loss."""

    params: Params
    x: Float[Array, " params"]
    """The parameters as a vector."""
    residuals: Residuals
    linear: Linearization
    system: System
    box: Box | None

    def outcome(self, step: Array, direction: Array, damping: Scalar) -> Outcome:
        """The loss after a step, against the model's along a direction."""
        linear, box, dtype = self.linear, self.box, self.linear.dtype
        if box is not None:
            step, direction = (box.clip(box.x + d) - self.x for d in (step, direction))
        there = tree.add(self.params, linear.updates(step))
        value = self.residuals.value(there).astype(dtype)
        along = linear.push(direction)
        if box is None:
            size = jnp.linalg.norm(self.system.diagonal * direction)
            predicted = jnp.vdot(along, along) / 2 + damping * size**2
        else:
            predicted = -jnp.vdot(box.gradient, direction) - jnp.vdot(along, along) / 2
        # NaN from a failed factorization counts as a rejection.
        actual = linear.value.astype(dtype) - value
        actual = jnp.where(jnp.isfinite(actual), actual, -jnp.inf)
        noise = ROUNDINGS * jnp.finfo(dtype).eps * jnp.abs(linear.value.astype(dtype))
        whole = predicted + noise
        ratio = jnp.where(whole > 0, (actual + noise) / jnp.where(whole > 0, whole, 1), -1)
        ratio = jnp.where(jnp.isfinite(ratio), ratio, -1)
        return Outcome(step, actual, predicted, ratio)
