"""Weight decay."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PyTree

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, hyperparameter
from .._core.marks import param_like
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import AbstractTransform
from .._types import Params, Updates
from ..where.resolve import Where
from ._own_decay import decaying, where_field
from .cautious import agreement


class AddDecayedWeights(AbstractStatelessTransform):
    """Adds weight decay to the updates: u ↦ u + λ·p.

    After the rule and before `ScaleByLearningRate`, as in `sl.adamw`, the decay is decoupled from
    the scale of the gradient and follows the learning rate: a step subtracts η·λ·p. Before the
    rule it is L2 regularization. To decay only some parameters, use `.mask(decay_where)`. For a
    decay that does not follow the learning rate, see `SubtractDecayedWeights`.

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


class SubtractDecayedWeights(AbstractStatelessTransform):
    """Subtracts weight decay from the updates: u ↦ u − λ·p.

    After `ScaleByLearningRate`, or after a whole optimizer, the decay does not depend on the
    learning rate: each step subtracts λ·p, and another learning rate needs no other λ. The decay
    then also stays the same when a schedule lowers the learning rate, unless λ is a schedule of the
    same shape.

    ```python
    >>> tx = sl.adam(1e-3) | sl.SubtractDecayedWeights(1e-4).mask(sl.where.ndim(min=2))

    ```

    **Arguments:**

    - `weight_decay`: λ, ≥ 0. It is as small as the product of a learning rate and the λ of
        `AddDecayedWeights`.

    ??? cite "Wortsman et al., [Small-scale proxies for large-scale Transformer training
        instabilities](https://arxiv.org/abs/2309.14322), 2023 (independent weight decay)"
    """

    weight_decay: Hyperparameter = hyperparameter(0.0, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)

        def rule(now, u, p):
            return u - now.weight_decay * p

        return tree.map_leaves(rule, (updates, params), self.at(context))


class ScaleByLearningRateWithCorrectedDecay(AbstractStatelessTransform):
    """The last link of AdamC: a learning rate, and a decay that falls with its square.

        u ↦ −η·(u + λ·(η / η_max)·p)

    Weights in front of a normalization layer settle at a norm at which decay and gradient are in
    balance. If a schedule lowers η and the decay is η·λ, that norm falls, and the gradients grow
    near the end of training. With λ·η / η_max it stays the same. A constant η = η_max gives AdamW.

    **Arguments:**

    - `learning_rate`: η.
    - `max_learning_rate`: η_max, the largest value of the schedule, > 0.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    ??? cite "Defazio, [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025"
    """

    learning_rate: Hyperparameter = hyperparameter()
    max_learning_rate: Hyperparameter = hyperparameter(within="(0, inf)")
    weight_decay: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    decay_where: Where | None = where_field(kw_only=True)

    needs: ClassVar[tuple[str, ...]] = ("params",)
    elementwise: ClassVar[bool] = True
    sets_learning_rate: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        params = self.demand("params", params)
        now = self.at(context)
        now.decay = now.weight_decay * (now.learning_rate / now.max_learning_rate)

        def rule(now, u, decaying):
            return -now.learning_rate * sum((now.decay * p for p in decaying), u)

        return tree.map_leaves(
            rule, (updates,), now, per_param=(decaying(self.decay_where, params),)
        )

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (-1,) * len(jax.tree.leaves(params))

    def selectors(self) -> tuple[Where, ...]:
        return () if self.decay_where is None else (self.decay_where,)


class AddDecayToInitialParamsState(eqx.Module):
    """The state of `AddDecayToInitialParams`."""

    init_params: PyTree[Inexact[Array, "..."]] = param_like("exact")


class AddDecayToInitialParams(AbstractTransform[AddDecayToInitialParamsState]):
    """Adds decay towards the initial parameters to the updates: u ↦ u + λ·(p − p₀).

    This is L2-SP, for fine-tuning. In front of a rule it is the regularization λ/2·‖p − p₀‖² of the
    paper. After a rule and before `ScaleByLearningRate` it is decoupled from the scale of the
    gradient. A new layer has no values to return to: give it `AddDecayedWeights`.

    ```python
    >>> new = sl.where.path("head.**")
    >>> decay = sl.AddDecayToInitialParams(0.1).mask(~new) | sl.AddDecayedWeights(0.01).mask(new)
    >>> tx = sl.ScaleByAdam() | decay | sl.ScaleByLearningRate(1e-4)

    ```

    p₀ are the parameters at binding, or at the last reset, stored in their own dtype. A saved
    optimizer keeps them.

    **Arguments:**

    - `weight_decay`: λ, ≥ 0.

    ??? cite "Li, Grandvalet & Davoine, [Explicit Inductive Bias for Transfer Learning with
        Convolutional Networks](https://arxiv.org/abs/1802.01483), 2018"
    """

    weight_decay: Hyperparameter = hyperparameter(within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)
    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> AddDecayToInitialParamsState:
        return AddDecayToInitialParamsState(tree.copy(params))

    def update(
        self,
        updates: Updates,
        state: AddDecayToInitialParamsState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, AddDecayToInitialParamsState]:
        params = self.demand("params", params)

        def rule(now, u, p, start):
            return u + now.weight_decay * (p - start)

        return tree.map_leaves(rule, (updates, params, state.init_params), self.at(context)), state
