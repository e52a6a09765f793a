"""KL-SOAP: SOAP with the factors of the closest Gaussian."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ... import fields, tree
from ...rules.matrices._kronecker import (
    Frequency,
    bounded_entries,
    by_side,
    frequency_field,
    into_basis,
    iterated_eigenvectors,
)
from ...rules.matrices._orthonormal import adjoint, adjoint_times
from ...rules.matrices.soap import AbstractInEigenbasis, AbstractInEigenbasisState
from ...tree.types import Params
from ...where.layout import LayoutLike

_LEAST = 1 / 4000**2
"""The smallest variance that KL-SOAP divides by."""


class ScaleByKlSoapState(AbstractInEigenbasisState):
    """The state of `ScaleByKlSoap`."""

    variances: PyTree[Inexact[Array, "_ _"]] = fields.per_param(spread=True)
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
    >>> tx = sl.adam(1e-3).partition({sl.where.matrix(): sl.contrib.ScaleByKlSoap() | hyperball})

    ```

    Entries of G' and M that are not above the rounding error of the largest one count as 0, as in
    `ScaleBySoap`. The code of the paper's authors divides the first factors by more, and refreshes
    every 10 steps. Matrices, memory and refreshes are as in `ScaleBySoap`, with n + m more
    elements.

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

    b1: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    precondition_frequency: Frequency = frequency_field(1)
    shampoo_beta: fields.OptionalNumber = fields.hyperparameter(None, within="[0, 1)")
    max_size: int = fields.count_field(10_000)
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    layout: LayoutLike = fields.layout_field()

    refreshes: ClassVar[tuple[str, ...]] = ("rotated_mu", "basis")

    def init(self, params: Params) -> ScaleByKlSoapState:
        def variances(rows: int, columns: int, dtype: Any) -> tuple[Array, ...]:
            factors = self.zeros(rows, columns, dtype)
            return tuple(jnp.zeros(len(x), tree.real_dtype(dtype)) for x in factors)

        new = self.for_each_matrix(params, variances)
        return ScaleByKlSoapState(**self.at_first(params), variances=new)

    def refresh(self, g, leaf):
        del g
        leaf.basis, leaf.rotated_mu, _ = self.follow(
            leaf.basis, leaf.statistics, leaf.rotated_mu, iterated_eigenvectors
        )

    def advance(self, g, leaf):
        g = bounded_entries(g)
        rotated = into_basis(g, leaf.basis, self.max_size)
        moments = self.moments(rotated, leaf.rotated_mu, leaf.rotated_nu)
        leaf.rotated_mu, leaf.rotated_nu = moments
        share = jnp.where(self.is_first, 1, self.c_s)

        def sides(factors: Sequence[Array]) -> list[Array | None]:
            return by_side(g.shape, self.max_size, factors)

        def whitened(x: Array, basis: Array | None, inverse_root: Array | None) -> Array:
            """Λ^(−1/2)·Qᴴ·x; x itself without a basis, and in the first step."""
            if basis is None or inverse_root is None:
                return x
            wide = bounded_entries(inverse_root[:, None] * adjoint_times(basis, x))
            return jnp.where(self.is_first, x, wide)

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
            variances.append(jnp.where(self.is_first, 0.1, variance + self.c_s * (mean - variance)))
        leaf.statistics, leaf.variances = tuple(statistics), tuple(variances)
