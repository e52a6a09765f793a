"""Values that fall when the loss does not."""

from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._core.fields import Hyperparameter, hyperparameter, steps
from .._core.schedule import AbstractStatefulSchedule
from .._types import Scalar, Step
from ..tree.dtypes import as_canonical, canonical_float


class ReduceOnPlateauState(eqx.Module):
    """What `ReduceOnPlateau` remembers."""

    scale: Float[Array, "*runs"]
    """The product of the factors so far."""
    best_value: Float[Array, "*runs"]
    """The least mean loss so far."""
    plateau_count: Int[Array, "*runs"]
    """How many means in a row were no improvement."""
    cooldown_count: Int[Array, "*runs"]
    """How many means are still to be waited for after a reduction."""
    count: Int[Array, "*runs"]
    """How many losses are in the present mean."""
    avg_value: Float[Array, "*runs"]
    """The present mean."""


class ReduceOnPlateau(AbstractStatefulSchedule):
    """A value that is multiplied by a factor when the loss has not fallen for some time.

    The loss, or its mean over `accumulation_size` steps, is an improvement where it is less than
    best − rtol·|best| − atol. After `patience` means in a row that are none, and again each time,

        value ← max(factor·value, min_scale·init_value)

    Then `cooldown` means are let pass before it counts again. For `.drive`, fed by `value`:

    ```python
    >>> plateau = sl.schedules.ReduceOnPlateau(1e-3, factor=0.5, patience=5)
    >>> tx = sl.adam(1e-3).drive({"learning_rate": plateau})

    ```

    Differs from Optax: it gives the value itself, from `init_value` on, not a factor of updates;
    and in the improvement that rtol asks for, which is not negative for negative losses.

    **Arguments:**

    - `init_value`: the value at first.
    - `factor`: by which it is multiplied, in (0, 1).
    - `patience`: how many means without improvement are waited for, ≥ 1.
    - `rtol`: the improvement relative to the best mean, in [0, 1].
    - `atol`: the absolute improvement, ≥ 0.
    - `cooldown`: how many means do not count after a reduction, ≥ 0.
    - `accumulation_size`: how many losses make a mean, ≥ 1.
    - `min_scale`: the least value, as a part of `init_value`, in [0, 1].
    """

    init_value: Hyperparameter = hyperparameter()
    factor: Hyperparameter = hyperparameter(0.1, within="(0, 1)")
    patience: Step = steps(10, within="[1, inf)")
    rtol: Hyperparameter = hyperparameter(1e-4, within="[0, 1]")
    atol: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    cooldown: Step = steps(0)
    accumulation_size: Step = steps(1, within="[1, inf)")
    min_scale: Hyperparameter = hyperparameter(0.0, within="[0, 1]")

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
        mean = state.avg_value + (as_canonical(context.value) - state.avg_value) / as_canonical(
            count
        )
        full = count >= jnp.asarray(self.accumulation_size, jnp.int32)

        best = state.best_value
        # Of the first, infinite, best no part can be taken.
        part = jnp.where(jnp.isinf(best), 0, as_canonical(self.rtol) * jnp.abs(best))
        improved = mean < best - part - as_canonical(self.atol)

        cooling = state.cooldown_count > 0
        waited = jnp.where(improved | cooling, 0, state.plateau_count + 1)
        reduced = ~cooling & (waited >= jnp.asarray(self.patience, jnp.int32))
        lower = jnp.maximum(state.scale * as_canonical(self.factor), as_canonical(self.min_scale))
        cooldown = jnp.where(
            reduced,
            jnp.asarray(self.cooldown, jnp.int32),
            jnp.maximum(state.cooldown_count - 1, 0),
        )
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
