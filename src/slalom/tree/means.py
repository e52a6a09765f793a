"""Sums in at least float32, and running means: decays, ages and bias correction."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, Int, Real

from .dtypes import accumulation_dtype, cast, in_precision_of, sum_dtype
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


def matmul(x: Inexact[Array, "... n m"], y: Inexact[Array, "... m k"]) -> Inexact[Array, "... n k"]:
    """x·y in full precision, on which estimates of rounding errors rely.

    By default, a GPU rounds the entries of float32 matrices to 11 bits, though not of vectors.
    """
    return jnp.matmul(x, y, precision="highest")


def bias_correction(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """1 / (1 − decayᵗ), the factor that debiases a mean that started at zero and has age t ≥ 1.

    Written as 1 / −expm1(t · log1p(−(1 − decay))): the naive form loses 5e-5 of its value to
    cancellation in float32 at t = 2, decay = 0.9999.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: the number of values in the mean, ≥ 1: a scalar, or a vector with an entry per leaf.

    **Returns:** the factor, of the same shape as `age`.
    """
    later = -jnp.expm1(age.astype(decay.dtype) * log_of_decay(decay))
    # The division comes last: XLA computes it once, and repeats any operation after it for every
    # leaf.
    return 1 / jnp.where(age == 1, 1 - decay, later)


def log_of_decay(decay: Scalar) -> Scalar:
    """log(decay), to the last digits also close to 1, and with a finite derivative at 0.

    Below 1e-20 it is constant. The derivative ∞ would meet an exponential that is 0 there, and
    make the gradients of hyperparameters NaN.

    **Arguments:**

    - `decay`: the decay of a mean, in [0, 1).

    **Returns:** the logarithm, < 0.
    """
    least = max(1e-20, float(jnp.finfo(decay.dtype).tiny))
    is_small = decay < 0.5
    # Each branch must be finite where the other one is used.
    small = jnp.log(jnp.maximum(jnp.where(is_small, decay, 0.5), least))
    large = jnp.log1p(-(1 - jnp.where(is_small, 0.5, decay)))
    return jnp.where(is_small, small, large)


def newest_weight(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """(1 − decay) / (1 − decayᵗ), the weight of the newest of t values in their debiased mean.

    With this weight w, mean ← (1 − w)·mean + w·new is the exponential mean of the values so far,
    and needs no further correction.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: the number of values, the newest included, ≥ 1: a scalar, or a vector with an entry
        per leaf.

    **Returns:** the weight, of the same shape as `age`; exactly 1 at age 1.
    """
    weight = (1 - decay) * bias_correction(decay, age)
    return jnp.where(age == 1, 1, weight)


def moved(mean: Array, new: Array, weight: Scalar) -> Array:
    """mean + weight·(new − mean), and exactly `new` where the weight is 1.

    Unlike (1 − weight)·mean + weight·new it does not drift: the two factors are rounded separately,
    and over many steps the difference of their sum from 1 adds up.
    """
    change = new - mean
    # Both sums have the same derivatives; `new` alone would have none with respect to the weight.
    return jnp.where(weight == 1, new + (weight - 1) * change, mean + weight * change)


def increment(count: Int[Array, "..."]) -> Int[Array, "..."]:
    """count + 1; saturates at the largest integer instead of overflowing.

    **Arguments:**

    - `count`: an array of integers.

    **Returns:** an array of the same shape and dtype.
    """
    largest = jnp.iinfo(count.dtype).max
    return jnp.where(count < largest, count + 1, largest)
