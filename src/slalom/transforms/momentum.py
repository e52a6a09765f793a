"""Transforms that follow a running direction."""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from .. import tree
from .._fields import Hyperparameter, dtype_field, hyperparameter, param_like
from .._transform import AbstractTransform, Context
from .._types import Params, Updates


class TraceState(eqx.Module):
    """What `Trace` remembers."""

    trace: PyTree[Inexact[Array, "..."]] = param_like()


class Trace(AbstractTransform):
    """Momentum: a decaying sum of updates.

        tₙ = gₙ + γ·tₙ₋₁,   uₙ = tₙ,   or, with `nesterov`,   uₙ = gₙ + γ·tₙ

    **Arguments:**

    - `decay`: γ, in [0, 1]; 0.9 is usual.
    - `nesterov`: whether to look ahead.
    - `accumulator_dtype`: how t is stored; the parameter's own dtype without it.

    ??? cite "Polyak, Some methods of speeding up the convergence of iteration methods, 1964;
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013"
    """

    decay: Hyperparameter = hyperparameter(within="[0, 1]")
    nesterov: bool = eqx.field(default=False, static=True)
    accumulator_dtype: np.dtype | None = dtype_field()

    def init(self, params: Params) -> TraceState:
        return TraceState(tree.first_moment(params, self.accumulator_dtype))

    def update(
        self,
        updates: Updates,
        state: TraceState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, TraceState]:
        del params

        def rule(g: Any, trace: Any, decay: Any) -> tuple[Any, Any]:
            trace = g + decay * trace
            return (g + decay * trace if self.nesterov else trace), trace

        updates, trace = tree.map_leaves(rule, (updates, state.trace), (self.at(context).decay,))
        return updates, TraceState(tree.cast_like(trace, state.trace))
