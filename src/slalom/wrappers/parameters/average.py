"""Averages of the parameters."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.protocol.bases import AbstractParameterWriter
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer
from ...schedules.averages import power_average
from ...tree.types import Gradients, Params
from .project import refuse_projected


class AverageState(eqx.Module):
    """The state of `Average`."""

    inner: PyTree
    """The inner transform's state."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    """The number of averaged steps."""
    average: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")
    """The average. Before the first step, the initial parameters."""


class Average(AbstractWrapper[AverageState], AbstractParameterWriter[AverageState]):
    """The inner transform, and an average of the parameters that it produces.

    Made by `tx.average`, which describes the arguments.

    The average does not change the steps. For parameters p₁, p₂, … it is

        aₜ = aₜ₋₁ + wₜ·(pₜ − aₜ₋₁)

    With a decay d the weights are wₜ = (1 − d) / (1 − dᵗ), which is an exponential average of the
    steps so far. With `debias=False` they are wₜ = 1 − d, and the average starts at the initial
    parameters, a₀ = p₀. With `sl.schedules.power_average` they are wₜ = 1 − (1 − 1/t)^(γ + 1), even
    with `debias=True`, since this average needs no correction. Without a decay they are wₜ = 1/t,
    which is the mean of all steps. The average is stored in at least float32.
    `opt.eval_params(model)` returns the model with the average. If the inner transform skips steps,
    as `.every_k` does, only its updates count.

    ??? cite "Polyak & Juditsky, [Acceleration of stochastic approximation by
        averaging](https://doi.org/10.1137/0330046), 1992; Kingma & Ba, [Adam: A Method for
        Stochastic Optimization](https://arxiv.org/abs/1412.6980), 2014, for the exponential
        average"
    """

    passes_gradients: ClassVar[bool] = True
    over: ClassVar[str] = "tree"

    decay: fields.OptionalNumber = fields.hyperparameter(None, within="[0, 1)")
    debias: bool = eqx.field(default=True, static=True)

    def __check_init__(self):
        refuse_projected(self.inner, ".average(...)")

    def init(self, params: Params) -> AverageState:
        return AverageState(
            age=tree.fresh_count(),
            average=tree.copy(params, tree.accumulation_dtype),
            inner=self.inner.init(params),
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, AverageState]:
        params, state, context = self.demand("params", here.params), here.state, here.context
        result, inner = self.inner_part(here).run(write, updates)

        def take_in(average: PyTree, age: Array) -> tuple[Any, Any]:
            # Here, since the operands of a conditional are written to memory.
            new_params = context.constrained(write.new_params(params, result))
            age = tree.increment(age)
            now = SimpleNamespace(weight=self._weight(age, context))

            def rule(now, a, p):
                return tree.moved(a, p, now.weight)

            new = tree.map_leaves(rule, (average, new_params), now)
            return tree.cast_like(new, average), age

        wrote = self.inner.has_updated(inner)
        if wrote is True:
            average, age = take_in(state.average, state.age)
        else:
            average, age = jax.lax.cond(
                wrote, take_in, lambda *same: same, state.average, state.age
            )
        return result, AverageState(inner, age, average)

    def _weight(self, age: Int[Array, "*leaves"], context: Context) -> Array:
        """The weight of the newest parameters."""
        if isinstance(self.decay, power_average):
            return self.decay.newest_weight(age)
        decay = self.at(context).decay
        if decay is None:
            return 1 / age.astype(tree.canonical_float())
        return tree.newest_weight(decay, age) if self.debias else 1 - decay

    def eval_params(self, here: Part) -> Params:
        return tree.copy(here.state.average)
