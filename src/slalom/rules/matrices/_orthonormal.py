"""Products with the adjoints of matrices, and orthonormal columns."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Inexact, Real

from ... import tree


def adjoint(x: Inexact[Array, "... n m"]) -> Inexact[Array, "... m n"]:
    """xᴴ."""
    return jnp.conj(x.mT) if jnp.iscomplexobj(x) else x.mT


def adjoint_times(q: Inexact[Array, "... n n"], x: Inexact[Array, "... n m"]) -> Array:
    """qᴴ·x, without a transposed copy of `q`, which XLA:CPU would make."""
    return adjoint(adjoint(x) @ q)


def times_adjoint(x: Inexact[Array, "... n m"], q: Inexact[Array, "... k m"]) -> Array:
    """x·qᴴ, without a transposed copy of `q`."""
    return jnp.einsum("...ij,...kj->...ik", x, jnp.conj(q) if jnp.iscomplexobj(q) else q)


@jax.custom_jvp
def eigh(x: Inexact[Array, "n n"]) -> tuple[Real[Array, " n"], Inexact[Array, "n n"]]:
    """The rising eigenvalues and the eigenvectors of a Hermitian matrix.

    Vectors of eigenvalues that are equal to rounding, as in a matrix of zeros, do not turn: their
    derivative would be infinite.
    """
    values, vectors = jnp.linalg.eigh(x, symmetrize_input=False)
    return values, vectors


@eigh.defjvp
def _eigh_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    values, vectors = eigh(x)
    change = adjoint(vectors) @ t @ vectors
    apart = values[None, :] - values[:, None]
    least = float(jnp.finfo(values.dtype).eps) * jnp.max(jnp.abs(values), initial=0)
    equal = jnp.abs(apart) <= least
    turn = jnp.where(equal, 0, change / jnp.where(equal, 1, apart))
    return (values, vectors), (jnp.diagonal(change).real, vectors @ turn)


_MOST_ROUNDS = 12
"""One is usual; columns that nearly depend on each other need up to six."""


def first_shift(x: Inexact[Array, "n m"]) -> float:
    """A shift above the errors of the products of columns of length 1, so that they have a
    factor."""
    return 4 * math.sqrt(len(x)) * float(jnp.finfo(x.dtype).eps)


def products_of(x: Inexact[Array, "... n m"]) -> Inexact[Array, "... m m"]:
    """xᴴ·x, in full precision."""

    def in_parts(x: Array) -> Array:
        large, small = _parts(x)
        mixed = large.mT @ small
        products = large.mT @ large + (mixed + mixed.mT)
        # Matrix units cut off digits of their sums, which adds up where all terms are positive.
        squares = jnp.sum(x * x, -2, keepdims=True)
        return jnp.where(jnp.eye(x.shape[-1], dtype=bool), squares, products)

    return _precise(in_parts, lambda x: adjoint(x) @ x, x)


def product(
    x: Inexact[Array, "... _ _"],
    y: Inexact[Array, "... _ _"],
    of: Callable[[Array, Array], Array] = jnp.matmul,
) -> Inexact[Array, "... _ _"]:
    """x·y, or `adjoint_times` or `times_adjoint` of them, in full precision."""

    def in_parts(x: Array, y: Array) -> Array:
        (large, small), (other_large, other_small) = _parts(x), _parts(y)
        return of(large, other_large) + (of(large, other_small) + of(small, other_large))

    return _precise(in_parts, of, x, y)


def plain_product(
    x: Inexact[Array, "... _ _"],
    y: Inexact[Array, "... _ _"],
    of: Callable[[Array, Array], Array] = jnp.matmul,
) -> Inexact[Array, "... _ _"]:
    """As `product`, but in the precision of `jax.default_matmul_precision`."""
    return of(x, y)


def _precise(in_parts: Callable[..., Array], whole: Callable[..., Array], *arrays: Array) -> Array:
    """A product in full precision: in parts where this is several times as fast."""

    def at(precision: str, function: Callable[..., Array], *arrays: Array) -> Array:
        with jax.default_matmul_precision(precision):
            return function(*arrays)

    whole = functools.partial(at, "highest", whole)
    if any(x.dtype != jnp.float32 for x in arrays):
        return whole(*arrays)
    fast = functools.partial(at, "high", in_parts)
    by_platform = jax.custom_jvp(
        lambda *arrays: jax.lax.platform_dependent(*arrays, cuda=fast, default=whole)
    )
    # The parts have no derivatives.
    by_platform.defjvp(lambda x, t: (by_platform(*x), jax.jvp(whole, x, t)[1]))
    return by_platform(*arrays)


def _parts(x: Float32[Array, "*shape"]) -> tuple[Array, Array]:
    """A number that TensorFloat32 holds, and the remainder, whose own remainder is negligible."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFFE000)
    large = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return large, x - large


