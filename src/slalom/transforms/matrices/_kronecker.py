"""What the rules with a factor for each side of a matrix share: sizes, refreshes, batches.

They see a parameter as a batch of matrices, (batch, rows, columns), and keep one factor for the
rows and one for the columns of each matrix, in at least float32. A side that is too long has none.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Inexact, Int

from ... import tree
from ..._core.engine.matrices import chunks, is_small, matrices_or_none
from ..._core.fields.declare import count_field, count_or_schedule
from ..._core.fields.schedule import AbstractSchedule, call_schedule
from ..._core.protocol.context import Context
from ..._core.protocol.transform import missing
from ...tree.types import Params
from ...where.layout import Matrix

# --- how often ------------------------------------------------------------------------------


def frequency_field(default: int) -> Any:
    """Declares a number of steps between refreshes: an int ≥ 1 or a schedule."""
    return count_or_schedule("step", default, listed=False)


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


def adjoint_times(q: Inexact[Array, "... n n"], x: Inexact[Array, "... n m"]) -> Array:
    """qᴴ·x, without a transposed copy of `q`, which XLA:CPU would make."""
    return adjoint(adjoint(x) @ q)


def times_adjoint(x: Inexact[Array, "batch n m"], q: Inexact[Array, "batch m m"]) -> Array:
    """x·qᴴ, without a transposed copy of `q`."""
    return jnp.einsum("bij,bkj->bik", x, jnp.conj(q) if jnp.iscomplexobj(q) else q)


def bounded_entries(g: Inexact[Array, "... n m"]) -> Inexact[Array, "... n m"]:
    """The matrices with entries so bounded that no product with their adjoint overflows.

    Infinities and NaN become NaN.
    """
    return tree.bounded_entries(g, max(g.shape))


def scaled_to_one(x: Inexact[Array, "batch n n"]) -> Inexact[Array, "batch n n"]:
    """Positive semidefinite matrices divided by their largest entry, which is on the diagonal."""
    return x * (1 / _largest_entry(x))[:, None, None]


def _largest_entry(x: Inexact[Array, "batch n n"]) -> Array:
    diagonal = jnp.diagonal(x, axis1=-2, axis2=-1).real
    return tree.positive(jnp.max(diagonal, axis=-1, initial=0))


# --- batches over equal shapes ----------------------------------------------------------------


def in_batches(function: Callable[..., Any], groups: Sequence[tuple[Array, ...]]) -> list[Any]:
    """`function(*arrays)` for each group of arrays: once for all groups of small matrices of equal
    shapes, and for one large matrix after the other, which needs the scratch memory of one.

    **Arguments:**

    - `function`: a function of stacks of matrices, that returns an array or a tuple of arrays with
        the same first axis. All it computes must depend on its first argument.
    - `groups`: its arguments.

    **Returns:** the results, in order.
    """
    results: list[Any] = [None] * len(groups)
    result: Any = ()
    kinds: dict[Any, list[int]] = {}
    for i, group in enumerate(groups):
        kind = tuple((x.shape[1:], x.dtype) for x in group)
        kinds.setdefault(kind, []).append(i)
    for members in kinds.values():
        size = max(math.prod(x.shape[1:]) for x in groups[members[0]])
        for batch in chunks(members, [len(groups[i][0]) for i in members], size):
            # Under strict promotion, real times complex would be refused.
            with jax.numpy_dtype_promotion("standard"):
                columns = zip(*(groups[i] for i in batch), strict=True)
                stacks = tuple(jnp.concatenate(xs) if xs[1:] else xs[0] for xs in columns)
                stacks = (by_rows(tree.after(stacks[0], result)), *stacks[1:])
                result = _applied(function, stacks, size)
            begin = 0
            for i in batch:
                end = begin + len(groups[i][0])
                results[i] = jax.tree.map(lambda x, a=begin, b=end: x[a:b], result)
                begin = end
    return results


def _applied(function: Callable[..., Any], stacks: tuple[Array, ...], size: int) -> Any:
    if len(stacks[0]) == 1 or is_small(size):
        return function(*stacks)

    def of_one(one: tuple[Array, ...]) -> Any:
        return jax.tree.map(lambda x: x[0], function(*(x[None] for x in one)))

    return jax.lax.map(of_one, stacks)


# --- across a conditional -------------------------------------------------------------------


def in_place_of(old: Sequence[Array], new: Sequence[Array]) -> tuple[Array, ...]:
    """The new arrays, written over the old ones after the first new one was computed.

    XLA would otherwise write them to new memory, and let the idle branch copy the old ones there.
    """
    first = new[0]
    if not first.size:
        return tuple(new)
    never = jnp.real(first[(0,) * first.ndim]) > jnp.inf  # as in `tree.after`
    return tuple(jnp.where(never, x, by_rows(y)) for x, y in zip(old, new, strict=True))


def by_rows(x: Array) -> Array:
    """The array in row-major order."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


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
        # As if `x` were divided by its largest entry, but without a copy of it.
        factor = tree.inverse_root(_largest_entry(x))[:, None, None]
        product = (x @ (basis * factor)) * factor
        values = jnp.sum((jnp.conj(basis) * product).real, axis=-2)
        order = jnp.argsort(-values, axis=-1)
        sorted_product = jnp.take_along_axis(product, order[:, None, :], axis=-1)
        return jnp.linalg.qr(sorted_product)[0], order
