"""Learning rates and weight decay: the last links of an optimizer."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.masks import mask
from ...where.resolve import Where, as_where_or_none
from .._base import AbstractRule, AbstractTransform
from .constrain import agreement


class ScaleByLearningRate(AbstractRule[None]):
    """Multiplies updates by the negative learning rate: u ↦ −η·u. The usual last link.

    **Arguments:**

    - `learning_rate`: η.
    - `flip_sign`: whether to multiply by −η. With `False` the factor is η, for use before a link
        that flips the sign.
    """

    learning_rate: fields.Number = fields.hyperparameter()
    flip_sign: bool = eqx.field(default=True, static=True, kw_only=True)

    sets_learning_rate: ClassVar[bool] = True

    keeps_zeros: ClassVar[bool] = True

    def direction(self, g, leaf):
        return g * (-self.learning_rate if self.flip_sign else self.learning_rate)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (-1 if self.flip_sign else 1,) * len(jax.tree.leaves(params))


class AddDecayedWeights(AbstractRule[None]):
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

    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    cautious: bool = eqx.field(default=False, static=True, kw_only=True)

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def direction(self, g, leaf):
        decayed = g + self.weight_decay * self.p
        return jnp.where(agreement(g, self.p) > 0, decayed, g) if self.cautious else decayed


class SubtractDecayedWeights(AbstractRule[None]):
    """Subtracts weight decay from the updates: u ↦ u − λ·p.

    After `ScaleByLearningRate`, or after a whole optimizer, the decay does not depend on the
    learning rate: each step subtracts λ·p, and a different learning rate does not need a different
    λ. The decay then also stays the same when a schedule lowers the learning rate, unless λ is a
    schedule of the same shape.

    ```python
    >>> tx = sl.adam(1e-3) | sl.SubtractDecayedWeights(1e-4).mask(sl.where.ndim(min=2))

    ```

    **Arguments:**

    - `weight_decay`: λ, ≥ 0. It is as small as the product of a learning rate and the λ of
        `AddDecayedWeights`.

    ??? cite "Wortsman et al., [Small-scale proxies for large-scale Transformer training
        instabilities](https://arxiv.org/abs/2309.14322), 2023 (independent weight decay)"
    """

    weight_decay: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def direction(self, g, leaf):
        return g - self.weight_decay * self.p


class AddDecayToInitialParamsState(eqx.Module):
    """The state of `AddDecayToInitialParams`."""

    init_params: PyTree[Inexact[Array, "..."]] = fields.param_like("copy")


class AddDecayToInitialParams(AbstractRule[AddDecayToInitialParamsState]):
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

    weight_decay: fields.Number = fields.hyperparameter(within="[0, inf)")

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def init(self, params: Params) -> AddDecayToInitialParamsState:
        return AddDecayToInitialParamsState(tree.copy(params))

    def direction(self, g, leaf):
        return g + self.weight_decay * (self.p - leaf.init_params)


def where_field() -> Any:
    """Declares an optional keyword, a selector; `None` selects all leaves."""
    return eqx.field(default=None, static=True, kw_only=True, converter=as_where_or_none)


def decay_mask(where: Where | None, params: Params) -> tuple[bool, ...]:
    """Whether each leaf decays."""
    if where is None:
        return (True,) * len(jax.tree.leaves(params))
    return mask(where, params)


def decayed(weight_decay: Hyperparameter, decay_where: WhereLike | None) -> AbstractTransform:
    """Weight decay of the selected parameters. `None` selects all of them."""
    return _on(AddDecayedWeights(weight_decay), decay_where)


def decayed_descent(
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter,
    decay_where: WhereLike | None,
    independent_decay: bool,
) -> AbstractTransform:
    """The last two links of an optimizer: weight decay, and a learning rate that scales it.

    An independent decay comes after the learning rate.
    """
    rate = ScaleByLearningRate(learning_rate)
    if independent_decay:
        return rate | _on(SubtractDecayedWeights(weight_decay), decay_where)
    return decayed(weight_decay, decay_where) | rate


def _on(link: AbstractTransform, where: WhereLike | None) -> AbstractTransform:
    return link if where is None else link.mask(where)
