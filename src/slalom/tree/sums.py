"""Sums over scalars, over all entries of trees, and in products of matrices, in full precision."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact

from .dtypes import accumulation_dtype, cast, in_precision_of, sum_dtype
from .paths import check_inexact
from .types import PyTree, Scalar

_MANY = 512
"""The number of scalars from which they are added in a loop."""
_AT_ONCE = 64
"""The number of scalars that a round of that loop adds."""


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
    check_inexact(a)
    check_inexact(b)
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    dtype = sum_dtype(pairs)
    total = jnp.zeros((), dtype)
    for x, y in pairs:
        wide = accumulation_dtype(x.dtype, y.dtype)
        x, y = in_precision_of((x, y), wide)
        product = x.real * y.real
        if jnp.iscomplexobj(x) and jnp.iscomplexobj(y):
            product = product + x.imag * y.imag
        total = total + jnp.asarray(jnp.sum(product), dtype)
    return total


def matmul(x: Inexact[Array, "..."], y: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """x·y of matrices or vectors in full precision, on which estimates of rounding errors rely.

    By default, a GPU rounds the entries of float32 matrices to 11 bits, though not of vectors.
    """
    return jnp.matmul(x, y, precision="highest")
