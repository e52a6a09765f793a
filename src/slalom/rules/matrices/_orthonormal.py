"""Products with the adjoints of matrices."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real

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

    Vectors of equal eigenvalues, as in a matrix of zeros, do not turn: their derivative would be
    infinite.
    """
    values, vectors = jnp.linalg.eigh(x, symmetrize_input=False)
    return values, vectors


@eigh.defjvp
def _eigh_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    values, vectors = eigh(x)
    change = adjoint(vectors) @ t @ vectors
    apart = values[None, :] - values[:, None]
    turn = jnp.where(apart == 0, 0, change / jnp.where(apart == 0, 1, apart))
    return (values, vectors), (jnp.diagonal(change).real, vectors @ turn)


_MOST_ROUNDS = 12
"""Two or three are usual; columns that nearly depend on each other need up to six."""
_NEAR = 0.05
"""An entry of QᴴQ − I below which one more round leaves rounding errors only."""


def first_shift(x: Inexact[Array, "n m"]) -> float:
    """A shift above the errors of the products of columns of length 1, so that they have a
    factor."""
    return 4 * math.sqrt(len(x)) * float(jnp.finfo(x.dtype).eps)


def products_and_factor(
    x: Inexact[Array, "n m"], shift: Array | float
) -> tuple[Inexact[Array, "m m"], Inexact[Array, "m m"]]:
    """xᴴ·x, and the Cholesky factor of xᴴ·x + shift·I: NaN if there is none."""
    with jax.default_matmul_precision("highest"):
        products = adjoint(x) @ x
    shifted = products + shift * jnp.eye(x.shape[1], dtype=x.dtype)
    return products, jax.lax.linalg.cholesky(shifted, symmetrize_input=False)


@jax.custom_jvp
def orthonormal(x: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    """Q of the decomposition x = Q·R with a positive diagonal of R.

    It is as accurate as a QR decomposition, since columns of any length count alike and rounds
    repeat until they are orthonormal. No column may be zero.

    ??? cite "Fukaya et al., [Shifted Cholesky QR for computing the QR factorization of
        ill-conditioned matrices](https://arxiv.org/abs/1809.11085), 2018"
    """
    real = tree.real_dtype(x.dtype)

    def round_of(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        x, shift, _, rounds = carry
        products, factor = products_and_factor(x, shift)
        far = jnp.max(jnp.abs(products - jnp.eye(len(x), dtype=x.dtype)))
        is_finite = jnp.all(jnp.isfinite(factor))
        new = _of_length_one(
            jax.lax.linalg.triangular_solve(
                factor, x, left_side=False, lower=True, transpose_a=True, conjugate_a=True
            )
        )
        x, shift = jnp.where(is_finite, new, x), jnp.where(is_finite, shift, 16 * shift)
        return x, shift, jnp.where(is_finite, far, jnp.inf), rounds + 1

    def goes_on(carry: tuple[Any, ...]) -> Array:
        _, _, far, rounds = carry
        return (far > _NEAR) & (rounds < _MOST_ROUNDS)

    far = jnp.asarray(jnp.inf, real)
    start = _of_length_one(x), jnp.asarray(first_shift(x), real), far, jnp.int32(0)
    return jax.lax.while_loop(goes_on, round_of, start)[0]


@orthonormal.defjvp
def _orthonormal_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    (x,), (t,) = primals, tangents
    q = orthonormal(x)
    relative = jax.lax.linalg.triangular_solve(adjoint(q) @ x, t, left_side=False, lower=False)
    turn = adjoint(q) @ relative
    below, diagonal = jnp.tril(turn, -1), jnp.diagonal(turn)
    # Antihermitian, so that the columns stay orthonormal.
    return q, q @ (below - adjoint(below) + jnp.diag(diagonal - jnp.conj(diagonal)) / 2)


def _of_length_one(x: Inexact[Array, "n n"]) -> Inexact[Array, "n n"]:
    return x / tree.positive(tree.norm(x, 0))
