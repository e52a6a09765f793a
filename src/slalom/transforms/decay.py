"""Weight decay."""

from typing import ClassVar

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._types import Params, Updates


class AddDecayedWeights(AbstractStatelessTransform):
    """Adds weight decay to the updates: u ↦ u + λ·p.

    After the rule and before `ScaleByLearningRate`, as in `sl.adamw`, the decay is decoupled from
    the scale of the gradient and follows the learning rate: a step subtracts η·λ·p. Before the
    rule it is L2 regularization. To decay only some parameters, use `.mask(decay_where)`.

    **Arguments:**

    - `weight_decay`: λ, ≥ 0.

    ??? cite "Loshchilov & Hutter, [Decoupled Weight Decay
        Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """

    weight_decay: Hyperparameter = hyperparameter(0.0, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)

        def rule(now, u, p):
            return u + now.weight_decay * p

        return tree.map_leaves(rule, (updates, params), self.at(context))
