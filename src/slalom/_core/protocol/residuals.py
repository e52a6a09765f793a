"""Losses whose curvature is known by rows, for Gauss–Newton rules.

A loss of outputs z (residuals, logits, log-amplitudes) is linearized as rows ρ and J with

    ∇f = Jᵀρ,   ∇²f ≈ JᵀJ

over the real parameters, of which a complex one counts as two. Such losses are in
`slalom/_loop/residual_losses/`: each returns blocks, and this file and `linearization.py`
are the same for all of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from ...tree.types import Scalar
from .linearization import AbstractBlock, Linearization


class Residuals(eqx.Module):
    """A loss as a function of the parameters, which can be linearized by rows.

    `loss_fn.on(*args)` makes it from a loss of `sl.LeastSquares`, `sl.OutputLoss` or
    `sl.VariationalEnergy` and its data. A transform that `needs` `"residuals"` finds it in
    `context.residuals`, as a function of the parameters that the transform sees.

    **Arguments:**

    - `blocks`: the parts of the loss.
    - `outward`: functions from the parameters to the model, which are called one after the other.
    """

    blocks: tuple[AbstractBlock, ...]
    outward: tuple[Callable[[Any], Any], ...] = eqx.field(default=(), static=True)
    searchable: bool = eqx.field(default=True, static=True)
    """Whether `value` is the loss at other parameters too."""
    known: Linearization | None = eqx.field(default=None, static=True)
    """The linearization at parameters where it has been computed."""

    def of(self, outward: Callable[[Any], Any]) -> "Residuals":
        """The same loss as a function of parameters that `outward` maps to these."""
        return dataclasses.replace(self, outward=(outward, *self.outward))

    def with_known(self, linear: Linearization) -> "Residuals":
        """The same loss, whose linearization at some parameters is known."""
        return dataclasses.replace(self, known=linear)

    def value(self, params: PyTree) -> Scalar:
        """The loss."""
        return Linearization(self.blocks, self.outward, params, None, linear=False).value

    def at(self, params: PyTree, chunk: int | None = None) -> Linearization:
        """The linearization at these parameters.

        **Arguments:**

        - `params`: the parameters.
        - `chunk`: the number of examples that are differentiated at a time. Defaults to all, and
            the Jacobian is then kept.
        """
        linear = self.known
        if linear is not None and linear.chunk == chunk and linear.is_at(params):
            return linear
        return Linearization(self.blocks, self.outward, params, chunk)
