"""Sums over arrays and trees, in at least float32."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, Real

from .dtypes import accumulation_dtype, cast, in_precision_of, sum_dtype, widened
from .kernels import entries
from .leaves import map_leaves
from .types import PyTree, Scalar

_MANY = 512
"""The number of scalars from which they are added in a loop."""
_AT_ONCE = 64
"""How many scalars a round of that loop adds."""


def abs_squared(x: Inexact[Array, "*shape"]) -> Real[Array, "*shape"]:
    """|x|², which is real even for complex x.

    **Arguments:**

    - `x`: a floating or complex array.

    **Returns:** a real array.
    """
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


@jax.custom_jvp
def root(x: Real[Array, "..."]) -> Real[Array, "..."]:
    """√x with derivative 0 at 0, for x that are squares, whose own derivative is 0 there.

    The derivative ∞ would make a gradient through an optimizer NaN if any gradient is zero.
    """
    return jnp.sqrt(x)


@root.defjvp
def _root_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = root(x)
    return y, jnp.where(y == 0, 0, t / jnp.where(y == 0, 1, 2 * y))


@jax.custom_jvp
def inverse_root(x: Real[Array, "..."]) -> Real[Array, "..."]:
    """1/√x; its derivative stays finite times zero even if x^(−3/2) overflows."""
    return jax.lax.rsqrt(x)


@inverse_root.defjvp
def _inverse_root_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = inverse_root(x)
    return y, t * y * y * y / -2


def bounded_square(x: Inexact[Array, "*shape"]) -> Real[Array, "*shape"]:
    """|x|², but at most a quarter of the largest finite number; NaN stays NaN.

    Otherwise a single gradient of 1e20 would make a running mean infinite, and all later updates
    that are divided by its root 0. The quarter leaves room for rounding in the mean and in the
    correction of its bias.

    **Arguments:**

    - `x`: a floating or complex array.

    **Returns:** a real array.
    """
    return bounded(abs_squared(x))


def bounded(square: Real[Array, "..."]) -> Real[Array, "..."]:
    """A square, or a sum of squares, with the bound of `bounded_square`."""
    return jnp.minimum(square, float(jnp.finfo(square.dtype).max) / 4)


def bounded_entries(x: Inexact[Array, "*shape"], size: int) -> Inexact[Array, "*shape"]:
    """The entries so bounded that no sum of as many of their products as `size` overflows.

    Infinities and NaN become NaN, which does not hide the error.
    """
    limit = math.sqrt(float(jnp.finfo(x.dtype).max) / (8 * max(size, 1)))

    def bounded_part(part: Array) -> Array:
        return jnp.where(jnp.isinf(part), jnp.nan, jnp.clip(part, -limit, limit))

    if jnp.iscomplexobj(x):
        return jax.lax.complex(bounded_part(x.real), bounded_part(x.imag))
    return bounded_part(x)


def divided(x: Inexact[Array, "..."], largest: Real[Array, "..."]) -> Inexact[Array, "..."]:
    """x / largest for |x| ≤ largest, which broadcasts; 0 / 0 = 0.

    The inverse of the largest numbers is subnormal, which processors treat as 0, so the divisor is
    brought closer to 1 first. The quotient of subnormal numbers is 0.
    """
    power = jnp.where(largest > 1, 0.25, 4.0).astype(largest.dtype)
    divisor = largest * power
    small = divisor < float(jnp.finfo(divisor.dtype).tiny)
    return (x * power) * jnp.where(small, 0, 1 / jnp.where(small, 1, divisor))


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


def positive(square: Real[Array, "..."]) -> Real[Array, "..."]:
    """A mean of squares as a divisor: at least the smallest normal number.

    With ε = 0 a zero gradient is divided by a positive number, so its update is 0 and not NaN.
    Where the squares of tiny gradients have underflowed, the updates stay small.

    **Arguments:**

    - `square`: a real array, ≥ 0.

    **Returns:** the array.
    """
    # A maximum costs nothing. Two selections around the quotient would make XLA keep the updates
    # in a buffer wherever something else reads them too.
    return jnp.maximum(square, float(jnp.finfo(square.dtype).tiny))


def global_norm(tree: PyTree) -> Scalar:
    """The Euclidean norm of all leaves together, summed in at least float32.

    **Arguments:**

    - `tree`: a tree of floating or complex arrays.

    **Returns:** a real scalar; 0 for a tree without leaves.
    """
    return root(squared_norm(tree))


def squared_norm(tree: PyTree) -> Scalar:
    """The square of `global_norm`."""
    return sum_of(jax.tree.leaves(map_leaves(lambda _, x: jnp.sum(abs_squared(x)), (tree,))))


def sum_of(scalars: Sequence[Scalar]) -> Scalar:
    """The sum of real scalars, in order, in at least float32."""
    dtype = sum_dtype(scalars)
    terms = [cast(x, dtype) for x in scalars]
    total = jnp.zeros((), dtype)
    if len(terms) <= _MANY:
        return _added(total, terms)
    # XLA:CPU would make one kernel of all additions, and search it again for each of them.
    stacked = jnp.stack(terms)
    number = (len(terms) - 1) // _AT_ONCE
    rows = jnp.reshape(stacked[1 : 1 + number * _AT_ONCE], (number, _AT_ONCE))
    total = _added(total, stacked[:1])
    total, _ = jax.lax.scan(lambda total, row: (_added(total, row), None), total, rows)
    return _added(total, stacked[1 + number * _AT_ONCE :])


def _added(total: Scalar, terms: Sequence[Scalar] | Array) -> Scalar:
    return functools.reduce(jax.lax.add, terms, total)


class NormOf(eqx.Module):
    """The Euclidean norm of an array, even where the sum of its squares overflows or underflows.

    `measure` and `reduce` of a rule may return it along with sums: `sums.name` is then the norm of
    all leaves together, and `sums.each("name")` has the norm of each leaf. A norm that no float
    holds, or of an array that is not finite, is NaN.

    The squares are summed as they are, and once more with factors where that sum was out of range.

    **Arguments:**

    - `x`: a floating or complex array.
    - `small`: whether the norm must also be right where the sum underflows. If not, it may be 0
        there. Zeros cost the second pass, too, so parameters need `False`: biases are often zero.

    ```python
    >>> class Unit(sl.AbstractRule):
    ...     def measure(self, now, g, leaf):
    ...         return {"norm": sl.tree.NormOf(g)}
    ...     def finish(self, now, sums, state):
    ...         now.inverse = 1 / sums.norm
    ...     def direction(self, now, g, leaf):
    ...         return now.inverse * g
    >>> Unit().update({"w": jnp.array([3e-30]), "b": jnp.array([4e-30])}, None)[0]
    {'b': Array([0.8], dtype=float32), 'w': Array([0.6], dtype=float32)}

    ```
    """

    x: Inexact[Array, "..."]
    small: bool = eqx.field(default=True, static=True)

    def squared(self, twice: "Twice | None" = None) -> "SumOfSquares":
        """The sum of the squares of the array, or of factor · array."""
        return SumOfSquares(_sum_of_squares(self.x, twice), self.x.size, self.small)


class SumOfSquares(eqx.Module):
    """A sum of squares that may be out of range."""

    value: Scalar
    size: int = eqx.field(static=True)
    """The number of squares."""
    small: bool = eqx.field(static=True)
    """As for `NormOf`."""

    @property
    def least(self) -> float:
        """The least value for which what the smallest squares lack is less than a rounding."""
        limits = jnp.finfo(self.value.dtype)
        return self.size * float(limits.tiny) / float(limits.eps) if self.small else 0.0


SumsOfSquares: TypeAlias = Sequence[SumOfSquares]
Twice: TypeAlias = tuple[Scalar, Scalar]
"""A factor, twice: XLA would write factor · array to memory if it were used twice."""
Again: TypeAlias = Callable[[list[Twice]], SumsOfSquares]
"""From factors to the sums of the squares of factor · array, where XLA must not know the array."""


def norms_of(sums: SumsOfSquares, again: Again) -> Real[Array, " sums"]:
    """The norms whose squares are these sums, of which there is at least one."""
    values = [s.value for s in sums]
    squares = _stacked(values)
    good = jnp.all(_in_range(squares, np.array([s.least for s in sums])))
    # A single conditional, since a GPU waits for the host at each.
    return jax.lax.cond(good, lambda: root(squares), lambda: _norms_again(squares, values, again))


def norm_of_all(sums: SumsOfSquares, again: Again) -> Scalar:
    """The norm of all arrays together, the sums of whose squares these are."""
    values = [s.value for s in sums]
    total = sum_of(values)

    def combined() -> Scalar:
        _, norm, largest = norms_along(_norms_again(_stacked(values), values, again), 0)
        return _or_nan((largest * norm)[0])

    good = _in_range(total, sum(s.least for s in sums))
    return jax.lax.cond(good, lambda: root(total), combined)


def _in_range(total: Array, least: Any) -> Array:
    return (total >= jnp.asarray(least, total.dtype)) & (total < jnp.inf)


def _factor(square: Array, exponent: Any) -> Array:
    """A power of 2 times which the squares of all numbers that count are in range. Most arrays need
    none: they are here because of another one.

    **Arguments:**

    - `square`: the sum of squares.
    - `exponent`: that of the largest number in the dtype of the array.
    """
    power, least = (
        jnp.asarray(2.0**n, square.dtype) for n in (5 * exponent // 8, -5 * exponent // 16)
    )
    return jnp.where(square < least, power, jnp.where(square < jnp.inf, 1, 1 / power))


def _norms_again(squares: Array, values: Sequence[Scalar], again: Again) -> Real[Array, " sums"]:
    """The norms, given their squares as a vector and as numbers, from sums with factors."""
    exponents = [jnp.finfo(x.dtype).maxexp for x in values]
    factors = map(jax.jit(_factor, static_argnums=1), values, exponents)
    scaled = _stacked([s.value for s in again([opaque((f, f)) for f in factors])])
    return _or_nan(root(scaled) / _factor(squares, np.array(exponents)))


def _or_nan(norm: Array) -> Array:
    # Divided by infinity, finite updates would become 0, and nothing would notice.
    return jnp.where(norm < jnp.inf, norm, jnp.nan)


def _stacked(values: Sequence[Scalar]) -> Array:
    dtype = accumulation_dtype(*(x.dtype for x in values))
    return jnp.stack([cast(x, dtype) for x in values])


@jax.jit
def _sum_of_squares(x: Array, twice: Twice | None) -> Scalar:
    """The sum of |factor · x|². Compiled, so that arrays of equal shape share a trace."""
    if twice is None:
        return jnp.sum(abs_squared(x))
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    return sum_of([jnp.sum((part * twice[0]) * (part * twice[1])) for part in parts])


def opaque(tree: PyTree) -> PyTree:
    """Arrays of which XLA knows nothing.

    It would compute the square of a factor for an array of equal constants, such as zeros, the
    gradient of what a loss does not use, and that square is infinite.
    """
    return jax.lax.optimization_barrier(tree)


def scaled_norm(tree: PyTree) -> Scalar:
    """The `global_norm`, even where the sum of squares overflows or underflows.

    It is NaN if the tree is not finite, or if the norm itself overflows.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.zeros((), jnp.float32)
    return norm_of_all(*_sums_and_again(leaves))


