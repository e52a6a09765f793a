"""An average of the parameters beside the parameters."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, hyperparameter
from .._core.marks import param_like, per_leaf
from .._core.transform import AbstractTransform
from .._core.wrapper import AbstractWrapper
from .._core.write import Write
from .._core.writer import AbstractParameterWriter
from .._types import Gradients, Params
from ..tree.dtypes import canonical_float
from ..tree.means import moved


class AverageState(eqx.Module):
    """What `Average` remembers."""

    inner: Any
    """The inner transform's state."""
    age: Int[Array, "*leaves"] = per_leaf()
    """How many parameters were averaged."""
    average: PyTree[Inexact[Array, "..."]] = param_like()
    """Their average; before the first step, the parameters at the start."""


class Average(AbstractWrapper[AverageState], AbstractParameterWriter[AverageState]):
    """The inner transform, and beside it an average of the parameters it makes.

    Made with `tx.average(decay)`; it changes no step. Of the parameters p₁, p₂, … the average is

        aₜ = aₜ₋₁ + wₜ·(pₜ − aₜ₋₁)

    with wₜ = (1 − d) / (1 − dᵗ) under a decay d: an exponential average of what was seen so far;
    with `debias=False` wₜ = 1 − d, an average that starts at the first parameters, a₀ = p₀; and
    without a decay wₜ = 1/t, the mean of all. It is kept in at least float32.
    `opt.eval_params(model)` gives the model with it. Where the inner transform is paced, as by
    `.every_k`, only the steps that it emits count.

    **Arguments:**

    - `inner`: the transform.
    - `decay`: d, in [0, 1), or `None`.
    - `debias`: whether p₀ has no part in an exponential average.

    ??? cite "Polyak & Juditsky, [Acceleration of stochastic approximation by
        averaging](https://doi.org/10.1137/0330046), 1992; Kingma & Ba, [Adam: A Method for
        Stochastic Optimization](https://arxiv.org/abs/1412.6980), 2014, for the exponential one"
    """

    fluent_method: ClassVar[str | None] = "average"

    inner: AbstractTransform
    decay: Hyperparameter | None = hyperparameter(None, within="[0, 1)")
    debias: bool = eqx.field(default=True, static=True)

    def init(self, params: Params) -> AverageState:
        return AverageState(
            age=tree.fresh_count(),
            average=tree.copy(params, tree.accumulation_dtype),
            inner=self.inner.init(params),
        )

    def run(
        self,
        write: Write,
        updates: Gradients,
        state: AverageState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, AverageState]:
        params = self.demand("params", params)
        result, inner = self.inner_part(state, context, params).run(write, updates)
        new_params = write.new_params(params, result)
        return result, self._averaged(new_params, inner, state, context)

    def _averaged(
        self, params: Params, inner: Any, state: AverageState, context: Context | None
    ) -> AverageState:
        def take_in(average: Any, age: Any) -> tuple[Any, Any]:
            age = tree.increment(age)
            weight = self._weight(age, context)
            now = SimpleNamespace(weight=weight)

            def rule(now, a, p):
                return moved(a, p, now.weight)

            new = tree.map_leaves(rule, (average, params), now)
            return tree.cast_like(new, average), age

        wrote = self.inner.has_updated(inner)
        if wrote is True:
            average, age = take_in(state.average, state.age)
        else:
            average, age = jax.lax.cond(
                wrote, take_in, lambda average, age: (average, age), state.average, state.age
            )
        return AverageState(inner, age, average)

    def _weight(self, age: Int[Array, "*leaves"], context: Context | None) -> Array:
        """How much the newest parameters weigh."""
        decay = self.at(context).decay
        if decay is None:
            return 1 / age.astype(canonical_float())
        if self.debias:
            return tree.newest_weight(decay, age)
        return jnp.broadcast_to(1 - decay, age.shape)

    def eval_params(self, state: AverageState, params: Params) -> Params:
        del params
        return tree.copy(state.average)
