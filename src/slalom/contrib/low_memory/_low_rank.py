"""Matrices of low rank, and Adam in their place."""

import abc
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ... import fields, tree
from ..._core.engine.matrices import matrices_or_none, refuse_unequal
from ..._core.protocol.transform import State
from ...rules.adaptive._adam import AbstractMoments
from ...tree.types import Params
from ...where.layout import Matrix, layouts


class _AbstractProjectedFields:
    eps: fields.Number


class AbstractProjectedAdam(AbstractMoments[State], _AbstractProjectedFields):
    """Adam for gradients that are projected onto fewer rows."""

    @abc.abstractmethod
    def advance(self, g: Array, leaf: State) -> None:
        """As `AbstractRule.advance`."""

    def _moments(self, r: Array, mu: Array, nu: Array) -> tuple[Array, Array]:
        """Both means after a projected gradient."""
        mu = self.b1 * mu + self.c1 * r
        return mu, self.b2 * nu + self.c2 * tree.bounded_square(r)

    def _projected_direction(self, mu: Array, nu: Array) -> Array:
        """Adam's update in the subspace."""
        root = tree.root(tree.positive(nu) * self.nu_scale)
        return self.mu_scale * mu / (root + self.eps)


class WideMatrix(NamedTuple):
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


def wide_matrices(rule: Any, params: Params) -> tuple[WideMatrix | None, ...]:
    """The matrices of each leaf that a rule with a `rank` and a `layout` projects."""
    refuse_unequal(type(rule).__name__, params, layouts(params, rule.layout))
    return tuple(
        None
        if m is None or 0 in (m.rows, m.columns)
        else WideMatrix(m, min(rule.rank, m.rows, m.columns))
        for m in matrices_or_none(rule, params)
    )
