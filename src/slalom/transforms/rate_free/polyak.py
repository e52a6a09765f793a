"""A step size from the loss: Polyak."""

from types import SimpleNamespace
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from ... import tree
from ..._core.fields.declare import Hyperparameter, hyperparameter
from ..._core.protocol.context import Context
from ..._core.protocol.stateless import AbstractStatelessTransform
from ...tree.dtypes import as_float
from ...tree.types import Params, Updates


class ScaleByPolyak(AbstractStatelessTransform):
    """Polyak's step size: scales updates by the gap between the loss and its minimum.

        u ↦ u·min((f − f*) / (‖u‖² + ε), η_max)

    f is the loss of this step: pass `value=` to `opt.step`, or use `sl.train_step`. A loss below
    f* reverses the step in the variant `"sps"`, and stops it in `"sps+"`, where the gap is at least
    0. Zero updates stay zero.

    Differs from Optax, which scales updates only if ‖u‖² > 2e-16. Here all nonzero updates are
    scaled, also those whose ‖u‖² underflows or overflows.

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
        norm = tree.scaled_norm(updates)
        dtype = tree.accumulation_dtype(norm.dtype, value.dtype)
        value, norm, f_min, max_learning_rate, eps = (
            jnp.asarray(x, dtype) for x in (value, norm, now.f_min, now.max_learning_rate, now.eps)
        )
        gap = value - f_min
        if self.variant == "sps+":
            gap = jnp.maximum(gap, 0)
        zero = norm == 0
        norm = jnp.where(zero, 1, norm)
        square = jnp.square(norm)
        # The length of the new update is (f − f*)·‖u‖ / (‖u‖² + ε), in which ‖u‖² may underflow.
        large_eps = eps > square
        length = jnp.where(
            large_eps,
            gap * (norm / jnp.where(large_eps, square + eps, 1)),
            gap / (norm + jnp.where(large_eps, 0, eps) / norm),
        )
        length = jnp.minimum(length, max_learning_rate * norm)
        # As the formula is written, where nothing in it overflows or underflows.
        sum_of_squares = jnp.asarray(tree.squared_norm(updates), dtype)
        tiny, largest = float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max)
        usual = (sum_of_squares > 1e10 * tiny) & (sum_of_squares < largest)
        factor = gap / jnp.where(usual, sum_of_squares + eps, 1)
        factor = jnp.minimum(factor, max_learning_rate)
        usual = usual & (jnp.abs(factor) > tiny)
        to = SimpleNamespace(
            inverse_norm=jnp.where(usual, 1, jnp.where(zero, 0, 1 / norm)),
            length=jnp.where(usual, factor, length),
        )
        return tree.map_leaves(lambda to, u: u * to.inverse_norm * to.length, (updates,), to)
