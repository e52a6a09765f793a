"""Momentum and exponential moving averages."""

import equinox as eqx
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import tree
from ..._core.fields.declare import Hyperparameter, dtype_field, hyperparameter
from ..._core.protocol.rule import AbstractRule
from ..._core.state.marks import param_like, per_leaf
from ...tree.types import Params
from ._first_moment import first_moment


class TraceState(eqx.Module):
    """The state of `Trace`."""

    trace: PyTree[Inexact[Array, "..."]] = param_like()


class Trace(AbstractRule[TraceState]):
    """Momentum: a decaying sum of updates.

        tₙ = gₙ + γ·tₙ₋₁,   uₙ = tₙ,   or, with `nesterov`,   uₙ = gₙ + γ·tₙ

    **Arguments:**

    - `decay`: γ, in [0, 1]; 0.9 is usual.
    - `nesterov`: whether to use Nesterov momentum.
    - `accumulator_dtype`: the floating dtype in which t is stored; complex parameters use its
        complex counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters.
        In bfloat16 decays above 0.996 are refused; unlike in Optax, so are complex dtypes.

    ??? cite "Polyak, Some methods of speeding up the convergence of iteration methods, 1964;
        Sutskever et al., On the importance of initialization and momentum in deep learning, 2013"
    """

    decay: Hyperparameter = hyperparameter(within="[0, 1]")
    nesterov: bool = eqx.field(default=False, static=True)
    accumulator_dtype: np.dtype | None = dtype_field()

    def init(self, params: Params) -> TraceState:
        return TraceState(first_moment(self, params, "decay", dtype="accumulator_dtype"))

    def advance(self, now, g, leaf):
        leaf.trace = g + now.decay * leaf.trace

    def direction(self, now, g, leaf):
        return g + now.decay * leaf.trace if self.nesterov else leaf.trace


class EmaState(eqx.Module):
    """The state of `Ema`."""

    age: Int[Array, "*leaves"] | None = per_leaf()
    """`None` unless `debias` is set."""
    ema: PyTree[Inexact[Array, "..."]] = param_like()


class Ema(AbstractRule[EmaState]):
    """Replaces updates by their exponential moving average.

        eₜ = γ·eₜ₋₁ + (1 − γ)·gₜ,   uₜ = eₜ,   or, with `debias`,   uₜ = eₜ / (1 − γᵗ)

    With `nesterov`, uₜ = γ·eₜ + (1 − γ)·gₜ, where `debias` divides eₜ by 1 − γᵗ⁺¹ and gₜ by 1 − γᵗ.
    Each leaf counts t from the start of its own average.

    **Arguments:**

    - `decay`: γ, in [0, 1); 0.9 is usual.
    - `debias`: whether to correct the bias towards the start at zero.
    - `accumulator_dtype`: the floating dtype in which e is stored; complex parameters use its
        complex counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters.
        In bfloat16 decays above 0.996 are refused; unlike in Optax, so are complex dtypes.
    - `nesterov`: whether to look ahead to the next average. Optax has this only inside other
        rules, such as `optax.contrib.scale_by_muon`.
    """

    decay: Hyperparameter = hyperparameter(within="[0, 1)")
    debias: bool = eqx.field(default=True, static=True)
    accumulator_dtype: np.dtype | None = dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)

    def init(self, params: Params) -> EmaState:
        return EmaState(
            age=tree.fresh_count() if self.debias else None,
            ema=first_moment(self, params, "decay", dtype="accumulator_dtype"),
        )

    def begin(self, now, state):
        now.c = 1 - now.decay
        now.from_ema, now.from_g = None, None
        if self.nesterov:
            now.from_ema, now.from_g = now.decay, now.c
        if state.age is not None:
            age = state.age = tree.increment(state.age)
            now.from_ema = tree.bias_correction(now.decay, age)
            if self.nesterov:
                now.from_g = now.c * now.from_ema
                now.from_ema = now.decay * tree.bias_correction(now.decay, tree.increment(age))

    def advance(self, now, g, leaf):
        leaf.ema = now.decay * leaf.ema + now.c * g

    def direction(self, now, g, leaf):
        if self.nesterov:
            return now.from_ema * leaf.ema + now.from_g * g
        return leaf.ema if now.from_ema is None else leaf.ema * now.from_ema
