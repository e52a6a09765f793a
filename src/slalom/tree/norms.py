"""Sums over arrays and trees, in at least float32."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Real

from .dtypes import accumulation_dtype, cast, in_precision_of, real_dtype, widened
from .leaves import map_leaves
from .types import PyTree, Scalar


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
    squares = jax.tree.leaves(map_leaves(lambda _, x: jnp.sum(abs_squared(x)), (tree,)))
    dtype = real_dtype(accumulation_dtype(jnp.float32, *(x.dtype for x in squares)))
    total = jnp.zeros((), dtype)
    for x in squares:
        total = jax.lax.add(total, cast(x, dtype))
    return total


def scaled_norm(tree: PyTree, *, small: bool = True) -> Scalar:
    """The `global_norm`, also where the sum of squares overflows or underflows.

    **Arguments:**

    - `tree`: a tree of floating or complex arrays.
    - `small`: as for `leaf_norms`. Zeros cost another pass over the tree, too.

    **Returns:** a real scalar; NaN if the tree is not finite, or if the norm itself overflows.
    """
    square = squared_norm(tree)
    # A conditional, since a second pass over the tree is hardly ever needed.
    return jax.lax.cond(
        _in_range(tree, square, small=small), lambda: root(square), lambda: _scaled_norm(tree)
    )


def leaf_norms(tree: PyTree, *, small: bool = True) -> PyTree:
    """The Euclidean norm of each leaf, also where the sum of its squares overflows.

    **Arguments:**

    - `tree`: a tree of floating or complex arrays.
    - `small`: whether the norm must also be right where the sum underflows. If not, it may be 0
        there. A leaf of zeros costs another pass over the tree, so parameters need `False`: their
        biases are often zero.

    **Returns:** a tree of real scalars.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    squares = [squared_norm(x) for x in leaves]
    pairs = list(zip(leaves, squares, strict=True))
    good = functools.reduce(jnp.logical_and, (_in_range(x, s, small=small) for x, s in pairs))
    # A single conditional, since a GPU waits for the host at each.
    norms = jax.lax.cond(
        good, lambda: [root(s) for s in squares], lambda: [_rescaled_norm(x, s) for x, s in pairs]
    )
    return structure.unflatten(norms)


def _in_range(tree: PyTree, square: Scalar, *, small: bool) -> Bool[Array, ""]:
    """Whether a sum of squares has neither overflowed nor, if that matters, underflowed."""
    limits = jnp.finfo(square.dtype)
    size = sum(x.size for x in jax.tree.leaves(tree))
    # What the smallest squares lack is then less than a rounding of the sum.
    least = max(size, 1) * float(limits.tiny) / float(limits.eps) if small else 0.0
    return (square >= least) & (square < jnp.inf)


@jax.jit
def _rescaled_norm(x: Array, square: Scalar) -> Scalar:
    """The norm of an array whose sum of squares is out of range; NaN if it is infinite.

    Compiled, so that arrays of equal shape share a trace.
    """
    # With this power of 2 the squares of all numbers that count are in range. Most arrays need
    # none: they are here because of another one.
    exponent = jnp.finfo(square.dtype).maxexp
    power = jnp.asarray(2.0 ** (5 * exponent // 8), square.dtype)
    is_small = square < 2.0 ** (-5 * exponent // 16)
    factor = jnp.where(is_small, power, jnp.where(square < jnp.inf, 1, 1 / power))

    # The square of the power is not in range. XLA would compute it for an array of equal constants,
    # such as zeros, the gradient of what a loss does not use.
    x = jax.lax.optimization_barrier(x)

    def scaled_square(now, x):
        parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
        return sum(jnp.sum((part * now.twice) * (part * now.half)) for part in parts)

    now = SimpleNamespace(twice=factor * 2, half=factor / 2)
    norm = root(cast(map_leaves(scaled_square, (x,), now), square.dtype)) / factor
    # Divided by infinity, finite updates would become 0, and nothing would notice.
    return jnp.where(norm < jnp.inf, norm, jnp.nan)


@jax.custom_jvp
def _scaled_norm(tree: PyTree) -> Scalar:
    """The norm of a tree whose sum of squares overflows or underflows; NaN if it is infinite."""
    leaves = jax.tree.leaves(widened(tree))
    dtype = real_dtype(accumulation_dtype(jnp.float32, *(x.dtype for x in leaves)))
    total = (jnp.zeros((), dtype), jnp.zeros((), dtype))
    for x in leaves:
        largest, squares = _largest_and_sum(x)
        total = _add_scaled(total, (cast(largest, dtype), cast(squares, dtype)))
    norm = total[0] * jnp.sqrt(total[1])
    # Divided by infinity, finite updates would become 0, and nothing would notice.
    return jnp.where(norm < jnp.inf, norm, jnp.nan)


@_scaled_norm.defjvp
def _scaled_norm_jvp(primals: Any, tangents: Any) -> Any:
    (tree,), (t,) = primals, tangents
    norm = _scaled_norm(tree)
    now = SimpleNamespace(norm=jnp.where(norm == 0, 1, norm))
    unit = map_leaves(lambda now, x: x / now.norm, (tree,), now)
    return norm, cast(inner(unit, t), norm.dtype)


def _largest_and_sum(x: Array) -> tuple[Array, Array]:
    """The largest absolute value m, and the sum of |x / m|²."""
    # XLA would write x / m to memory. A reduction of pairs needs no m in advance.
    size = jnp.abs(x)
    zero = jnp.zeros((), size.dtype)
    return jax.lax.reduce((size, jnp.sign(size)), (zero, zero), _add_scaled, (*range(x.ndim),))


def _add_scaled(a: Any, b: Any) -> tuple[Array, Array]:
    """Adds two sums that are scaled to their largest entry."""
    (m, sum_m), (n, sum_n) = a, b
    swap = n > m
    m, n = jnp.where(swap, n, m), jnp.where(swap, m, n)
    larger, smaller = jnp.where(swap, sum_n, sum_m), jnp.where(swap, sum_m, sum_n)
    ratio = n / jnp.where(m == 0, 1, m)
    return m, larger + smaller * ratio * ratio


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all numbers in a tree are finite.

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
    dtype = real_dtype(accumulation_dtype(jnp.float32, *(x.dtype for pair in pairs for x in pair)))
    total = jnp.zeros((), dtype)
    for x, y in pairs:
        wide = accumulation_dtype(x.dtype, y.dtype)
        x, y = in_precision_of(x, wide), in_precision_of(y, wide)
        product = x.real * y.real
        if jnp.iscomplexobj(x) and jnp.iscomplexobj(y):
            product = product + x.imag * y.imag
        total = total + jnp.asarray(jnp.sum(product), dtype)
    return total


def norm(x: Inexact[Array, "..."]) -> Scalar:
    """The Euclidean norm of one array, in its own precision, which in rules is at least float32."""
    return root(jnp.sum(abs_squared(x)))


def rms(x: Inexact[Array, "..."]) -> Scalar:
    """The root mean square of one array, in its own precision; 0 for an empty one."""
    return root(jnp.sum(abs_squared(x)) / float(max(x.size, 1)))
