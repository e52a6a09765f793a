"""Variants of SOAP: KL-SOAP, and the signs of SPlus."""

from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import fields, tree
from ...rules.matrices._kronecker import (
    AbstractTwoSided,
    Frequency,
    bounded_entries,
    first_eigenvectors,
    frequency_field,
    iterated_eigenvectors,
)
from ...rules.matrices._orthonormal import adjoint, adjoint_times, product, products_of
from ...rules.matrices.soap import AbstractInEigenbasis, AbstractInEigenbasisState
from ...rules.momentum.momentum import first_moment
from ...tree.rounding import power_of_two
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

    b2: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    precondition_frequency: Frequency = frequency_field(1)

    refreshes: ClassVar[tuple[str, ...]] = ("rotated_mu", "basis")

    def init(self, params: Params) -> ScaleByKlSoapState:
        def variances(rows: int, columns: int, dtype: np.dtype) -> tuple[Array, ...]:
            factors = self._zeros(rows, columns, dtype)
            return tuple(jnp.zeros(len(x), tree.real_dtype(dtype)) for x in factors)

        new = self.for_each_matrix(params, variances)
        return ScaleByKlSoapState(**self._fresh(params), variances=new)

    def refresh(self, g, leaf):
        leaf.basis, leaf.rotated_mu, _ = self._follow_basis(
            leaf.basis, leaf.statistics, leaf.rotated_mu, iterated_eigenvectors
        )

    def _follow_factors(self, g, rotated, leaf):
        share = jnp.where(self.is_first, 1, self.c_s)

        def sides(factors: Sequence[Array]) -> list[Array | None]:
            return self._by_side(g.shape, factors)

        def whitened(x: Array, basis: Array | None, inverse_root: Array | None) -> Array:
            """Λ^(−1/2)·Qᴴ·x; x itself without a basis, and in the first step."""
            if basis is None or inverse_root is None:
                return x
            wide = bounded_entries(inverse_root[:, None] * product(basis, x, adjoint_times))
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
            statistics.append(old + share * (products_of(y) / len(y) - old))
            scaled = in_basis if root is None else root[:, None] * in_basis
            mean = jnp.mean(tree.bounded_square(scaled), axis=0)
            variances.append(jnp.where(self.is_first, 0.1, variance + self.c_s * (mean - variance)))
        leaf.statistics, leaf.variances = tuple(statistics), tuple(variances)


