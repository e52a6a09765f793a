"""A step size from the loss: Polyak."""

from typing import ClassVar

import jax.numpy as jnp

from ... import fields, tree
from ...tree.types import Hyperparameter
from .._base import AbstractRule, AbstractTransform, advise_keywords
from ..shaping.descent import ScaleByLearningRate


class ScaleByPolyak(AbstractRule[None]):
    """Polyak's step size: scales updates by the gap between the loss and its minimum.

        u ↦ u·min((f − f*) / (‖u‖² + ε), η_max)

    f is the loss of this step: pass `value=` to `opt.step`, or use `sl.train_step`. A loss below
    f* reverses the step in the variant `"sps"`, and stops it in `"sps+"`, where the gap is at least
    0. Zero updates stay zero.

    Differs from Optax, which scales updates only if ‖u‖² > 2e-16. Here all nonzero updates are
    scaled, even those whose ‖u‖² underflows or overflows.

    **Arguments:**

    - `f_min`: f*, a lower bound on the loss.
    - `max_learning_rate`: η_max, > 0, may be infinite.
    - `eps`: ε, ≥ 0.
    - `variant`: `"sps"` or `"sps+"`.

    ??? cite "Loizou et al., [Stochastic Polyak Step-size for
        SGD](https://arxiv.org/abs/2002.10542), 2020"
    """

    f_min: fields.Number = fields.hyperparameter(0.0)
    max_learning_rate: fields.Number = fields.hyperparameter(1.0, within="(0, inf]")
    eps: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    variant: str = fields.choice_field("sps", "sps+")

    over: ClassVar[str] = "sums"
    needs: ClassVar[tuple[str, ...]] = ("value",)
    keeps_zeros: ClassVar[bool] = True

    def measure(self, g, leaf):
        return {"norm": tree.NormOf(g), "square": jnp.sum(tree.abs_squared(g))}

    def finish(self, sums, state):
        gap = self.value - self.f_min
        if self.variant == "sps+":
            gap = jnp.maximum(gap, 0)
        zero = sums["norm"] == 0
        norm = jnp.where(zero, 1, sums["norm"])
        square = jnp.square(norm)
        # The length of the new update is (f − f*)·‖u‖ / (‖u‖² + ε), in which ‖u‖² may underflow.
        large_eps = self.eps > square
        length = jnp.where(
            large_eps,
            gap * (norm / jnp.where(large_eps, square + self.eps, 1)),
            tree.quotient(gap, norm + tree.quotient(jnp.where(large_eps, 0, self.eps), norm)),
        )
        length = jnp.minimum(length, self.max_learning_rate * norm)
        # As the formula is written, where nothing in it overflows or underflows.
        limits = jnp.finfo(norm.dtype)
        tiny, largest = float(limits.tiny), float(limits.max)
        usual = (sums["square"] > 1e10 * tiny) & (sums["square"] < largest)
        factor = gap / jnp.where(usual, sums["square"] + self.eps, 1)
        factor = jnp.minimum(factor, self.max_learning_rate)
        usual = usual & (jnp.abs(factor) > tiny)
        self.inverse = jnp.where(usual, 1, jnp.where(zero, 0, tree.quotient(1.0, norm)))
        self.length = jnp.where(usual, factor, length)

    def direction(self, g, leaf):
        return g * self.inverse * self.length


@advise_keywords
def polyak_sgd(
    max_learning_rate: Hyperparameter = 1.0,
    scaling: Hyperparameter = 1.0,
    f_min: Hyperparameter = 0.0,
    eps: Hyperparameter = 0.0,
    variant: str = "sps",
) -> AbstractTransform:
    """SGD with Polyak's step size.

        p ↦ p − s·min((f − f*) / (‖g‖² + ε), η_max)·g

    Each step needs the loss f: use `sl.train_step`, or pass `value=` to `opt.step`.

    Differs from Optax if s ≠ 1: Optax uses the norm of s·g, so a larger s makes the step smaller.

    **Arguments:**

    - `max_learning_rate`: η_max, > 0.
    - `scaling`: s.
    - `f_min`, `eps`, `variant`: as in `ScaleByPolyak`.

    **Returns:** a chain of `ScaleByPolyak` and `ScaleByLearningRate`.

    ??? cite "Loizou et al., [Stochastic Polyak Step-size for
        SGD](https://arxiv.org/abs/2002.10542), 2020"
    """
    return ScaleByPolyak(f_min, max_learning_rate, eps, variant) | ScaleByLearningRate(scaling)