def leaf_norms(tree: PyTree) -> PyTree:
    """The Euclidean norm of each leaf, even where the sum of its squares overflows."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    sums, again = _sums_and_again(leaves)
    (norms,) = entries([norms_of(sums, again)])
    return structure.unflatten([cast(x, s.value.dtype) for x, s in zip(norms, sums, strict=True)])


def _sums_and_again(leaves: list[Array]) -> tuple[SumsOfSquares, Again]:
    def again(factors: list[Twice]) -> SumsOfSquares:
        pairs = zip(opaque(leaves), factors, strict=True)
        return [NormOf(widened(x)).squared(twice) for x, twice in pairs]

    return [NormOf(widened(x)).squared() for x in leaves], again


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all elements of a tree are finite.

    **Arguments:**

    - `tree`: a tree of floating or complex arrays.

    **Returns:** a bool scalar; true for a tree without leaves.
    """
    finite = jnp.array(True)
    for x in jax.tree.leaves(tree):
        # For `all(isfinite(x))` XLA would write the bools to memory, which takes twice as long. A
        # maximum would miss a NaN: XLA drops it where it joins the maxima of several threads or
        # devices. x − x is NaN unless x is finite, and so is every sum with it. (0·x is, too, but
        # it is written to memory.)
        parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
        for part in parts:
            finite = finite & (jnp.sum(jnp.subtract(part, part)) == 0)
    return finite


