"""Weight decay."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._types import Params, Updates
from .cautious import agreement


class AddDecayedWeights(AbstractStatelessTransform):
    """Adds weight decay to the updates: u ↦ u + λ·p.

    After the rule and before `ScaleByLearningRate`, as in `sl.adamw`, the decay is decoupled from
    the scale of the gradient and follows the learning rate: a step subtracts η·λ·p. Before the
    rule it is L2 regularization. To decay only some parameters, use `.mask(decay_where)`.

    **Arguments:**

    - `weight_decay`: λ, ≥ 0.
    - `cautious`: whether to decay only the entries that the update itself shrinks, those with
        Re(ū·p) > 0.

    ??? cite "Loshchilov & Hutter, [Decoupled Weight Decay
        Regularization](https://arxiv.org/abs/1711.05101), 2017; Chen et al., [Cautious Weight
        Decay](https://arxiv.org/abs/2510.12402), 2025"
    """

    weight_decay: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    cautious: bool = eqx.field(default=False, static=True, kw_only=True)

    needs: ClassVar[tuple[str, ...]] = ("params",)
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)

        def rule(now, u, p):
            decayed = u + now.weight_decay * p
            return jnp.where(agreement(u, p) > 0, decayed, u) if self.cautious else decayed

        return tree.map_leaves(rule, (updates, params), self.at(context))
