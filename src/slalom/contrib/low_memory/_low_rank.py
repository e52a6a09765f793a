"""Matrices of low rank, and Adam in their place."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ... import tree
from ..._core.engine.matrices import matrices_or_none, refuse_unequal
from ...tree.types import Params
from ...where.layout import Matrix, layouts


class Side(NamedTuple):
    """An array as a batch of matrices whose rows are the shorter side."""

    matrix: Matrix
    rank: int

    @property
    def flipped(self) -> bool:
        return self.matrix.rows > self.matrix.columns

    @property
    def projector(self) -> tuple[int, int, int]:
        """The shape of P."""
        return self.matrix.batch, min(self.matrix.rows, self.matrix.columns), self.rank

    @property
    def projected(self) -> tuple[int, int, int]:
        """The shape of R."""
        return self.matrix.batch, self.rank, max(self.matrix.rows, self.matrix.columns)

    @property
    def note(self) -> str:
        return f"{self.matrix} at rank {self.rank}"

    def read(self, x: Array) -> Array:
        matrices = self.matrix.read(x)
        return jnp.matrix_transpose(matrices) if self.flipped else matrices

    def write(self, matrices: Array) -> Array:
        return self.matrix.write(jnp.matrix_transpose(matrices) if self.flipped else matrices)


def sides_of(rule: Any, params: Params) -> tuple[Side | None, ...]:
    """How to read each leaf that a rule with a `rank` and a `layout` projects."""
    refuse_unequal(type(rule).__name__, params, layouts(params, rule.layout))
    return tuple(
        None
        if m is None or 0 in (m.rows, m.columns)
        else Side(m, min(rule.rank, m.rows, m.columns))
        for m in matrices_or_none(rule, params)
    )


def advance_adam(now: SimpleNamespace, r: Array, leaf: Any) -> None:
    """The new moments."""
    leaf.mu = now.b1 * leaf.mu + now.c1 * r
    leaf.nu = now.b2 * leaf.nu + now.c2 * tree.bounded_square(r)


def direction_of_adam(now: SimpleNamespace, leaf: Any) -> Array:
    """Adam's update."""
    root = tree.root(tree.positive(leaf.nu) * now.nu_scale)
    return now.mu_scale * leaf.mu / (root + now.eps)
