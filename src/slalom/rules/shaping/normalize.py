"""Transforms that normalize updates."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from ... import fields, tree
from ..._core.protocol.rule import AbstractRule
from ...tree.types import Params
from ...where.layout import LayoutLike
from .._layout import row_axes
from .scale import sign_of


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
