"""Damped least squares problems: (JᵀJ + λ·D²)·x = g for several λ."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
import numpy as np
from jaxtyping import Array, Float

from ... import tree
from ..._core.fields.declare import checked_field
from ..._core.protocol.linearization import Linearization
from ..._core.protocol.real_vectors import real_size
from ..._core.text.messages import check_int, series
from ...tree.dtypes import sum_dtype
from ...tree.types import Params, Scalar

FORMS = ("auto", "residuals", "parameters")
SOLVERS = ("auto", "cholesky", "qr")

LARGEST = 16 * 2**30
"""The largest system in bytes. A larger one would run out of memory without a clear message."""


def solver_field() -> Any:
    """Declares how systems are solved."""
    return checked_field(_check_solver, "auto")


def chunk_field() -> Any:
    """Declares an optional number of examples."""
    check = functools.partial(check_int, least=1, or_else=", a number of examples")
    return checked_field(check, None)


def _check_solver(name: str, solver: object) -> None:
    if solver not in SOLVERS and not callable(solver):
        choices = [*map(repr, SOLVERS), "a function of a matrix and a right-hand side"]
        raise ValueError(f"{name} must be {series(choices, 'or')}, got {solver!r}.")


class Solution(NamedTuple):
    """x of a damped system, and solvers that reuse its factorization.

    They are not finite if the factorization failed.
    """

    x: Float[Array, " params"]
    again: Callable[[Array], Array]
    """Solves with another g for its x, with `"parameters"`."""
    from_rows: Callable[[Array], Array]
    """Solves with y for the x of g = Jᵀ·y."""


class System:
    """A linear least squares problem whose damping changes.

    **Arguments:**

    - `linear`: J, and the products with it.
    - `vector`: the target that Jx approximates, or `None` if only the gradient is known.
    - `gradient`: g, which is Jᵀ·vector if there is one.
    - `form`, `solver`: `"residuals"` or `"parameters"`, and `"cholesky"`, `"qr"` or a function.
    - `diagonal`: D, only for `"parameters"`. Defaults to 1.
    """

    def __init__(
        self,
        linear: Linearization,
        vector: Float[Array, " rows"] | None,
        gradient: Float[Array, " params"],
        form: str,
        solver: Any,
        diagonal: Float[Array, " params"] | None = None,
    ):
        self.linear, self.vector, self.gradient = linear, vector, gradient
        self.form, self.solver = form, solver
        ones = jnp.ones(linear.num_params, linear.dtype)
        self.diagonal = ones if diagonal is None else diagonal
        if solver == "qr":
            self._reduce()
            self.trace = jnp.sum(self._triangle**2)
        else:
            self._gram = linear.kernel() if form == "residuals" else _gram(linear)
            self.trace = jnp.trace(self._gram)

    def _reduce(self) -> None:
        """J as an orthogonal matrix times a small one, on either side."""
        linear = self.linear
        if self.form == "residuals":
            self._basis, self._triangle = jnp.linalg.qr(linear.jacobian().T)
            return
        size = linear.num_params + 1
        vector = self.vector
        if vector is None:
            vector = jnp.zeros(linear.num_rows, linear.dtype)

        def body(triangle: Array, rows: Array, part: Array) -> Array:
            new = jnp.concatenate([rows, part[:, None]], axis=1)
            return jnp.linalg.qr(jnp.concatenate([triangle, new]), mode="r")

        joined = linear.fold(body, jnp.zeros((size, size), linear.dtype), vector)
        self._triangle, self._projected = joined[:-1, :-1], joined[:-1, -1]

    def solve(self, damping: Scalar) -> Solution:
        """x for this damping."""
        damping = jnp.asarray(damping, self.linear.dtype)
        if self.solver == "qr":
            return self._solve_qr(damping)
        added = damping * self.diagonal**2 if self.form == "parameters" else damping
        # Not `.at[...].add`, a scatter, which compiles to five kernels.
        matrix = self._gram + jnp.diag(jnp.broadcast_to(added, self._gram.shape[:1]))
        if self.solver == "cholesky":
            factor = (jnp.linalg.cholesky(matrix), True)

            def again(b: Array) -> Array:
                return linalg.cho_solve(factor, b)
        else:

            def again(b: Array) -> Array:
                return jnp.asarray(self.solver(matrix, b), b.dtype)

        def from_rows(y: Array) -> Array:
            if self.form == "parameters":
                return again(self.linear.pull(y))
            return self.linear.pull(again(y))

        if self.form == "parameters":
            x = again(self.gradient)
        elif self.vector is not None:
            x = from_rows(self.vector)
        else:
            x = self._woodbury(again, damping)
        return Solution(x, again, from_rows)

    def _solve_qr(self, damping: Scalar) -> Solution:
        root = jnp.sqrt(damping)
        if self.form == "residuals":
            vector, small = self.vector, self._triangle.T
            assert vector is not None
            size = small.shape[1]
            stacked = jnp.concatenate([small, root * jnp.eye(size, dtype=small.dtype)])
            target = jnp.concatenate([vector, jnp.zeros(size, small.dtype)])
        else:
            size = self._triangle.shape[0]
            stacked = jnp.concatenate([self._triangle, root * jnp.diag(self.diagonal)])
            target = jnp.concatenate([self._projected, jnp.zeros(size, stacked.dtype)])
        joined = jnp.linalg.qr(jnp.concatenate([stacked, target[:, None]], axis=1), mode="r")
        upper = joined[:size, :size]

        def again(b: Array) -> Array:
            half = linalg.solve_triangular(upper, b, trans="T")
            return linalg.solve_triangular(upper, half)

        def from_rows(y: Array) -> Array:
            if self.form == "residuals":
                return self._basis @ again(self._triangle @ y)
            return again(self.linear.pull(y))

        if self.form == "parameters" and self.vector is None:
            return Solution(again(self.gradient), again, from_rows)
        x = linalg.solve_triangular(upper, joined[:size, size])
        return Solution(self._basis @ x if self.form == "residuals" else x, again, from_rows)

    def _woodbury(self, again: Callable[[Array], Array], damping: Scalar) -> Array:
        """(JᵀJ + λ)⁻¹·g from (JJᵀ + λ)⁻¹."""
        inside = self.linear.pull(again(self.linear.push(self.gradient)))
        return (self.gradient - inside) / damping


def _gram(linear: Linearization) -> Float[Array, "params params"]:
    size = linear.num_params
    zeros = jnp.zeros((size, size), linear.dtype)
    vector = jnp.zeros(linear.num_rows, linear.dtype)
    return linear.fold(lambda total, rows, _: total + tree.matmul(rows.T, rows), zeros, vector)


def chosen_form(who: str, form: str, solver: object, linear: Linearization) -> str:
    """The form that `"auto"` stands for. Raises an error for a system that is too large, or where
    QR would need a matrix that is not there."""
    if form == "auto":
        form = "residuals" if linear.num_rows < linear.num_params else "parameters"
    size = linear.num_rows if form == "residuals" else linear.num_params
    other = "parameters" if form == "residuals" else "residuals"
    advice = (
        f'Write `form="{other}"`, whose system is smaller.'
        if min(linear.num_rows, linear.num_params) < size
        else "Use fewer examples in a step, train fewer parameters with `trainable=`, or use "
        "`sl.soap`."
    )
    check_size(f"{who} would solve a system", size, form, linear.dtype, advice)
    if solver == "qr" and not may_be_qr(form, linear):
        reason = "`chunk`" if linear.chunk is not None else "a loss of outputs"
        raise ValueError(
            f'{who}(solver="qr") with {reason} needs `form="parameters"`. In the form of the '
            'residuals, use `solver="cholesky"`.'
        )
    return form


def check_size(what: str, size: int, of: str, dtype: np.dtype, advice: str) -> None:
    """Raises an error for a matrix that is too large."""
    needed = size**2 * dtype.itemsize
    if needed > LARGEST:
        raise ValueError(
            f"{what} of {size} × {size} for {size} {of}, which needs {needed} bytes "
            f"({needed / 2**30:.0f} GiB); the limit is {LARGEST / 2**30:.0f} GiB. {advice}"
        )


def dtype_and_size(params: Params) -> tuple[np.dtype, int]:
    """The dtype in which parameters are one real vector, and its size."""
    return sum_dtype(params), sum(map(real_size, jax.tree.leaves(params)))


def system_bytes(params: Params) -> int:
    """The bytes of a matrix with a row and a column for each parameter."""
    dtype, size = dtype_and_size(params)
    return size**2 * dtype.itemsize


def may_be_qr(form: str, linear: Linearization) -> bool:
    """Whether the matrix of the system has a QR decomposition that fits in memory."""
    return form == "parameters" or (linear.vector is not None and linear.chunk is None)


def solver_of(
    linear: Linearization,
    vector: Float[Array, " rows"] | None,
    gradient: Float[Array, " params"],
    form: str,
    solver: Any,
) -> tuple[Callable[[Scalar], Float[Array, " params"]], Scalar]:
    """Solves with a damping for x; and the trace of JᵀJ.

    The solver `"auto"` is Cholesky where it has enough digits, and else QR. The Gram matrix has
    half the digits of J: the relative error of x is about ε·trace/λ.
    """
    system = System(linear, vector, gradient, form, "cholesky" if solver == "auto" else solver)
    least = 1e3 * jnp.finfo(linear.dtype).eps * system.trace

    def solve(damping: Scalar) -> Array:
        return system.solve(damping).x

    def by_qr(damping: Scalar) -> Array:
        return System(linear, vector, gradient, form, "qr").solve(damping).x

    def by_condition(damping: Scalar) -> Array:
        return jax.lax.cond(damping >= least, solve, by_qr, damping)

    both = solver == "auto" and may_be_qr(form, linear)
    return by_condition if both else solve, system.trace
