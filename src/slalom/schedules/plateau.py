"""A schedule that decreases when the loss stops improving."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._core.fields.declare import Number, hyperparameter, steps
from .._core.fields.schedule import AbstractStatefulSchedule
from ..tree.dtypes import as_canonical, canonical_float
from ..tree.types import Scalar, Step
from ._common import as_step


class ReduceOnPlateauState(eqx.Module):
    """The state of `ReduceOnPlateau`."""

    scale: Float[Array, "*runs"]
    """The product of the factors so far."""
    best_value: Float[Array, "*runs"]
    """The lowest mean loss so far."""
    plateau_count: Int[Array, "*runs"]
    """The number of consecutive means without an improvement."""
    cooldown_count: Int[Array, "*runs"]
    """The number of means left in the cooldown."""
    count: Int[Array, "*runs"]
    """The number of losses in the current mean."""
    avg_value: Float[Array, "*runs"]
    """The current mean."""


class ReduceOnPlateau(AbstractStatefulSchedule):
    """Multiplies a value by a factor whenever the loss has stopped improving.

    The loss, or its mean over `accumulation_size` steps, is an improvement if it is below
    best − rtol·|best| − atol. After every `patience` consecutive means without an improvement,

        value ← max(factor·value, min_scale·init_value)

    and the next `cooldown` means do not count towards `patience`.

    This schedule is stateful: pass it to `.drive`, and pass the loss to every step as `value`.
    `sl.train_step` passes it for you.

    ```python
    >>> plateau = sl.schedules.ReduceOnPlateau(1e-3, factor=0.5, patience=5)
    >>> tx = sl.adam(1e-3).drive({"learning_rate": plateau})

    ```

    Differs from Optax: it returns the value itself, starting from `init_value`, instead of a
    factor for the updates. And the relative improvement uses |best|, so `rtol` works for negative
    losses too.

    **Arguments:**

    - `init_value`: the initial value.
    - `factor`: the factor of each reduction, in (0, 1).
    - `patience`: the number of consecutive means without an improvement before a reduction, ≥ 1.
    - `rtol`: the minimum improvement relative to the best mean, in [0, 1].
    - `atol`: the minimum absolute improvement, ≥ 0.
    - `cooldown`: the number of means after a reduction that do not count, ≥ 0.
    - `accumulation_size`: the number of losses in a mean, ≥ 1.
    - `min_scale`: a lower bound on the value, as a fraction of `init_value`, in [0, 1].
    """

    init_value: Number = hyperparameter()
    factor: Number = hyperparameter(0.1, within="(0, 1)")
    patience: Step = steps(10, within="[1, inf)")
    rtol: Number = hyperparameter(1e-4, within="[0, 1]")
    atol: Number = hyperparameter(0.0, within="[0, inf)")
    cooldown: Step = steps(0)
    accumulation_size: Step = steps(1, within="[1, inf)")
    min_scale: Number = hyperparameter(0.0, within="[0, 1]")

    needs: ClassVar[tuple[str, ...]] = ("value",)

    def init(self) -> ReduceOnPlateauState:
        dtype = canonical_float()
        return ReduceOnPlateauState(
            scale=jnp.ones((), dtype),
            best_value=jnp.full((), jnp.inf, dtype),
            plateau_count=jnp.zeros((), jnp.int32),
            cooldown_count=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            avg_value=jnp.zeros((), dtype),
        )

    def update(self, state: ReduceOnPlateauState, context: Any) -> ReduceOnPlateauState:
        count = state.count + 1
        change = as_canonical(context.value) - state.avg_value
        mean = state.avg_value + change / as_canonical(count)
        full = count >= as_step(self.accumulation_size)

        best = state.best_value
        # The best mean is infinite at first, and inf − inf would be NaN.
        margin = jnp.where(jnp.isinf(best), 0, as_canonical(self.rtol) * jnp.abs(best))
        improved = mean < best - margin - as_canonical(self.atol)

        cooling = state.cooldown_count > 0
        waited = jnp.where(improved | cooling, 0, state.plateau_count + 1)
        reduced = ~cooling & (waited >= as_step(self.patience))
        lower = jnp.maximum(state.scale * as_canonical(self.factor), as_canonical(self.min_scale))
        left = jnp.maximum(state.cooldown_count - 1, 0)
        cooldown = jnp.where(reduced, as_step(self.cooldown), left)
        return ReduceOnPlateauState(
            scale=jnp.where(full & reduced, lower, state.scale),
            best_value=jnp.where(full & improved, mean, best),
            plateau_count=jnp.where(full, jnp.where(reduced, 0, waited), state.plateau_count),
            cooldown_count=jnp.where(full, cooldown, state.cooldown_count),
            count=jnp.where(full, 0, count),
            avg_value=jnp.where(full, 0, mean),
        )

    def value(self, state: ReduceOnPlateauState) -> Scalar:
        return as_canonical(self.init_value) * state.scale