class ScaleBySplusState(eqx.Module):
    """The state of `ScaleBySplus`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    since: Int[Array, ""] = fields.until_reset()
    """The number of steps since the last refresh."""
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    """The mean of gradients."""
    statistics: PyTree[Inexact[Array, "_ _ _"]] = fields.per_param(spread=True)
    """A tuple of L and R for each leaf, divided by the square of `unit`. Sides that are too long
    have none."""
    unit: PyTree[Float[Array, " matrices"]] = fields.per_param()
    """A power of 2 near the largest entry of all gradients, so that squares do not underflow."""
    basis: PyTree[Inexact[Array, "_ _ _"]] = fields.per_param(spread=True)
    """At each leaf a tuple of Q_L and Q_R."""


class ScaleBySplus(AbstractTwoSided[ScaleBySplusState]):
    """SPlus: the sign of the mean gradient in the basis of the eigenvectors of Shampoo's factors.

        Mₜ = β₁·Mₜ₋₁ + (1 − β₁)·G
        U = 2/(n + m)·Q_L·sign(Q_Lᴴ·Mₜ·Q_R)·Q_Rᴴ
        Lₜ = β₂·Lₜ₋₁ + (1 − β₂)·G·Gᴴ,   Rₜ = β₂·Rₜ₋₁ + (1 − β₂)·Gᴴ·G

    for an n × m matrix. Q_L and Q_R are the eigenvectors of L and R after the first step, and again
    every f steps; the first step takes the identity. A sign bounds the update however old the basis
    is, so f may be large. Evaluate averaged parameters, as the paper does, and give what is not a
    matrix to another rule:

    ```python
    >>> rule = sl.contrib.ScaleBySplus() | sl.ScaleByLearningRate(0.2)
    >>> tx = sl.adam(1e-3).partition({sl.where.matrix(): rule}).average(0.999)

    ```

    The factor 2/(n + m) lets one learning rate suit several widths: about twice Adam's, times the
    width. Differs from the authors' code, which decays after the step, by the same factor, and
    averages before the decay; its other parameters take the sign of M, times 0.001, and so do
    matrices with a side that is too long, which here keeps the identity as its basis. The code for
    Optax averages the parameters before the step instead.

    An entry in the basis that is not above the rounding error of the largest one counts as 0. Where
    gradients have a low rank, as after one step on a few examples, the authors' code steps at
    random along all other eigenvectors.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. L, R, Q_L and Q_R
    have 2·(n² + m²) elements for an n × m matrix, in at least float32. Devices that share a matrix
    divide them, if the mesh has automatic axes. Under a `vmap` that batches the state, each step
    costs as much as a refresh.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of L and R, in [0, 1).
    - `precondition_frequency`: f, the number of steps from one refresh to the next: an int ≥ 1,
        or a schedule, rounded to the nearest integer ≥ 1.
    - `max_size`: the longest side that has a basis.
    - `mu_dtype`: the dtype in which M is stored; see `ScaleByAdam`.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "Frans, Levine & Abbeel, [A Stable Whitening Optimizer for Efficient Neural Network
        Training](https://arxiv.org/abs/2506.07254), 2025"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    precondition_frequency: Frequency = frequency_field(100)
    max_size: int = fields.count_field(10_000)
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    layout: LayoutLike = fields.layout_field()

    refreshes: ClassVar[tuple[str, ...]] = ("basis",)

    def init(self, params: Params) -> ScaleBySplusState:
        def identity(rows: int, columns: int, dtype: np.dtype) -> tuple[Array, ...]:
            return tuple(jnp.eye(len(x), dtype=dtype) for x in self._zeros(rows, columns, dtype))

        return ScaleBySplusState(
            age=tree.fresh_count(),
            since=tree.fresh_count(),
            mu=first_moment(self, params, "b1"),
            statistics=self.for_each_matrix(params, self._zeros),
            unit=self.for_each_matrix(params, lambda *_: (jnp.zeros((), jnp.float32),)),
            basis=self.for_each_matrix(params, identity),
        )

    def begin(self, state):
        is_second = state.age == 1
        follows = ~jnp.any(is_second) & (state.since >= self.precondition_frequency)
        self.due = is_second | follows
        state.since = jnp.where(follows, 1, tree.increment(state.since))
        self.c1, self.c2 = 1 - self.b1, 1 - self.b2
        # In the first basis, the identity, nothing is rounded.
        self.is_exact = state.age == 0
        state.age = tree.increment(state.age)

    def refresh(self, g, leaf):
        basis: list[Array] = []
        for x, q in zip(leaf.statistics, leaf.basis, strict=True):
            # One side after the other.
            basis.append(first_eigenvectors(tree.after(x, basis[-1:]), q)[0])
        leaf.basis = tuple(basis)

    def advance(self, g, leaf):
        (old,) = leaf.unit
        largest = jnp.max(jnp.maximum(jnp.abs(g.real), jnp.abs(g.imag)), initial=0)
        near = power_of_two(tree.cast(largest, np.dtype(np.float32)), least=2.0**-126)
        unit = jnp.maximum(old, tree.cast(near, old.dtype))
        leaf.unit = (unit,)
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        statistics = tuple(x * (old / unit) ** 2 for x in leaf.statistics)
        leaf.statistics = self._toward_products(statistics, self.c2, g * (1 / unit))

    def direction(self, g, leaf):
        x = self._into_basis(leaf.mu * (1 / leaf.unit[0]), leaf.basis)
        sign = jnp.where(self.is_exact | self._above_rounding(x), jnp.sign(x), 0)
        return self._out_of_basis(sign * (2 / max(sum(g.shape), 1)), leaf.basis)