def inner(a: PyTree, b: PyTree) -> Scalar:
    """Re⟨a, b⟩ = Σ Re(āᵢ·bᵢ) over all entries of all leaves, summed in at least float32.

    The real part treats a complex parameter as two real ones, as a gradient does.

    **Arguments:**

    - `a`, `b`: trees of floating or complex arrays, of one structure and equal shapes.

    **Returns:** a real scalar; 0 for trees without leaves.
    """
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    dtype = sum_dtype(pairs)
    total = jnp.zeros((), dtype)
    for x, y in pairs:
        wide = accumulation_dtype(x.dtype, y.dtype)
        x, y = in_precision_of(x, wide), in_precision_of(y, wide)
        product = x.real * y.real
        if jnp.iscomplexobj(x) and jnp.iscomplexobj(y):
            product = product + x.imag * y.imag
        total = total + jnp.asarray(jnp.sum(product), dtype)
    return total


def norm(x: Inexact[Array, "..."], axes: int | tuple[int, ...] | None = None) -> Real[Array, "..."]:
    """The Euclidean norm of one array, in its own precision, which in rules is at least float32.

    **Arguments:**

    - `x`: a floating or complex array.
    - `axes`: those over which the squares are summed, which keep size 1; `None` for all.
    """
    return root(jnp.sum(abs_squared(x), axes, keepdims=axes is not None))


def rms(x: Inexact[Array, "..."]) -> Scalar:
    """The root mean square of one array, in its own precision; 0 for an empty one."""
    return root(jnp.sum(abs_squared(x)) / float(max(x.size, 1)))
