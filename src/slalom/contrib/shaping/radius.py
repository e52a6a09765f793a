"""Constraints on the norm of a matrix: floors of updates, a radial brake and a pinned radius."""

from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Inexact

from ... import fields, tree
from ..._core.engine.matrices import matrices
from ..._core.protocol.rule import AbstractRule
from ...rules.matrices._newton_schulz import divided_by_norm
from ...tree.types import Params
from ...where.layout import LayoutLike


class _AbstractOfMatrices(AbstractRule[None]):
    """A rule without state that compares updates of matrices with the matrices."""

    over: ClassVar[str] = "matrix"
    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        matrices(self, params)
        return tree.no_state(params)


class UpdateFloor(_AbstractOfMatrices):
    """Gives updates at least a share of the norm of their weights.

        u ↦ u·max(1, c·‖w‖ / ‖u‖)   with the norms of each row, or of each matrix

    It goes between a rule and the learning rate. A row holds the weights of one output. Without a
    floor, outputs whose updates are small compared with their weights hardly turn. Zero updates
    stay zero.

    **Arguments:**

    - `ratio`: c, ≥ 0; 0.3825 in the record.
    - `per`: `"row"` or `"matrix"`.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), 2026, the records of
        track 3"
    """

    ratio: fields.Number = fields.hyperparameter(within="[0, inf)")
    per: str = fields.choice_field("row", "matrix", kw_only=True)
    layout: LayoutLike = fields.layout_field()

    def direction(self, g, leaf):
        axes = (-1,) if self.per == "row" else (-2, -1)
        unit, size = _unit_and_norm(g, axes)
        floor = self.ratio * _unit_and_norm(self.p, axes)[1]
        return jnp.where(size < floor, unit * floor, g)


class RadialBrake(_AbstractOfMatrices):
    """Removes from updates a share of the part that would make their matrix larger.

        u ↦ u − s·min(0, ⟨u, w⟩)·w / ‖w‖²   with the inner product and the norm of each matrix

    It goes between a rule and the learning rate, where updates still point along the gradients, so
    that a negative product is a step outwards.

    **Arguments:**

    - `strength`: s, in [0, 1]. With 1 no step is directed outwards.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), 2026, the records of
        track 3"
    """

    strength: fields.Number = fields.hyperparameter(0.5, within="[0, 1]")
    layout: LayoutLike = fields.layout_field()

    def direction(self, g, leaf):
        unit, _ = _unit_and_norm(self.p, (-2, -1))
        radial = tree.inner(g, unit).astype(self.strength.dtype)
        return g - self.strength * jnp.minimum(radial, 0) * unit


class PinRadius(_AbstractOfMatrices):
    """Changes the norm of a matrix only by the radial part of its update.

        w + u ↦ (w + u)·(‖w‖ + ⟨u, w⟩ / ‖w‖) / ‖w + u‖   with the norms of each matrix

    A step along a tangent makes a matrix larger, and a longer step does so more. This link undoes
    that growth, so that no decay is needed. It is the last link of a chain, since it does not see
    what later links do to the updates; `sl.KeepInitialNorm` undoes the radial part too. A matrix of
    zeros is not restricted. Differs from the record's code, which keeps it near 0 in the first
    step.

    ```python
    >>> rule = sl.Orthogonalize() | sl.contrib.RadialBrake() | sl.ScaleByLearningRate(0.02)
    >>> tx = sl.adam(1e-3).partition({sl.where.matrix(): rule | sl.contrib.PinRadius()})

    ```

    **Arguments:**

    - `layout`: as in `sl.where.matrix`.

    ??? cite "[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), 2026, the records of
        track 3"
    """

    constrains: ClassVar[bool] = True

    layout: LayoutLike = fields.layout_field()

    def direction(self, g, leaf):
        before, radius = _unit_and_norm(self.p, (-2, -1))
        after, length = _unit_and_norm(self.p + g, (-2, -1))
        # The factor is the cosine of the angle. 1 − cos would lose a small angle to rounding.
        change = jnp.sum(tree.abs_squared(after - before)) / 2
        change = jnp.where((radius == 0) | (length == 0), 0, change)
        return g - change * (self.p + g)


def _unit_and_norm(
    x: Inexact[Array, "n m"], axes: tuple[int, ...]
) -> tuple[Inexact[Array, "n m"], Array]:
    """x / ‖x‖, or 0, and ‖x‖, for numbers of any size."""
    unit = divided_by_norm(x, 0.0, axes)
    product = jnp.conj(unit) * x if jnp.iscomplexobj(x) else unit * x
    return unit, jnp.sum(product.real, axes, keepdims=True)
