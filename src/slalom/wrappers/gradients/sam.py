"""Gradients at the worst point nearby."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ... import fields, tree
from ..._core.protocol.parts import Part
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer
from ...tree.types import Gradients, Params, Updates
from .loss import refuse_residuals


class Sam(AbstractWrapper[Any]):
    """Sharpness-aware minimization: the inner transform, with the gradient at the worst point
    nearby.

    Made by `tx.sam`, which describes the arguments.

    With the gradient g of the loss f at the parameters w, the inner transform gets

        ∇f(w + ε)   with   ε = ρ·g / ‖g‖,   or, with `adaptive`,   ε = ρ·|w|²·g / ‖|w|·g‖

    Norms are over all parameters that this transform acts on. The perturbed parameters are never
    stored. The second gradient is of the same batch, with the same PRNG keys, so a step costs two
    gradients, and the reported loss belongs to w.

    `sl.train_step` computes both gradients in one program, even with `microbatches`. By hand, pass
    the loss as a function of the model:
    `opt.step(model, grads, value_fn=lambda model: loss_fn(model, x, y))`.

    Other links belong inside, where they get the second gradient: `(clip | adam).sam(0.05)`. To
    accumulate, write `tx.every_k(4).sam(rho)`: each mini-batch has its own perturbation.

    With `.scale_loss`, write `tx.if_finite().sam(rho).scale_loss()`: the scale is chosen for the
    first gradient, and `.if_finite` skips a step whose second one overflows.

    Where the paper of the adaptive form adds 0.01 to |w|, this follows the usual implementations,
    which do not: parameters that are 0 are not perturbed. Differs from Optax: one optimizer takes
    all steps, instead of two that take turns.

    ??? cite "Foret et al., [Sharpness-Aware Minimization for Efficiently Improving
        Generalization](https://arxiv.org/abs/2010.01412), 2020; Kwon et al., [ASAM: Adaptive
        Sharpness-Aware Minimization](https://arxiv.org/abs/2102.11600), 2021"
    """

    needs: ClassVar[tuple[str, ...]] = ("params", "grad_fn")
    computes_gradient: ClassVar[bool] = True
    follows_loss: ClassVar[bool] = True

    rho: fields.Number = fields.hyperparameter(0.05, within="[0, inf)")
    adaptive: bool = eqx.field(default=False, static=True)
    every: int = fields.count_field(1)

    def __check_init__(self):
        refuse_residuals(self.inner, ".sam")

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        params, context = self.demand("params", here.params), here.context
        self.demand("grad_fn", context.grad_fn or context.value_fn)
        now = self.at(context)

        def at_worst_point(updates: Updates) -> Updates:
            worst = tree.add(params, self._perturbation(now, updates, params))
            return tree.cast_like(context.gradient(worst), updates)

        if self.every == 1:
            updates = at_worst_point(updates)
        else:
            due = self.demand("step", context.step) % self.every == 0
            updates = jax.lax.cond(due, at_worst_point, lambda same: same, updates)
        return self.inner_part(here).run(write, updates)

    def _perturbation(self, now: SimpleNamespace, grads: Updates, params: Params) -> Updates:
        def scaled(_, g, p):
            return jnp.abs(p) * g

        measured = tree.map_leaves(scaled, (grads, params)) if self.adaptive else grads
        norm = tree.global_norm(measured)
        factor = tree.quotient(jnp.asarray(now.rho, norm.dtype), jnp.where(norm == 0, 1, norm))

        def rule(now, g, p):
            return now.factor * (g * tree.bounded_square(p) if self.adaptive else g)

        return tree.map_leaves(rule, (grads, params), SimpleNamespace(factor=factor))
