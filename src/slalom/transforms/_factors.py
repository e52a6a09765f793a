"""What the rules with a factor for each side of a matrix share: sizes, refreshes, batches.

They see a parameter as a batch of matrices, (batch, rows, columns), and keep one factor for the
rows and one for the columns of each matrix, in at least float32. A side that is too long has none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int

from .. import tree
from .._core.context import Context
from .._core.declared import CHECK
from .._core.fields import count_field
from .._core.schedule import AbstractSchedule, as_schedule, call_schedule
from .._core.transform import missing
from .._types import Params
from ..where.layout import Matrix
from ._layout import matrices_or_none

_MOST = 64
"""The most matrices that are factored in one call. More take memory, and no less time."""


# --- how often ------------------------------------------------------------------------------


def frequency_field(default: int) -> Any:
    """Declares a number of steps between refreshes: an int ≥ 1 or a schedule."""
    return eqx.field(default=default, converter=_as_frequency, metadata={CHECK: _check_frequency})


def _as_frequency(value: Any) -> Any:
    if callable(value) and not tree.is_array(value):
        return as_schedule(value)
    return int(value) if isinstance(value, np.integer) else value


def _check_frequency(name: str, value: Any) -> None:
    if isinstance(value, jax.Array | np.ndarray):
        is_count = jnp.issubdtype(value.dtype, jnp.integer)
    else:
        is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count and not isinstance(value, AbstractSchedule):
        raise TypeError(
            f"{name} must be an int or a schedule, got {value!r} of type {type(value).__name__}."
        )
    if isinstance(value, int) and value < 1:
        raise ValueError(f"{name} must be at least 1 step, got {value}.")


def frequency_at(rule: Any, context: Context | None) -> Int[Array, ""] | int:
    """The `precondition_frequency` of a rule at this step."""
    frequency = rule.precondition_frequency
    if not isinstance(frequency, AbstractSchedule):
        return frequency
    step = None if context is None else context.step
    if step is None:
        raise TypeError(missing(type(rule).__name__, "step"))
    value = call_schedule(frequency, frequency, step)
    return jnp.maximum(jnp.round(value).astype(jnp.int32), 1)


# --- which sides ----------------------------------------------------------------------------


def size_field(default: int) -> Any:
    """Declares the longest side that has a factor."""
    return count_field(default)


def has_factor(shape: Sequence[int], max_size: int) -> tuple[bool, bool]:
    """Whether the rows and the columns of matrices of this shape have a factor."""
    _, rows, columns = shape
    if rows == 0 or columns == 0:
        return False, False
    return rows <= max_size, columns <= max_size


def by_side(shape: Sequence[int], max_size: int, factors: Sequence[Array]) -> list[Array | None]:
    """The factor of the rows and that of the columns, `None` for a side without one."""
    given = iter(factors)
    return [next(given) if has else None for has in has_factor(shape, max_size)]


def of_sides(*factors: Array | None) -> tuple[Array, ...]:
    """Undoes `by_side`."""
    return tuple(factor for factor in factors if factor is not None)


def sides_as_text(rule: Any, params: Params, instead: str) -> tuple[str | None, ...]:
    """For `opt.describe`: the matrices of each leaf, and which of their sides have no factor."""

    def note(matrix: Matrix | None) -> str | None:
        if matrix is None:
            return None
        sizes = zip(("rows", "columns"), (matrix.rows, matrix.columns), strict=True)
        long = (f"{instead} {name}" for name, size in sizes if size > rule.max_size)
        return ", ".join((str(matrix), *long))

    return tuple(map(note, matrices_or_none(rule, params)))


# --- products -------------------------------------------------------------------------------


def adjoint(x: Inexact[Array, "... n m"]) -> Inexact[Array, "... m n"]:
    """xᴴ."""
    return jnp.conj(x.mT) if jnp.iscomplexobj(x) else x.mT


def bounded_entries(g: Inexact[Array, "batch n m"]) -> Inexact[Array, "batch n m"]:
    """The matrices with entries so bounded that no product with their adjoint overflows.

    NaN stays NaN.
    """
    real = tree.real_dtype(g.dtype)
    limit = float(np.sqrt(float(jnp.finfo(real).max) / (8 * max(*g.shape, 1))))
    if jnp.iscomplexobj(g):
        return jax.lax.complex(jnp.clip(g.real, -limit, limit), jnp.clip(g.imag, -limit, limit))
    return jnp.clip(g, -limit, limit)


def scaled_to_one(x: Inexact[Array, "batch n n"]) -> Inexact[Array, "batch n n"]:
    """Positive semidefinite matrices divided by their largest entry, which is on the diagonal."""
    diagonal = jnp.diagonal(x, axis1=-2, axis2=-1).real
    largest = tree.positive(jnp.max(diagonal, axis=-1, initial=0))
    return x * (1 / largest)[:, None, None]


# --- batches over equal shapes ----------------------------------------------------------------


def in_batches(function: Callable[..., Any], groups: Sequence[tuple[Array, ...]]) -> list[Any]:
    """`function(*arrays)` for each group of arrays, once for all groups of equal shapes.

    **Arguments:**

    - `function`: a function of stacks of matrices, that returns an array or a tuple of arrays with
        the same first axis.
    - `groups`: its arguments.

    **Returns:** the results, in order.
    """
    results: list[Any] = [None] * len(groups)
    kinds: dict[Any, list[int]] = {}
    for i, group in enumerate(groups):
        kind = tuple((x.shape[1:], x.dtype) for x in group)
        kinds.setdefault(kind, []).append(i)
    for members in kinds.values():
        for batch in _capped(members, [groups[i][0].shape[0] for i in members]):
            columns = zip(*(groups[i] for i in batch), strict=True)
            # Under strict promotion, real times complex would be refused.
            with jax.numpy_dtype_promotion("standard"):
                result = function(*map(jnp.concatenate, columns))
            ends = np.cumsum([groups[i][0].shape[0] for i in batch])[:-1].tolist()
            parts = jax.tree.map(lambda x, ends=ends: jnp.split(x, ends), result)
            for n, i in enumerate(batch):
                results[i] = jax.tree.map(
                    lambda xs, n=n: xs[n], parts, is_leaf=lambda xs: isinstance(xs, list)
                )
    return results


def _capped(members: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive members with at most `_MOST` matrices together, or alone if they have more."""
    batches: list[list[int]] = []
    total = 0
    for i, size in zip(members, sizes, strict=True):
        if not batches or total + size > _MOST:
            batches.append([])
            total = 0
        batches[-1].append(i)
        total += size
    return batches


# --- eigenvectors ---------------------------------------------------------------------------


def eigenvectors(x: Inexact[Array, "batch n n"]) -> Inexact[Array, "batch n n"]:
    """The eigenvectors of positive semidefinite matrices, those of large eigenvalues first."""
    _, vectors = jnp.linalg.eigh(scaled_to_one(x), symmetrize_input=False)
    return vectors[..., ::-1]


def refreshed_eigenvectors(
    x: Inexact[Array, "batch n n"], basis: Inexact[Array, "batch n n"]
) -> tuple[Inexact[Array, "batch n n"], Int[Array, "batch n"]]:
    """One step of a power iteration, orthogonalized by a QR decomposition.

    **Arguments:**

    - `x`: positive semidefinite matrices.
    - `basis`: their approximate eigenvectors.

    **Returns:** better eigenvectors, those of large eigenvalues first, and where each of them was.
    """
    with jax.default_matmul_precision("highest"):
        product = scaled_to_one(x) @ basis
        values = jnp.sum((jnp.conj(basis) * product).real, axis=-2)
        order = jnp.argsort(-values, axis=-1)
        sorted_product = jnp.take_along_axis(product, order[:, None, :], axis=-1)
        return jnp.linalg.qr(sorted_product)[0], order
