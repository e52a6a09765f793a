"""Matrices of low rank, and Adam in their place."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ... import tree
from ...tree.types import Params, Updates
from ...where.layout import Matrix
from ..matrices._layout import matrices_or_none


class Side:
    """An array as a batch of matrices whose rows are the shorter side."""

    def __init__(self, matrix: Matrix, rank: int):
        self.matrix = matrix
        self.flipped = matrix.rows > matrix.columns
        short, long = sorted((matrix.rows, matrix.columns))
        self.rank = min(rank, short)
        self.projector = (matrix.batch, short, self.rank)
        """The shape of P."""
        self.projected = (matrix.batch, self.rank, long)
        """The shape of R."""

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
    return tuple(
        None if m is None or 0 in (m.rows, m.columns) else Side(m, rule.rank)
        for m in matrices_or_none(rule, params)
    )


def adam(
    now: SimpleNamespace, updates: Updates, state: Any
) -> tuple[Updates, Int[Array, "*leaves"], PyTree, PyTree]:
    """Adam's updates for these gradients, and its new age and moments."""
    age = tree.increment(state.age)
    now.c1, now.c2 = 1 - now.b1, 1 - now.b2
    now.mu_scale = tree.bias_correction(now.b1, age)
    now.nu_scale = tree.bias_correction(now.b2, age)
    like = (state.mu, state.nu)
    mu, nu = tree.map_leaves(_moments, (updates, state.mu, state.nu), now, like=like)
    return tree.map_leaves(_direction, (mu, nu), now), age, mu, nu


def _moments(now: Any, r: Array, mu: Array, nu: Array) -> tuple[Array, Array]:
    return now.b1 * mu + now.c1 * r, now.b2 * nu + now.c2 * tree.bounded_square(r)


def _direction(now: Any, mu: Array, nu: Array) -> Array:
    root = tree.root(tree.positive(nu) * now.nu_scale)
    return now.mu_scale * mu / (root + now.eps)
