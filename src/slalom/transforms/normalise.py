"""Transforms that normalize updates."""

from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._types import Params, Updates
from .scale import sign_of


class Centralize(AbstractStatelessTransform):
    """Subtracts the mean of each row: u ↦ u − mean over all axes but the first.

    The first axis is that of the outputs in the weights of `eqx.nn.Linear` and `eqx.nn.Conv`, as
    in the paper. Leaves with one number per row pass through unchanged: vectors, scalars, and the
    biases of `eqx.nn.Conv`, whose shape is (outputs, 1, …).

    Differs from Optax, where the updates of such biases become zero.

    ??? cite "Yong et al., [Gradient Centralization](https://arxiv.org/abs/2004.01461), 2020"
    """

    keeps_zeros: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params, context

        def rule(_, u):
            if u.ndim < 2 or u.size <= u.shape[0]:
                return u
            mean = jnp.mean(u, axis=tuple(range(1, u.ndim)), keepdims=True)
            return u - jnp.broadcast_to(mean, u.shape)

        return tree.map_leaves(rule, (updates,))


class NormalizeByUpdateNorm(AbstractStatelessTransform):
    """Scales all updates by one factor to a fixed norm: u ↦ u·s / (‖u‖ + ε).

    The Euclidean norm is summed in at least float32 over all leaves that this transform sees. Zero
    updates stay zero, even with ε = 0.

    Differs from Optax where the sum of squares overflows or underflows: the norm is right there
    too. If the norm itself is not finite, the updates are NaN, which does not hide the error.

    **Arguments:**

    - `scale_factor`: s.
    - `eps`: ε, ≥ 0.
    """

    scale_factor: Hyperparameter = hyperparameter(1.0)
    eps: Hyperparameter = hyperparameter(1e-6, within="[0, inf)")

    keeps_zeros: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params
        now = self.at(context)
        norm = tree.scaled_norm(updates)
        divisor = norm + jnp.asarray(now.eps, norm.dtype)
        # The quotient s / (‖u‖ + ε) may overflow or underflow where the updates do not.
        to = SimpleNamespace(
            inverse=1 / jnp.where(divisor == 0, 1, divisor), factor=now.scale_factor
        )
        return tree.map_leaves(lambda to, u: u * to.inverse * to.factor, (updates,), to)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (sign_of(self.scale_factor),) * len(jax.tree.leaves(params))
