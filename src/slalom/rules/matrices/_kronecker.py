"""Sizes, refreshes and products of rules with a factor for each side of a matrix.

They see a parameter as a batch of matrices, (batch, rows, columns), and keep one factor for the
rows and one for the columns of each matrix, in at least float32. A side that is too long has none.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

from ... import fields, tree
from ..._core.fields.declare import count_or_schedule
from ..._core.fields.schedule import AbstractSchedule, count_at
from ...tree.types import Params
from ...where.layout import Matrix
from .._base import AbstractRule, Context, State
from .._layout import matrices_as_text
from ._orthonormal import (
    adjoint,
    adjoint_times,
    eigh,
    orthonormal,
    plain_product,
    product,
    products_of,
    times_adjoint,
)

# --- how often ------------------------------------------------------------------------------


if TYPE_CHECKING:
    Frequency: TypeAlias = fields.Number
else:
    Frequency: TypeAlias = int | Int[Array, "*runs"] | AbstractSchedule


def frequency_field(default: int) -> Any:
    """Declares a number of steps between refreshes: an int ≥ 1 or a schedule."""
    return count_or_schedule("step", default, listed=False)


class _AbstractRefreshedFields:
    # An abstract variable would come first in the signature of a rule.
    precondition_frequency: Frequency


class AbstractRefreshed(AbstractRule[State], _AbstractRefreshedFields):
    """A rule with a `precondition_frequency`."""

    def at(self, context: Context | None) -> SimpleNamespace:
        now, frequency = super().at(context), self.precondition_frequency
        if isinstance(frequency, AbstractSchedule):
            step = self.demand("step", context and context.step)
            frequency = count_at(frequency, step)
        now.precondition_frequency = jnp.asarray(frequency)
        return now


# --- which sides ----------------------------------------------------------------------------


def has_factor(shape: Sequence[int], max_size: int) -> tuple[bool, bool]:
    """Whether the rows and the columns of a matrix of this shape have a factor."""
    rows, columns = shape
    if rows == 0 or columns == 0:
        return False, False
    return rows <= max_size, columns <= max_size


def sides_as_text(rule: Any, params: Params, instead: str) -> tuple[str | None, ...]:
    """For `opt.describe`: the matrices of each leaf, and which of their sides have no factor."""

    def text(matrix: Matrix) -> str:
        sizes = zip(("rows", "columns"), (matrix.rows, matrix.columns), strict=True)
        long = (f"{instead} {name}" for name, size in sizes if size > rule.max_size)
        return ", ".join((str(matrix), *long))

    return matrices_as_text(rule, params, text)


_ROUNDING = 16.0
"""The error of a change of basis, in units of rounding relative to the largest entry."""
_UNITS = 8.0
"""The error of a factor, in units of rounding relative to the largest eigenvalue."""


class _AbstractTwoSidedFields:
    max_size: int


class AbstractTwoSided(AbstractRefreshed[State], _AbstractTwoSidedFields):
    """A rule with a basis for each side of a matrix that is not longer than `max_size`."""

    over: ClassVar[str] = "matrix"
    refresh_before: ClassVar[str] = "advance"

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return sides_as_text(self, params, "unrotated")

    def _zeros(self, rows: int, columns: int, dtype: np.dtype) -> tuple[Array, ...]:
        """Zeros for the factor of each side that has one."""
        shape = (rows, columns)
        sides = zip(has_factor(shape, self.max_size), shape, strict=True)
        return tuple(jnp.zeros((n, n), dtype) for has, n in sides if has)

    def _by_side(self, shape: Sequence[int], factors: Sequence[Array]) -> list[Array | None]:
        """The factors of the rows and of the columns; `None` for a side without one."""
        remaining = iter(factors)
        return [next(remaining) if has else None for has in has_factor(shape, self.max_size)]

    def _into_basis(
        self, x: Inexact[Array, "n m"], basis: Sequence[Array]
    ) -> Inexact[Array, "n m"]:
        """Q_Lᴴ·x·Q_R, in full precision, with which its entries are compared."""
        left, right = self._by_side(x.shape, basis)
        x = x if left is None else product(left, x, adjoint_times)
        return x if right is None else product(x, right)

    def _out_of_basis(
        self,
        x: Inexact[Array, "n m"],
        basis: Sequence[Array],
        multiply: Callable[..., Array] = plain_product,
    ) -> Inexact[Array, "n m"]:
        """Q_L·x·Q_Rᴴ, in full precision if `multiply` is `product`."""
        left, right = self._by_side(x.shape, basis)
        x = x if left is None else multiply(left, x)
        return x if right is None else multiply(x, right, times_adjoint)

    def _above_rounding(self, x: Inexact[Array, "n m"]) -> Bool[Array, "n m"]:
        """Marks entries in the basis above the rounding error of the largest one.

        A rule that normalizes its entries would otherwise make full steps of entries that are
        exactly zero, as outside of the span of collinear inputs. Only the sides that have a basis
        are summed over.
        """
        summed = tuple(axis for axis, size in enumerate(x.shape) if size <= self.max_size)
        if not summed:
            return jnp.ones(x.shape, bool)
        size = jnp.abs(x)
        unit = _ROUNDING * float(jnp.finfo(x.dtype).eps)
        # NaN is kept, so that it stays visible.
        return ~(size <= unit * jnp.max(size, summed, keepdims=True, initial=0))

    def _determined(self, nu: Float[Array, "n m"]) -> Bool[Array, "n m"]:
        """Marks entries of eigenvectors that are not a mixture of rounding errors.

        A factor with the largest eigenvalue 1 has an error of about a unit of rounding ε. So no
        vector is known whose eigenvalue is below ε, and vectors of the null space are tilted by ε/λ
        towards the vector of the smallest eigenvalue λ that is known. Gradients are about √λ along
        that one, and so ε/√λ along the supposed null space.

        **Arguments:**

        - `nu`: the mean of squares in the basis, whose largest entries stand for the eigenvalues.
        """
        least = _UNITS * float(jnp.finfo(nu.dtype).eps)
        keep = jnp.ones(nu.shape, bool)
        for axis, size in enumerate(nu.shape):
            if size <= self.max_size:
                values = jnp.max(nu, 1 - axis, keepdims=True, initial=0)
                values = values / tree.positive(jnp.max(values, initial=0))
                smallest = jnp.min(jnp.where(values > least, values, 1), initial=1)
                keep = keep & ~(values <= least * (least / smallest))
        return keep

    def _toward_products(
        self, statistics: Sequence[Array], share: Array, g: Inexact[Array, "n m"]
    ) -> tuple[Array, ...]:
        """The means L and R, moved by a share of the way to g·gᴴ and gᴴ·g."""
        left, right = self._by_side(g.shape, statistics)
        if left is not None:
            left = left + share * (products_of(adjoint(g)) - left)
        if right is not None:
            right = right + share * (products_of(g) - right)
        return tuple(factor for factor in (left, right) if factor is not None)


def bounded_entries(g: Inexact[Array, "... n m"]) -> Inexact[Array, "... n m"]:
    """The matrices with entries so bounded that no product with their adjoint overflows.

    Infinities and NaN become NaN.
    """
    return tree.bounded_entries(g, max(g.shape))


# --- eigenvectors ---------------------------------------------------------------------------


def _largest_entry(x: Inexact[Array, "n n"]) -> Array:
    """The largest entry of a positive semidefinite matrix, which is on its diagonal."""
    # The diagonal of a stack of one: for that of one matrix JAX has a conditional by platform.
    diagonal = jnp.diagonal(x[None], axis1=-2, axis2=-1).real
    return tree.positive(jnp.max(diagonal, initial=0))


Eigenvectors: TypeAlias = tuple[Inexact[Array, "n n"], Int[Array, " n"]]
"""Eigenvectors, sorted by falling eigenvalue, and their earlier positions."""


def first_eigenvectors(x: Inexact[Array, "n n"], basis: Inexact[Array, "n n"]) -> Eigenvectors:
    """The eigenvectors of a positive semidefinite matrix, whatever the basis was."""
    _, vectors = eigh(x * (1 / jax.lax.stop_gradient(_largest_entry(x))))
    return vectors[:, ::-1], jnp.arange(len(basis))


def refreshed_eigenvectors(x: Inexact[Array, "n n"], basis: Inexact[Array, "n n"]) -> Eigenvectors:
    """One step of a power iteration.

    **Arguments:**

    - `x`: a positive semidefinite matrix.
    - `basis`: its approximate eigenvectors.

    **Returns:** better eigenvectors.
    """
    new = _times_basis(x, basis)
    order = jnp.argsort(-jnp.sum((jnp.conj(basis) * new).real, axis=-2))
    return orthonormal(new[:, order]), order


def iterated_eigenvectors(x: Inexact[Array, "n n"], basis: Inexact[Array, "n n"]) -> Eigenvectors:
    """As `refreshed_eigenvectors`, without a change of order."""
    return orthonormal(_times_basis(x, basis)), jnp.arange(len(basis))


def _times_basis(x: Inexact[Array, "n n"], basis: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """(x + δ·I)·Q, as if `x` were divided by its largest entry, but without a copy of it.

    δ is as small as a rounding error. It keeps the columns of Q that `x` maps to 0.
    """
    factor = tree.inverse_root(_largest_entry(x))
    delta = _UNITS * float(jnp.finfo(x.dtype).eps)
    return product(x, basis * factor) * factor + delta * basis
