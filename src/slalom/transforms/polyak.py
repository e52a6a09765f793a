"""A step size from the loss: Polyak."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from .. import tree
from .._core.context import Context
from .._core.fields import Hyperparameter, hyperparameter
from .._core.stateless import AbstractStatelessTransform
from .._types import Params, Updates
from ..tree.dtypes import as_float


class ScaleByPolyak(AbstractStatelessTransform):
    """Polyak's step size: scales updates by the gap between the loss and its minimum.

        u ↦ u·min((f − f*) / (‖u‖² + ε), η_max)

    f is the loss of this step: pass `value=` to `opt.step`, or use `sl.train_step`. A loss below
    f* reverses the step in the variant `"sps"`, and stops it in `"sps+"`, where the gap is at least
    0. Zero updates stay zero.

    Differs from Optax, which scales updates only if ‖u‖² > 2e-16. Here all nonzero updates are
    scaled.

    **Arguments:**

    - `f_min`: f*, a lower bound of the loss.
    - `max_learning_rate`: η_max, > 0, may be infinite.
    - `eps`: ε, ≥ 0.
    - `variant`: `"sps"` or `"sps+"`.

    ??? cite "Loizou et al., [Stochastic Polyak Step-size for
        SGD](https://arxiv.org/abs/2002.10542), 2020"
    """

    f_min: Hyperparameter = hyperparameter(0.0)
    max_learning_rate: Hyperparameter = hyperparameter(1.0, within="(0, inf]")
    eps: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    variant: str = eqx.field(default="sps", static=True)

    needs: ClassVar[tuple[str, ...]] = ("value",)
    keeps_zeros: ClassVar[bool] = True

    def __check_init__(self):
        if self.variant not in ("sps", "sps+"):
            raise ValueError(
                f"ScaleByPolyak.variant must be 'sps' or 'sps+', got {self.variant!r}."
            )

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params
        value = as_float(self.demand("value", None if context is None else context.value))
        now = self.at(context)
        norm = tree.global_norm(updates)
        dtype = tree.accumulation_dtype(norm.dtype, value.dtype)
        value, norm, f_min, max_learning_rate, eps = (
            jnp.asarray(x, dtype) for x in (value, norm, now.f_min, now.max_learning_rate, now.eps)
        )
        gap = value - f_min
        if self.variant == "sps+":
            gap = jnp.maximum(gap, 0)
        divisor = jnp.square(norm) + eps
        zero = divisor == 0
        factor = jnp.minimum(gap / jnp.where(zero, 1, divisor), max_learning_rate)
        return tree.scale(updates, jnp.where(zero, 0, factor))
