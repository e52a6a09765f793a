"""Momentum and exponential moving averages."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.fields.schedule import AbstractSchedule
from ...tree.moments import bias_factors, with_newest
from ...tree.paths import dotted
from ...tree.types import Hyperparameter, Params, Tracer
from .._base import AbstractRule, AbstractTransform, advise_keywords, chain
from ..shaping.descent import ScaleByLearningRate


class TraceState(eqx.Module):
    """The state of `Trace`."""

    trace: PyTree[Inexact[Array, "..."]] = fields.param_like()


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

    decay: fields.Number = fields.hyperparameter(within="[0, 1]")
    nesterov: bool = eqx.field(default=False, static=True)
    accumulator_dtype: np.dtype | None = fields.dtype_field()

    def init(self, params: Params) -> TraceState:
        return TraceState(first_moment(self, params, "decay", dtype="accumulator_dtype"))

    def advance(self, g, leaf):
        leaf.trace = g + self.decay * leaf.trace

    def direction(self, g, leaf):
        return g + self.decay * leaf.trace if self.nesterov else leaf.trace


class EmaState(eqx.Module):
    """The state of `Ema`."""

    age: Int[Array, "*leaves"] | None = fields.per_leaf()
    """`None` unless `debias` is set."""
    ema: PyTree[Inexact[Array, "..."]] = fields.param_like()


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

    decay: fields.Number = fields.hyperparameter(within="[0, 1)")
    debias: bool = eqx.field(default=True, static=True)
    accumulator_dtype: np.dtype | None = fields.dtype_field()
    nesterov: bool = eqx.field(default=False, static=True, kw_only=True)

    def init(self, params: Params) -> EmaState:
        return EmaState(
            age=tree.fresh_count() if self.debias else None,
            ema=first_moment(self, params, "decay", dtype="accumulator_dtype"),
        )

    def begin(self, state):
        self.c = 1 - self.decay
        self.from_ema, self.from_g = (self.decay, self.c) if self.nesterov else (None, None)
        if state.age is not None:
            age = state.age = tree.increment(state.age)
            self.from_ema, self.from_g = bias_factors(self.decay, age, self.nesterov)

    def advance(self, g, leaf):
        leaf.ema = self.decay * leaf.ema + self.c * g

    def direction(self, g, leaf):
        return with_newest(leaf.ema, g, self.from_ema, self.from_g)


def first_moment(
    rule: object, params: Params, decay: str, *, dtype: str = "mu_dtype", wide: bool = False
) -> PyTree:
    """Zeros for the mean of updates of a rule.

    **Arguments:**

    - `rule`: a transform.
    - `params`: the parameters.
    - `decay`: the name of its decay.
    - `dtype`: the name of the field with the dtype of the mean.
    - `wide`: whether the default is at least float32, for a mean that is subtracted from updates.

    **Returns:** a tree like the parameters.

    **Raises:** a `ValueError` if the decay is known, and too slow for the dtype.
    """
    chosen = getattr(rule, dtype, None)
    if wide and chosen is None:
        return tree.zeros_like(params, tree.accumulation_dtype)
    mean = tree.first_moment(params, chosen)
    value = getattr(rule, decay)
    if not isinstance(value, AbstractSchedule | Tracer):
        _check_decay(f"{type(rule).__name__}.{decay}", float(value), mean, dtype)
    return mean


def _check_decay(name: str, decay: float, mean: PyTree, field: str) -> None:
    # Half the distance between two neighbors. What changes by less is rounded back.
    least = {x.dtype: float(jnp.finfo(x.dtype).eps) / 2 for x in jax.tree.leaves(mean)}
    if decay == 1 or all(1 - decay >= change for change in least.values()):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(mean):
        if 1 - decay < least[x.dtype]:
            raise ValueError(
                f"{name} is {decay:.7g}. The mean of '{dotted(path)}' would be stored in "
                f"{x.dtype}, and would round back to its old value instead of decaying: "
                f'{x.dtype} allows at most {1 - least[x.dtype]:.6g}. Write `{field}="float32"`.'
            )


def momentum_if_any(
    momentum: Hyperparameter | None, nesterov: bool, accumulator_dtype: Any = None
) -> tuple[AbstractTransform, ...]:
    """The link of the momentum, or nothing where there is none."""
    if momentum is not None:
        return (Trace(momentum, nesterov, accumulator_dtype),)
    if nesterov:
        raise ValueError(
            "`nesterov=True` has no effect without momentum. Pass `momentum=0.9` too, or leave it "
            "out."
        )
    return ()


@advise_keywords
def sgd(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter | None = None,
    nesterov: bool = False,
    accumulator_dtype: Any | None = None,
) -> AbstractTransform:
    """Stochastic gradient descent, with or without momentum.

        p ↦ p − η·g,   or with momentum   p ↦ p − η·tₙ,   tₙ = g + γ·tₙ₋₁

    With `nesterov` the step is η·(g + γ·tₙ).

    **Arguments:**

    - `learning_rate`: η.
    - `momentum`: γ, in [0, 1]. Defaults to no momentum.
    - `nesterov`: whether to use Nesterov momentum.
    - `accumulator_dtype`: the dtype of the momentum; complex parameters use its complex
        counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters.

    **Returns:** a chain of `Trace`, if there is momentum, and `ScaleByLearningRate`.

    ```python
    >>> sl.sgd(0.1, momentum=0.9)
    sl.Trace(0.9) | sl.ScaleByLearningRate(0.1)

    ```
    """
    links = momentum_if_any(momentum, nesterov, accumulator_dtype)
    return chain(*links, ScaleByLearningRate(learning_rate))
