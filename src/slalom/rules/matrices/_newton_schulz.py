"""Newton–Schulz iterations: odd polynomials of matrices, which act on the singular values alone.

With X = U·diag(σ)·Vᴴ, a step aX + b(XXᴴ)X + c(XXᴴ)²X is U·diag(aσ + bσ³ + cσ⁵)·Vᴴ. The coefficients
of each step are such that all singular values come close to 1.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact

from ... import tree
from ...tree.types import Scalar
from ._orthonormal import adjoint

Triple = tuple[float, float, float]

_STANDARD: Triple = (3.4445, -4.7750, 2.0315)

SETS: dict[str, tuple[Triple, ...]] = {
    "tuned": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "ten_steps": (_STANDARD,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
"""The coefficients of each step, by name."""

MARGINS = {"polar_express": 1.02}
"""The factor by which the largest singular value stays below 1 at first, if the set needs one."""

PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")

GRAM_RATIO = 1.5
"""The ratio of the sides above which an iteration on the small Gram matrix is less work.

For an n × m matrix and 5 steps it takes 8n²m + 28n³ operations instead of 20n²m + 10n³.
"""


def iteration(coefficients: str | tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    """The coefficients of each step: the last ones of a set, or one triple again and again."""
    if coefficients == "standard":
        return (_STANDARD,) * steps
    triples = SETS[coefficients] if isinstance(coefficients, str) else coefficients
    return triples * steps if len(triples) == 1 else triples[len(triples) - steps :]


def newton_schulz(
    x: Inexact[Array, "*batch rows columns"],
    triples: tuple[Triple, ...],
    eps: Scalar,
    *,
    preconditioning: str = "frobenius",
    margin: float = 1.0,
    dtype: DTypeLike | None = None,
) -> Inexact[Array, "*batch rows columns"]:
    """The result of the iteration, in the dtype of `x`.

    **Arguments:**

    - `x`: matrices, or a batch of them.
    - `triples`: the coefficients of each step.
    - `eps`: the relative increase of the Frobenius norm, ≥ 0.
    - `preconditioning`: how the singular values are brought below 1 at first.
    - `margin`: the factor by which they stay below 1.
    - `dtype`: the dtype of the iteration. Defaults to the dtype of `x`.
    """
    if x.size == 0:
        return x
    rows, columns = x.shape[-2:]
    # Products of the short sides, and less work. Of a square matrix AOL scales the inputs, as in
    # Optax, which stores inputs first.
    turned = rows > columns or (rows == columns and preconditioning == "aol")
    x = jnp.swapaxes(x, -1, -2) if turned else x
    dtype = x.dtype if dtype is None else tree.storage_dtype(x.dtype, dtype)
    wide = jnp.finfo(dtype).bits >= 32
    small, gram = _preconditioned(divided_by_norm(x, eps), preconditioning, margin)
    small = small.astype(dtype)
    # The eigenvalues of a Gram matrix are squares, and half precision would not keep small ones.
    if wide and x.shape[-1] > GRAM_RATIO * x.shape[-2]:
        result = _on_gram_matrices(small, gram, triples)
    else:
        result = _on_matrices(small, None if gram is None else gram.astype(dtype), triples)
    result = result.astype(x.dtype)
    return jnp.swapaxes(result, -1, -2) if turned else result


def balanced(
    function: Callable[..., Array], times: int, x: Inexact[Array, "*batch short long"], eps: Scalar
) -> Inexact[Array, "*batch short long"]:
    """The result of an iteration. The columns of `x` were rescaled until the columns of the result
    had nearly equal norms; columns of zeros stay zeros.

    **Arguments:**

    - `function`: the iteration, a function of `x` and `eps`.
    - `times`: how often, ≥ 1.
    - `x`: matrices, or a batch of them.
    - `eps`: as for the iteration.
    """
    short, long = x.shape[-2:]
    if short == long or x.size == 0:
        return function(x, eps=eps)
    x = divided_by_norm(x, 0.0, (-2,))
    result = function(x, eps=eps)
    for _ in range(times - 1):
        squares = jnp.sum(tree.abs_squared(result), -2, keepdims=True)
        # A column that was almost lost must not dwarf the others in the next iteration.
        x = x * tree.inverse_root(jnp.maximum(squares * (long / short), 1e-14))
        result = function(x, eps=eps)
    return result


# --- the iteration --------------------------------------------------------------------------


def _on_matrices(x: Array, gram: Array | None, triples: tuple[Triple, ...]) -> Array:
    """Each step as it is written: aX + (b·A + c·A²)X with A = XXᴴ."""

    def step(x: Array, gram: Array, triple: Triple | Array) -> Array:
        a, b, c = triple
        return a * x + (b * gram + c * (gram @ gram)) @ x

    if gram is not None:
        x, triples = step(x, gram, triples[0]), triples[1:]
    # A loop, since XLA would compile each step of each matrix.
    numbers = jnp.asarray(triples, tree.real_dtype(x.dtype)).reshape(-1, 3)
    return jax.lax.scan(lambda x, triple: (step(x, _gram(x), triple), None), x, numbers)[0]


def _on_gram_matrices(x: Array, gram: Array | None, triples: tuple[Triple, ...]) -> Array:
    """The same polynomial Q(XXᴴ)·X, where Q is found by products of small matrices alone.

    A rounding of the Gram matrix is a rounding of σ², which hides small σ. So the steps are done
    in groups of two or three, each of which raises small σ, from a new Gram matrix.
    """
    groups = -(-len(triples) // 3)
    ends = [len(triples) * (i + 1) // groups for i in range(groups)]
    for begin, end in zip([0, *ends], ends, strict=False):
        gram = _gram(x) if gram is None else gram
        factor = _factor(gram, triples[begin])
        step = factor
        for triple in triples[begin + 1 : end]:
            gram = step @ gram @ step  # all of them are polynomials of one matrix
            step = _factor(gram, triple)
            factor = step @ factor
        x, gram = factor @ x, None
    return x


def _factor(gram: Array, triple: Triple) -> Array:
    """a + b·A + c·A²."""
    a, b, c = triple
    identity = jnp.broadcast_to(a * jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
    return identity + b * gram + c * (gram @ gram)


def _gram(x: Array) -> Array:
    return x @ adjoint(x)


# --- the first scaling ----------------------------------------------------------------------


def divided_by_norm(x: Array, eps: Scalar | float, axes: tuple[int, ...] = (-2, -1)) -> Array:
    """X / ((1 + ε)·‖X‖) with the norm over these axes, for numbers of any size; 0 / 0 = 0."""
    small, norm, _ = tree.norms_along(x, axes)
    divisor = norm * (1 + jnp.asarray(eps, norm.dtype))
    return small * (1 / jnp.where(divisor == 0, 1, divisor))


def _preconditioned(x: Array, preconditioning: str, margin: float) -> tuple[Array, Array | None]:
    """Matrices without singular values above 1 / margin, and their Gram matrices if they are known.

    The Frobenius norm of `x` is 1.
    """
    if preconditioning == "frobenius":
        return (x if margin == 1 else x * (1 / margin)), None
    gram = _gram(x)
    if preconditioning == "aol":  # no singular value exceeds 1 if row i is divided by √Σⱼ |XXᴴ|ᵢⱼ
        sums = jnp.sum(jnp.abs(gram), -1, keepdims=True)
        factor = tree.inverse_root(_floor(sums)) * (1 / margin)
    else:
        if preconditioning == "spectral":  # σ₁²
            square = jnp.linalg.eigvalsh(jax.lax.stop_gradient(gram))[..., -1, None, None]
        else:  # that of the Schatten norm of order 4, which is closer to σ₁
            square = tree.norm(gram, (-2, -1))
        factor = 1 / (tree.root(_floor(square)) * margin)
    return x * factor, gram * factor * jnp.swapaxes(factor, -1, -2)


def _floor(square: Array) -> Array:
    """A divisor that is not 0. Only rounding is below it."""
    return jnp.maximum(square, float(jnp.finfo(square.dtype).eps) ** 2)
