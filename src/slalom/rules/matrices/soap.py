"""Adam in the eigenbasis of two factors: SOAP and KL-SOAP."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import tree
from ..._core.fields.declare import (
    Hyperparameter,
    count_field,
    dtype_field,
    hyperparameter,
    layout_field,
)
from ..._core.fields.schedule import AbstractSchedule
from ..._core.protocol.context import Context
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.transform import State
from ..._core.state.marks import param_like, per_leaf, per_param, until_reset
from ...tree.types import Params
from ...where.layout import LayoutLike
from ..momentum._first_moment import first_moment
from ._kronecker import (
    adjoint,
    adjoint_times,
    bounded_entries,
    by_side,
    first_eigenvectors,
    frequency_at,
    frequency_field,
    into_basis,
    iterated_eigenvectors,
    out_of_basis,
    refreshed_eigenvectors,
    sides_as_text,
    toward_products,
    zeros_of_sides,
)

_LEAST = 1 / 4000**2
"""The smallest variance that KL-SOAP divides by."""


class AbstractInEigenbasis(AbstractRule[State]):
    """Adam in a basis of two factors, which follow the gradients.

    The first step makes the factors, and does not update. The second one begins with their first
    eigenvectors.
    """

    b1: eqx.AbstractVar[Hyperparameter]
    b2: eqx.AbstractVar[Hyperparameter]
    eps: eqx.AbstractVar[Hyperparameter]
    precondition_frequency: eqx.AbstractVar[int | Int[Array, "*runs"] | AbstractSchedule]
    shampoo_beta: eqx.AbstractVar[Hyperparameter | None]
    max_size: eqx.AbstractVar[int]

    over: ClassVar[str] = "matrix"
    refresh_before: ClassVar[str] = "advance"

    # --- the phases -------------------------------------------------------------------------

    def at(self, context: Context | None) -> SimpleNamespace:
        now = super().at(context)
        now.frequency = jnp.asarray(frequency_at(self, context))
        return now

    def begin(self, now, state):
        now.is_first, is_second = state.age == 0, state.age == 1
        now.starts = jnp.any(is_second)
        follows = ~now.starts & (state.since >= now.frequency)
        now.due = is_second | follows
        state.since = jnp.where(
            now.starts, state.since, jnp.where(follows, 1, tree.increment(state.since))
        )
        now.c1, now.c2 = (jnp.where(now.is_first, 0, 1 - b) for b in (now.b1, now.b2))
        now.c_s = 1 - (now.b2 if now.shampoo_beta is None else now.shampoo_beta)
        updates = jnp.maximum(state.age, 1)
        now.mu_scale = tree.bias_correction(now.b1, updates)
        now.nu_scale = tree.bias_correction(now.b2, updates)
        state.age = tree.increment(state.age)

    def direction(self, now, g, leaf):
        del g
        divisor = tree.root(tree.positive(leaf.rotated_nu) * now.nu_scale) + now.eps
        return out_of_basis(leaf.rotated_mu * now.mu_scale / divisor, leaf.basis, self.max_size)

    def zeros(self, rows: int, columns: int, dtype: Any) -> tuple[Array, ...]:
        """The factors of a matrix before the first step."""
        return zeros_of_sides((rows, columns), self.max_size, dtype)

    def at_first(self, params: Params) -> dict[str, Any]:
        """The fields that the states have in common, before the first step."""
        return {
            "age": tree.fresh_count(),
            "since": tree.fresh_count(),
            "rotated_mu": first_moment(self, params, "b1"),
            "rotated_nu": tree.second_moment(params),
            "statistics": self.for_each_matrix(params, self.zeros),
            "basis": self.for_each_matrix(params, self.zeros),
        }

    # --- one matrix -------------------------------------------------------------------------

    def follow(self, now: Any, leaf: Any, again: Any) -> list[Array]:
        """Brings the basis of a matrix up to date, and turns the mean with it.

        **Arguments:**

        - `now`, `leaf`: as for `AbstractRule.refresh`.
        - `again`: from a factor and its basis to a better one, and where its vectors were.

        **Returns:** for each side where its vectors were.
        """
        old = leaf.basis
        found: list[tuple[Array, Array]] = []
        for x, q in zip(leaf.statistics, old, strict=True):
            # One side after the other.
            starts = tree.after(now.starts, found[-1:])
            found.append(jax.lax.cond(starts, first_eigenvectors, again, x, q))
        leaf.basis = tuple(q for q, _ in found)
        mu = tree.after(leaf.rotated_mu, found[-1:])
        with jax.default_matmul_precision("highest"):
            # Less work than with the products of old and new eigenvectors.
            mu = out_of_basis(mu, old, self.max_size)
            leaf.rotated_mu = into_basis(mu, leaf.basis, self.max_size)
        return [order for _, order in found]

    def moments(self, now: Any, rotated: Array, leaf: Any) -> None:
        """Advances the moments by a gradient in the basis."""
        leaf.rotated_mu = now.b1 * leaf.rotated_mu + now.c1 * rotated
        leaf.rotated_nu = now.b2 * leaf.rotated_nu + now.c2 * tree.bounded_square(rotated)

    # --- traits -----------------------------------------------------------------------------

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return sides_as_text(self, params, "unrotated")


class ScaleBySoapState(eqx.Module):
    """The state of `ScaleBySoap`."""

    age: Int[Array, "*leaves"] = per_leaf()
    since: Int[Array, ""] = until_reset()
    """The number of steps since the last refresh."""
    rotated_mu: PyTree[Inexact[Array, "..."]] = param_like()
    """The mean of gradients, in the eigenbasis."""
    rotated_nu: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")
    """The mean of squares, in the eigenbasis."""
    statistics: PyTree[Inexact[Array, "_ _ _"]] = per_param(spread=True)
    """At each leaf a tuple of L and R, without those of sides that are too long."""
    basis: PyTree[Inexact[Array, "_ _ _"]] = per_param(spread=True)
    """At each leaf a tuple of the eigenvectors of L and R."""


class ScaleBySoap(AbstractInEigenbasis[ScaleBySoapState]):
    """SOAP: Adam in the basis of the eigenvectors of Shampoo's two factors.

        G' = Q_Lᴴ·G·Q_R
        Mₜ = β₁·Mₜ₋₁ + (1 − β₁)·G',   Vₜ = β₂·Vₜ₋₁ + (1 − β₂)·|G'|²
        U = Q_L·(M̂ₜ / (√V̂ₜ + ε))·Q_Rᴴ
        Lₜ = β_s·Lₜ₋₁ + (1 − β_s)·G·Gᴴ,   Rₜ = β_s·Rₜ₋₁ + (1 − β_s)·Gᴴ·G

    Q_L and Q_R are the eigenvectors of L and R. Every f steps one step of a power iteration,
    Q ← QR(L·Q), makes them follow; M turns with them, and V is permuted as their eigenvalues are
    sorted. All of this happens in one branch, so the steps in between pay nothing for it. The first
    step of a parameter computes L, R and their eigenvectors, and does not update it.

    Follows the authors' code where the paper leaves a choice: the first step only initializes, and
    a step uses the basis of the previous step. It differs from both in where ε is added: as in
    `ScaleByAdam`, after the correction of the bias.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. A side that is
    longer than `max_size` keeps the identity as its basis. L, R, Q_L and Q_R have 2·(n² + m²)
    elements for an n × m matrix, in at least float32. Devices that share a matrix divide them, if
    the mesh has automatic axes. Under a `vmap` that batches the state, each step costs as much as a
    refresh.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `precondition_frequency`: f, the number of steps from one refresh to the next: an int ≥ 1,
        or a schedule, rounded to the nearest integer ≥ 1.
    - `shampoo_beta`: β_s, the decay of L and R, in [0, 1). Defaults to β₂.
    - `max_size`: the longest side that has a basis.
    - `mu_dtype`: the dtype in which M is stored; see `ScaleByAdam`.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "Vyas et al., [SOAP: Improving and Stabilizing Shampoo using
        Adam](https://arxiv.org/abs/2409.11321), 2024"
    """

    b1: Hyperparameter = hyperparameter(0.95, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.95, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    precondition_frequency: int | Int[Array, "*runs"] | AbstractSchedule = frequency_field(10)
    shampoo_beta: Hyperparameter | None = hyperparameter(None, within="[0, 1)")
    max_size: int = count_field(10_000)
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    layout: LayoutLike = layout_field()

    refreshes: ClassVar[tuple[str, ...]] = ("rotated_mu", "rotated_nu", "basis")

    def init(self, params: Params) -> ScaleBySoapState:
        return ScaleBySoapState(**self.at_first(params))

    def refresh(self, now, g, leaf):
        del g
        orders = self.follow(now, leaf, refreshed_eigenvectors)
        nu = tree.after(leaf.rotated_nu, leaf.basis[-1:])
        rows, columns = by_side(nu.shape, self.max_size, orders)
        nu = nu if rows is None else nu[rows]
        leaf.rotated_nu = nu if columns is None else nu[:, columns]

    def advance(self, now, g, leaf):
        g = bounded_entries(g)
        self.moments(now, into_basis(g, leaf.basis, self.max_size), leaf)
        leaf.statistics = toward_products(leaf.statistics, now.c_s, g, self.max_size)


class ScaleByKlSoapState(eqx.Module):
    """The state of `ScaleByKlSoap`."""

    age: Int[Array, "*leaves"] = per_leaf()
    since: Int[Array, ""] = until_reset()
    """The number of steps since the last refresh."""
    rotated_mu: PyTree[Inexact[Array, "..."]] = param_like()
    """The mean of gradients, in the basis."""
    rotated_nu: PyTree[Inexact[Array, "..."]] = param_like("nonnegative")
    """The mean of squares, in the basis."""
    statistics: PyTree[Inexact[Array, "_ _ _"]] = per_param(spread=True)
    """At each leaf a tuple of L and R, without those of sides that are too long."""
    basis: PyTree[Inexact[Array, "_ _ _"]] = per_param(spread=True)
    """At each leaf a tuple of Q_L and Q_R."""
    variances: PyTree[Inexact[Array, "_ _"]] = per_param(spread=True)
    """At each leaf a tuple of λ_L and λ_R."""


class ScaleByKlSoap(AbstractInEigenbasis[ScaleByKlSoapState]):
    """KL-SOAP: SOAP with factors that estimate the covariance of gradients together.

        G' = Q_Lᴴ·G·Q_R
        Mₜ = β₁·Mₜ₋₁ + (1 − β₁)·G',   Vₜ = β₂·Vₜ₋₁ + (1 − β₂)·|G'|²
        U = Q_L·(M̂ₜ / (√V̂ₜ + ε))·Q_Rᴴ
        Lₜ = β_s·Lₜ₋₁ + (1 − β_s)·G·(Q_R·Λ_R⁻¹·Q_Rᴴ)·Gᴴ / m
        Rₜ = β_s·Rₜ₋₁ + (1 − β_s)·Gᴴ·(Q_L·Λ_L⁻¹·Q_Lᴴ)·G / n

    for an n × m matrix. Each factor is a mean of gradients that the other one has whitened, where
    SOAP takes G·Gᴴ and Gᴴ·G. The Kronecker product of L and R is then as close to the covariance of
    the gradients as it can be, in the sense of the Kullback–Leibler divergence. Λ_L and Λ_R are
    diagonal, with means of the same kind in the basis:

        λ_L ← β_s·λ_L + (1 − β_s)·mean_j(|G'_ij|² / λ_R,j),   and λ_R likewise

    They start at 0.1, and count as at least 1/4000². Every f steps Q_L ← QR(L·Q_L), and likewise
    Q_R, and M turns with them; V, λ_L and λ_R stay. The first step of a parameter computes
    G·Gᴴ / m, Gᴴ·G / n and their eigenvectors, and does not update it.

    Follows the code of a record of modded-nanogpt, which refreshes in each step and gives matrices
    the norm that they started with; M and V are not corrected for their start at zero there, which
    a trust ratio hides:

    ```python
    >>> hyperball = sl.ScaleByTrustRatio() | sl.ScaleByLearningRate(0.018) | sl.KeepInitialNorm()
    >>> tx = sl.adam(1e-3).partition({sl.where.matrix(): sl.ScaleByKlSoap() | hyperball})

    ```

    The code of the paper's authors divides the first factors by more, and refreshes every 10 steps.
    Matrices, memory and refreshes are as in `ScaleBySoap`, with n + m more elements.

    **Arguments:**

    - `b1`, `eps`, `max_size`, `mu_dtype`, `layout`: as in `ScaleBySoap`.
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `precondition_frequency`: f, the number of steps from one refresh to the next: an int ≥ 1,
        or a schedule, rounded to the nearest integer ≥ 1.
    - `shampoo_beta`: β_s, the decay of L, R, λ_L and λ_R, in [0, 1). Defaults to β₂.

    ??? cite "Lin et al., [Understanding and Improving Shampoo and SOAP via Kullback–Leibler
        Minimization](https://arxiv.org/abs/2509.03378), 2025;
        [modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), 2026, the records of track
        3"
    """

    b1: Hyperparameter = hyperparameter(0.95, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    precondition_frequency: int | Int[Array, "*runs"] | AbstractSchedule = frequency_field(1)
    shampoo_beta: Hyperparameter | None = hyperparameter(None, within="[0, 1)")
    max_size: int = count_field(10_000)
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    layout: LayoutLike = layout_field()

    refreshes: ClassVar[tuple[str, ...]] = ("rotated_mu", "basis")

    def init(self, params: Params) -> ScaleByKlSoapState:
        def variances(rows: int, columns: int, dtype: Any) -> tuple[Array, ...]:
            factors = self.zeros(rows, columns, dtype)
            return tuple(jnp.zeros(len(x), tree.real_dtype(dtype)) for x in factors)

        new = self.for_each_matrix(params, variances)
        return ScaleByKlSoapState(**self.at_first(params), variances=new)

    def refresh(self, now, g, leaf):
        del g
        self.follow(now, leaf, iterated_eigenvectors)

    def advance(self, now, g, leaf):
        g = bounded_entries(g)
        rotated = into_basis(g, leaf.basis, self.max_size)
        self.moments(now, rotated, leaf)
        share = jnp.where(now.is_first, 1, now.c_s)

        def sides(factors: Sequence[Array]) -> list[Array | None]:
            return by_side(g.shape, self.max_size, factors)

        def whitened(x: Array, basis: Array | None, inverse_root: Array | None) -> Array:
            """Λ^(−1/2)·Qᴴ·x; x itself without a basis, and in the first step."""
            if basis is None or inverse_root is None:
                return x
            wide = bounded_entries(inverse_root[:, None] * adjoint_times(basis, x))
            return jnp.where(now.is_first, x, wide)

        roots = sides([jax.lax.rsqrt(jnp.maximum(x, _LEAST)) for x in leaf.variances])
        # Each side is whitened by the other one.
        others = [(adjoint(g), rotated.mT), (g, rotated)]
        statistics, variances = [], []
        for (x, in_basis), old, variance, q, root in zip(
            others,
            sides(leaf.statistics),
            sides(leaf.variances),
            sides(leaf.basis)[::-1],
            roots[::-1],
            strict=True,
        ):
            if old is None or variance is None:
                continue
            y = whitened(x, q, root)
            statistics.append(old + share * (adjoint(y) @ y / len(y) - old))
            scaled = in_basis if root is None else root[:, None] * in_basis
            mean = jnp.mean(tree.bounded_square(scaled), axis=0)
            variances.append(jnp.where(now.is_first, 0.1, variance + now.c_s * (mean - variance)))
        leaf.statistics, leaf.variances = tuple(statistics), tuple(variances)
