"""Transforms that follow a running direction."""

import math
from typing import Any, ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform, Context
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

    elementwise: ClassVar[bool] = True

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
        decay = self.at(context).decay

        def added(g: Any, trace: Any, decay: Any) -> Any:
            return g + decay * trace

        trace = tree.map_leaves(added, (updates, state.trace), (decay,), like=(state.trace,))
        if self.nesterov:
            updates = tree.map_leaves(added, (updates, trace), (decay,))
        else:
            updates = tree.widened(trace)
        return updates, TraceState(trace)


class EmaState(eqx.Module):
    """What `Ema` remembers."""

    age: Int[Array, "*leaves"] | None = per_leaf()
    """Only with `debias`."""
    ema: PyTree[Inexact[Array, "..."]] = param_like()


class Ema(AbstractTransform):
    """Replaces updates by their exponential moving average.

        eₜ = γ·eₜ₋₁ + (1 − γ)·gₜ,   uₜ = eₜ,   or, with `debias`,   uₜ = eₜ / (1 − γᵗ)

    The power t is the age of a leaf's own average.

    **Arguments:**

    - `decay`: γ, in [0, 1); 0.9 is usual.
    - `debias`: whether to correct for the start at zero.
    - `accumulator_dtype`: how e is stored; the parameter's own dtype without it.
    """

    decay: Hyperparameter = hyperparameter(within="[0, 1)")
    debias: bool = eqx.field(default=True, static=True)
    accumulator_dtype: np.dtype | None = dtype_field()

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> EmaState:
        return EmaState(
            age=tree.fresh_age() if self.debias else None,
            ema=tree.first_moment(params, self.accumulator_dtype),
        )

    def update(
        self,
        updates: Updates,
        state: EmaState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, EmaState]:
        del params
        decay = self.at(context).decay
        age = None if state.age is None else tree.increment(state.age)
        scales = () if age is None else (tree.bias_correction(decay, age),)

        def mean(g, ema, decay, rest):
            return decay * ema + rest * g

        def update(ema, *scales):
            return math.prod(scales, start=ema)

        ema = tree.map_leaves(
            mean, (updates, state.ema), (decay, tree.complement(decay)), like=(state.ema,)
        )
        return tree.map_leaves(update, (ema,), (), scales), EmaState(age, ema)
