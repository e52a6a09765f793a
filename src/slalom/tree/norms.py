"""Norms of arrays and trees, in at least float32, whose squares may be out of range."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .dtypes import accumulation_dtype, cast, sum_dtype, widened
from .leaves import map_leaves
from .paths import check_inexact
from .squares import abs_squared, divided, root
from .sums import inner, sum_of
from .types import PyTree, Scalar


def norms_along(
    x: Inexact[Array, "..."], axes: int | tuple[int, ...]
) -> tuple[Inexact[Array, "..."], Real[Array, "..."], Real[Array, "..."]]:
    """Norms over some axes, even where the sum of squares overflows or underflows.

    **Arguments:**

    - `x`: a floating or complex array.
    - `axes`: those over which the squares are summed.

    **Returns:** x / largest, the norm of that, and largest, the largest absolute value over the
    axes. The norm of x is the product of the last two, which have an axis of size 1 in place of
    each that is summed.
    """
    # Neither x / ‖x‖ nor ‖x‖ depends on this number.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axes, keepdims=True, initial=0))
    small = divided(x, largest)
    return small, norm(small, axes), largest


def scaled_square(
    x: Inexact[Array, "..."], axes: int | tuple[int, ...] | None = None
) -> tuple[Real[Array, "..."], Real[Array, "..."]]:
    """Σ |f·x|² and f, such that the sum neither overflows nor underflows.

    f is a power of 2, and 1 unless Σ |x|² is out of range.

    **Arguments:**

    - `x`: a floating or complex array.
    - `axes`: those over which the squares are summed, which keep size 1; `None` for all.
    """

    if axes is None and not x.size:  # JAX sums no such array that is on explicit axes of a mesh
        square = jnp.zeros((), x.real.dtype)
        return square, _for_small(square)

    def summed(x: Array) -> Array:
        return jnp.sum(abs_squared(x), axes, keepdims=axes is not None)

    factor = _factor(summed(x))
    return summed(_times(x, factor)), factor


_scaled_square = jax.jit(scaled_square)
"""Over all entries, and so that leaves share a trace."""


def _factor(square: Real[Array, "..."]) -> Real[Array, "..."]:
    """The factor for a second sum of squares, from the sum without a factor."""
    square = jax.lax.stop_gradient(square)
    too_large = jnp.where(square < jnp.inf, 1, _for_large(square))
    return jnp.where(square < _least(square), _for_small(square), too_large)


_factor_compiled = jax.jit(_factor)
"""So that leaves share a trace."""


def _for_small(square: Real[Array, "..."]) -> Scalar:
    """The factor of arrays whose squares underflow. Its square is finite."""
    return jnp.asarray(2.0 ** (int(jnp.finfo(square.dtype).maxexp) // 2 - 1), square.dtype)


def _for_large(square: Real[Array, "..."]) -> Scalar:
    """The factor of arrays whose squares overflow."""
    return 1 / _for_small(square)


def _least(square: Real[Array, "..."]) -> float:
    """In larger sums, squares that underflow are less than a rounding."""
    return 2.0 ** -(int(jnp.finfo(square.dtype).maxexp) // 2)


def _times(x: Inexact[Array, "..."], factor: Real[Array, "..."]) -> Inexact[Array, "..."]:
    if jnp.iscomplexobj(x):
        return jax.lax.complex(_times(x.real, factor), _times(x.imag, factor))
    # XLA squares a constant array, such as the zero gradient of an unused parameter, and its factor
    # separately. Where it does not know the factor, the selection, whose condition never holds,
    # prevents this.
    return jnp.where(factor < 0, 0, x * factor)


def global_norm(tree: PyTree) -> Scalar:
    """The Euclidean norm of all leaves together, summed in at least float32.

    It is right even where the sum of squares overflows or underflows. All leaves are read twice.

    **Arguments:**

    - `tree`: a tree of floating or complex arrays.

    **Returns:** a real scalar; 0 for a tree without leaves.
    """
    check_inexact(tree)
    pairs = [_scaled_square(widened(x)) for x in jax.tree.leaves(tree)]
    terms, factor = _in_one_scale(pairs)
    return root(sum_of(terms)) / factor


def norm_of_stored(tree: PyTree) -> Scalar:
    """The `global_norm` of arrays that are in memory, which are read twice only if they must be.

    A conditional reads from memory, so arrays that are computed where they are read would be
    written first.
    """
    leaves = jax.tree.leaves(tree)

    def again(factors: list[Scalar]) -> list[SumOfSquares]:
        pairs = zip(leaves, factors, strict=True)
        return [NormOf(widened(x)).squared(factor) for x, factor in pairs]

    return norm_of_all([NormOf(widened(x)).squared() for x in leaves], again)


def squarable(tree: PyTree) -> tuple[PyTree, Scalar]:
    """The tree times a power of 2, so that sums of its squares are in range, and this power.

    It is 1 unless squares are out of range.
    """
    pairs = [_scaled_square(widened(x)) for x in jax.tree.leaves(tree)]
    _, factor = _in_one_scale(pairs)
    return map_leaves(
        lambda now, x: _times(x, now.factor), (tree,), SimpleNamespace(factor=factor)
    ), factor


def _in_one_scale(pairs: Sequence[tuple[Array, Scalar]]) -> tuple[list[Array], Scalar]:
    """Sums from `scaled_square` with the smallest of their factors, and this factor."""
    dtype = sum_dtype(pairs)
    if not pairs:
        return [], jnp.ones((), dtype)
    # As a vector, which is one kernel for all leaves.
    factors = jnp.stack([cast(factor, dtype) for _, factor in pairs])
    least = jnp.min(factors)
    ratios = least / factors
    # One ratio after the other, since their product may underflow.
    return [cast(x, dtype) * ratios[i] * ratios[i] for i, (x, _) in enumerate(pairs)], least


def gram_matrix(trees: Sequence[PyTree]) -> Real[Array, "trees trees"]:
    """The inner products of trees, times a power of 4 where they would overflow or underflow.

    The products of one leaf are computed together, so that the leaves of all trees need not be in
    memory at once.
    """
    numbers = range(len(trees))
    products: list[tuple[Array, Scalar]] = []
    for leaves in zip(*map(jax.tree.leaves, trees), strict=True):
        scaled, factor = squarable(leaves)
        lower = [[inner(scaled[i], scaled[j]) for j in range(i + 1)] for i in numbers]
        whole = [[lower[max(i, j)][min(i, j)] for j in numbers] for i in numbers]
        products.append((jnp.stack([jnp.stack(row) for row in whole]), factor))
    start = jnp.zeros((len(trees), len(trees)), sum_dtype(products))
    return functools.reduce(jnp.add, _in_one_scale(products)[0], start)


def squared_norm(tree: PyTree) -> Scalar:
    """The square of `global_norm`."""
    return sum_of(jax.tree.leaves(map_leaves(lambda _, x: jnp.sum(abs_squared(x)), (tree,))))


class NormOf(eqx.Module):
    """The Euclidean norm of an array, even where the sum of its squares overflows or underflows.

    `measure` and `reduce` of a rule may return it along with sums: `sums["name"]` is then the norm
    of all leaves together, and `sums.each("name")` has the norm of each leaf. A norm that no float
    holds, or of an array that is not finite, is NaN.

    The squares are summed as they are, and once more with a factor where that sum was out of range.
    Elsewhere than on a CPU all these sums are taken at once.

    **Arguments:**

    - `x`: a floating or complex array.
    - `small`: whether the norm must also be right where the sum underflows. If not, it may be 0
        there. Zeros cost the second pass, too, so parameters need `False`: biases are often zero.

    ```python
    >>> class Unit(sl.AbstractRule):
    ...     def measure(self, g, leaf):
    ...         return {"norm": sl.tree.NormOf(g)}
    ...     def finish(self, sums, state):
    ...         self.inverse = 1 / sums["norm"]
    ...     def direction(self, g, leaf):
    ...         return self.inverse * g
    >>> Unit().update({"w": jnp.array([3e-30]), "b": jnp.array([4e-30])}, None)[0]
    {'b': Array([0.8], dtype=float32), 'w': Array([0.6], dtype=float32)}

    ```
    """

    x: Inexact[Array, "..."]
    small: bool = eqx.field(default=True, static=True)

    def squared(self, factor: Scalar | None = None) -> "SumOfSquares":
        """The sum of the squares of the array, or of factor · array."""
        if factor is None:
            return SumOfSquares(*_sums_of_squares(self.x), small=self.small)
        square = _sum_of_squares(self.x, factor)
        return SumOfSquares(square, square, square, small=self.small)


class SumOfSquares(eqx.Module):
    """A sum of squares that may be out of range."""

    value: Scalar
    up: Scalar
    down: Scalar
    """With the squares times the largest and the smallest factor, elsewhere than on a CPU."""
    small: bool = eqx.field(static=True)
    """As for `NormOf`."""


Again: TypeAlias = Callable[[list[Scalar]], Sequence[SumOfSquares]]
"""Maps factors to the sums of the squares of factor · array."""


def norms_of(sums: Sequence[SumOfSquares], again: Again) -> Real[Array, " sums"]:
    """The norms with these squares, at least one."""
    squares = _stacked([s.value for s in sums])
    # As a vector, since a GPU would have a kernel for each of them.
    least = jnp.array([_least(s.value) if s.small else 0.0 for s in sums], squares.dtype)
    good = jnp.all((squares >= least) & (squares < jnp.inf))
    return _checked(good, lambda: root(squares), sums, again, lambda norms: norms)


def norm_of_all(sums: Sequence[SumOfSquares], again: Again) -> Scalar:
    """The norm of all arrays together, from their sums of squares."""
    total = sum_of([s.value for s in sums])
    if not sums:
        return total
    least = _least(total) if any(s.small for s in sums) else 0.0
    good = (total >= least) & (total < jnp.inf)
    return _checked(good, lambda: root(total), sums, again, norm)


def _checked(
    good: Bool[Array, ""],
    usual: Callable[[], Array],
    sums: Sequence[SumOfSquares],
    again: Again,
    join: Callable[[Array], Array],
) -> Array:
    """The usual norm where the sums are in range, and else the joined norms of sums in range."""

    def again_on_cpu() -> Array:
        factors = [_factor_compiled(s.value) for s in sums]
        pairs = zip(again(factors), factors, strict=True)
        return _or_nan(join(_stacked([root(s.value) / factor for s, factor in pairs])))

    def on_cpu() -> Array:
        return jax.lax.cond(good, usual, again_on_cpu)

    # A GPU would wait for the host at a conditional, and where a branch has nothing but sums, XLA
    # takes both.
    def elsewhere() -> Array:
        plain, up, down = map(_stacked, zip(*((s.value, s.up, s.down) for s in sums), strict=True))
        # As vectors, since a GPU would have kernels for each leaf.
        alike = len({s.value.dtype for s in sums}) == 1
        factor = _factor(plain) if alike else _stacked([_factor(s.value) for s in sums])
        squares = jnp.where(factor > 1, up, jnp.where(factor < 1, down, plain))
        return jnp.where(good, usual(), _or_nan(join(root(squares) / factor)))

    return jax.lax.platform_dependent(cpu=on_cpu, default=elsewhere)


def _or_nan(norm: Array) -> Array:
    # Divided by infinity, finite updates would become 0, and nothing would notice.
    return jnp.where(norm < jnp.inf, norm, jnp.nan)


def _stacked(values: Sequence[Scalar]) -> Array:
    dtype = accumulation_dtype(*(x.dtype for x in values))
    return jnp.stack([cast(x, dtype) for x in values])


@jax.jit
def _sum_of_squares(x: Array, factor: Scalar) -> Scalar:
    """The sum of |factor · x|². Compiled, so that arrays of equal shape share a trace."""
    return jnp.sum(abs_squared(_times(x, factor)))


@jax.jit
def _sums_of_squares(x: Array) -> tuple[Scalar, Scalar, Scalar]:
    """The sums of |x|² and of |factor · x|² for the largest and the smallest factor. On a CPU they
    are all the first one."""

    def on_cpu() -> tuple[Scalar, Scalar, Scalar]:
        square = jnp.sum(abs_squared(x))
        return square, square, square

    def elsewhere() -> tuple[Scalar, Scalar, Scalar]:
        # With constants XLA would square the arrays and the factors separately.
        like = jnp.zeros((), x.real.dtype)
        up, down = (jax.lax.optimization_barrier(of(like)) for of in (_for_small, _for_large))
        return _reduced_together(x, up, down)

    return jax.lax.platform_dependent(cpu=on_cpu, default=elsewhere)


# One reduction, because a GPU adds up the parts of a large array in another kernel, one for each
# reduction. JAX would differentiate it as a tree of additions.
@jax.custom_jvp
def _reduced_together(x: Array, up: Scalar, down: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    squares = tuple(map(abs_squared, (x, _times(x, up), _times(x, down))))
    zeros = tuple(jnp.zeros((), square.dtype) for square in squares)
    sums = jax.lax.reduce(squares, zeros, lambda a, b: tuple(map(jnp.add, a, b)), range(x.ndim))
    return sums[0], sums[1], sums[2]


@_reduced_together.defjvp
def _reduced_together_jvp(primals: Any, tangents: Any) -> Any:
    (x, up, down), (t, _, _) = primals, tangents

    def slope(scaled: Array) -> Scalar:
        # Where an entry overflows, the sum is not used, and 0·∞ would be NaN.
        finite = jnp.where(jnp.isfinite(scaled), scaled, 0)
        return 2 * jnp.sum((jnp.conj(finite) * t).real)

    scaled = (x, *(_times(_times(x, factor), factor) for factor in (up, down)))
    return _reduced_together(x, up, down), tuple(map(slope, scaled))


def norm(x: Inexact[Array, "..."], axes: int | tuple[int, ...] | None = None) -> Real[Array, "..."]:
    """The Euclidean norm of one array, in its own precision, which in rules is at least float32.

    It is right even where the sum of squares overflows or underflows.

    **Arguments:**

    - `x`: a floating or complex array.
    - `axes`: those over which the squares are summed, which keep size 1; `None` for all.
    """
    square, factor = scaled_square(x, axes)
    return root(square) / factor


def rms(x: Inexact[Array, "..."]) -> Scalar:
    """The root mean square of one array, in its own precision; 0 for an empty one."""
    square, factor = scaled_square(x)
    return root(square / float(max(x.size, 1))) / factor
