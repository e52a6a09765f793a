"""Step sizes that follow the signs of successive gradients: Rprop."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PyTree

from ... import fields, tree
from ..._core.protocol.chain import chain
from ..._core.protocol.context import Context
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...tree.paths import dotted
from ...tree.types import Hyperparameter, Params
from ..shaping.scale import Scale


class ScaleByRpropState(eqx.Module):
    """The state of `ScaleByRprop`."""

    step_sizes: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    signs: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The signs of the last gradients; 0 after a change of sign."""


class ScaleByRprop(AbstractRule[ScaleByRpropState]):
    """Rprop: a step size per element, which grows while the gradient keeps its sign.

        sₜ = sign(gₜ)·sign(gₜ₋₁)
        ηₜ = η₊·ηₜ₋₁ where s = 1,   η₋·ηₜ₋₁ where s = −1,   ηₜ₋₁ where s = 0
        uₜ = ηₜ·sign(gₜ),   but 0 where s = −1, and gₜ then counts as 0 in the next step

    η stays between `min_step_size` and `max_step_size`. Use full batches: the noise of small ones
    changes signs.

    Differs from Optax, which returns the update of the previous step, and 0 in the first. Here the
    update belongs to this step, as in the paper and in PyTorch.

    **Arguments:**

    - `learning_rate`: η₀, the initial step size, > 0; later changes have no effect.
    - `eta_minus`: η₋, in (0, 1).
    - `eta_plus`: η₊, > 1.
    - `min_step_size`: the smallest step size, > 0.
    - `max_step_size`: the largest step size, > 0.

    ??? cite "Riedmiller & Braun, A direct adaptive method for faster backpropagation learning,
        1993; Igel & Hüsken, Improving the Rprop learning algorithm, 2000 (iRprop−)"
    """

    learning_rate: fields.Number = fields.hyperparameter(within="(0, inf)")
    eta_minus: fields.Number = fields.hyperparameter(0.5, within="(0, 1)")
    eta_plus: fields.Number = fields.hyperparameter(1.2, within="(1, inf)")
    min_step_size: fields.Number = fields.hyperparameter(1e-6, within="(0, inf)")
    max_step_size: fields.Number = fields.hyperparameter(50.0, within="(0, inf)")

    keeps_zeros: ClassVar[bool] = True
    written_last: ClassVar[tuple[str, ...]] = ("signs",)

    def init(self, params: Params) -> ScaleByRpropState:
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if jnp.iscomplexobj(x):
                raise TypeError(
                    f"ScaleByRprop compares signs, and the parameter '{dotted(path)}' is complex. "
                    "Use `.split_complex()`, which passes it real and imaginary parts."
                )
        start = self.at(Context(step=0)).learning_rate
        return ScaleByRpropState(
            step_sizes=tree.second_moment(params, None, start),
            signs=tree.zeros_like(params),
        )

    def advance(self, g, leaf):
        sign = jnp.sign(g)
        # The product of two small gradients could underflow to 0.
        s = sign * leaf.signs
        factor = jnp.where(s > 0, self.eta_plus, self.eta_minus)
        new_size = jnp.clip(leaf.step_sizes * factor, self.min_step_size, self.max_step_size)
        leaf.step_sizes = jnp.where(s == 0, leaf.step_sizes, new_size)
        leaf.signs = jnp.where(s < 0, 0, sign)

    def direction(self, g, leaf):
        return leaf.step_sizes * leaf.signs


@advise_keywords
def rprop(
    learning_rate: Hyperparameter,
    eta_minus: Hyperparameter = 0.5,
    eta_plus: Hyperparameter = 1.2,
    min_step_size: Hyperparameter = 1e-6,
    max_step_size: Hyperparameter = 50.0,
) -> AbstractTransform:
    """Rprop: a step size for each element, which grows while the gradient keeps its sign.

        p ↦ p − ηₜ·sign(gₜ)

    It shrinks when the sign flips.

    Differs from Optax, which applies each update one step later: see `ScaleByRprop`.

    **Arguments:**

    - `learning_rate`: the initial step size, > 0. Later changes of it have no effect.
    - `eta_minus`, `eta_plus`, `min_step_size`, `max_step_size`: as in `ScaleByRprop`.

    **Returns:** a chain of `ScaleByRprop` and `Scale`.

    ??? cite "Riedmiller & Braun, A direct adaptive method for faster backpropagation learning,
        1993; Igel & Hüsken, Improving the Rprop learning algorithm, 2000 (iRprop−)"
    """
    rule = ScaleByRprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size)
    return chain(rule, Scale(-1.0))