def shifted_factor(products: Inexact[Array, "m m"], shift: Array | float) -> Array:
    """The Cholesky factor of xᴴ·x + shift·I: NaN if there is none."""
    shifted = products + shift * jnp.eye(len(products), dtype=products.dtype)
    return jax.lax.linalg.cholesky(shifted, symmetrize_input=False)


@jax.custom_jvp
def orthonormal(x: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """Q of the decomposition x = Q·R with a positive diagonal of R. No column may be zero."""
    return jax.lax.platform_dependent(x, cpu=_by_reflections, default=_by_rounds)


def _by_reflections(x: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    q, r = jnp.linalg.qr(x)
    sign = jnp.sign(jnp.diagonal(r))
    return q * jnp.where(sign == 0, 1, sign)[None]


def _by_rounds(x: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """The same without reflections, which a GPU applies one after the other.

    It is as accurate as a QR decomposition: columns of any length count alike, and rounds of
    Cholesky's method repeat until R is near I. Cheaper products do the rest, R ≈ I + Φ with a
    triangular Φ and xᴴ·x = I + Φ + Φᴴ.

    ??? cite "Fukaya et al., [Shifted Cholesky QR for computing the QR factorization of
        ill-conditioned matrices](https://arxiv.org/abs/1809.11085), 2018"
    """
    real = tree.real_dtype(x.dtype)

    def error_of(x: Array) -> Array:
        return products_of(x) - jnp.eye(len(x), dtype=x.dtype)

    def is_far(error: Array) -> Array:
        # From ‖E‖ ≤ 0.2 on, products converge: the next error is at most 3·‖E‖².
        return jnp.sum(tree.abs_squared(error)) > 0.04

    def factorized(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x, error, rounds, shift = carry
        factor = shifted_factor(error, 1 + shift)
        is_finite = jnp.all(jnp.isfinite(factor))
        new = _of_length_one(
            jax.lax.linalg.triangular_solve(
                factor, x, left_side=False, lower=True, transpose_a=True, conjugate_a=True
            )
        )
        x, shift = jnp.where(is_finite, new, x), jnp.where(is_finite, shift, 16 * shift)
        return x, error_of(x), rounds + 1, shift

    def multiplied(x: Array, error: Array) -> Array:
        turn = jnp.triu(error, 1) + jnp.diag(jnp.diagonal(error)) / 2
        # Products with small numbers need no full precision.
        with jax.default_matmul_precision("high"):
            return x - x @ jnp.where(is_far(error), 0, turn)

    def polished(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x = multiplied(*carry[:2])
        return x, error_of(x), carry[2] + 1

    def is_coarse(error: Array) -> Array:
        # The squared length of a column bounds what one more product leaves of any entry.
        return jnp.max(jnp.sum(tree.abs_squared(error), 0)) > 4 * float(jnp.finfo(real).eps)

    x = _of_length_one(x)
    start = x, error_of(x), jnp.int32(0), jnp.asarray(first_shift(x), real)
    *start, _ = jax.lax.while_loop(
        lambda carry: is_far(carry[1]) & (carry[2] < _MOST_ROUNDS), factorized, start
    )
    x, error, _ = jax.lax.while_loop(
        lambda carry: is_coarse(carry[1]) & (carry[2] < _MOST_ROUNDS), polished, tuple(start)
    )
    return multiplied(x, error)


@orthonormal.defjvp
def _orthonormal_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    (x,), (t,) = primals, tangents
    q = orthonormal(x)
    with jax.default_matmul_precision("highest"):
        relative = jax.lax.linalg.triangular_solve(adjoint(q) @ x, t, left_side=False, lower=False)
        turn = adjoint(q) @ relative
        below, diagonal = jnp.tril(turn, -1), jnp.diagonal(turn)
        # Antihermitian, so that the columns stay orthonormal.
        return q, q @ (below - adjoint(below) + jnp.diag(diagonal - jnp.conj(diagonal)) / 2)


def _of_length_one(x: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    return x / tree.positive(tree.norm(x, 0))
