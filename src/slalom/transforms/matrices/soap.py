"""Adam in the eigenbasis of Shampoo: SOAP."""

from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, Int, PyTree

from ... import tree
from ..._core.engine.matrices import for_each_matrix, matrices, refuse_explicit_axes
from ..._core.fields.declare import Hyperparameter, dtype_field, hyperparameter, layout_field
from ..._core.fields.schedule import AbstractSchedule
from ..._core.protocol.context import Context
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.marks import param_like, per_leaf, per_param, until_reset
from ...tree.types import Params, Updates
from ...where.layout import LayoutLike, Matrix
from ..momentum._first_moment import first_moment
from ._kronecker import (
    adjoint,
    adjoint_times,
    bounded_entries,
    by_rows,
    by_side,
    eigenvectors,
    frequency_at,
    frequency_field,
    has_factor,
    in_batches,
    in_place_of,
    of_sides,
    refreshed_eigenvectors,
    sides_as_text,
    size_field,
    times_adjoint,
)


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


class ScaleBySoap(AbstractTransform[ScaleBySoapState]):
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
    a step uses the basis of the step before. It differs from both where ε is added: as in
    `ScaleByAdam`, after the correction of the bias.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. A side that is
    longer than `max_size` keeps the identity as its basis. L, R, Q_L and Q_R take 2·(n² + m²)
    numbers for an n × m matrix, in at least float32. Devices that share a matrix divide them, if
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
    - `nu_dtype`: the dtype in which V is stored, which is real also for complex parameters.
        Defaults to the parameter's dtype, but at least float32.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "Vyas et al., [SOAP: Improving and Stabilizing Shampoo using
        Adam](https://arxiv.org/abs/2409.11321), 2024"
    """

    b1: Hyperparameter = hyperparameter(0.95, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(0.95, within="[0, 1)")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    precondition_frequency: int | Int[Array, "*runs"] | AbstractSchedule = frequency_field(10)
    shampoo_beta: Hyperparameter | None = hyperparameter(None, within="[0, 1)")
    max_size: int = size_field(10_000)
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)
    nu_dtype: np.dtype | None = dtype_field(kw_only=True)
    layout: LayoutLike = layout_field()

    def init(self, params: Params) -> ScaleBySoapState:
        refuse_explicit_axes(self, params)

        def zeros() -> PyTree:
            # Two trees, since no two leaves of a state may share a buffer.
            return for_each_matrix(self, params, self._zero_factors)

        return ScaleBySoapState(
            age=tree.fresh_count(),
            since=tree.fresh_count(),
            rotated_mu=first_moment(self, params, "b1"),
            rotated_nu=tree.second_moment(params, self.nu_dtype),
            statistics=zeros(),
            basis=zeros(),
        )

    def _zero_factors(self, rows: int, columns: int, dtype: Any) -> tuple[Array, ...]:
        sizes = zip(has_factor((1, rows, columns), self.max_size), (rows, columns), strict=True)
        return tuple(jnp.zeros((n, n), dtype) for has, n in sizes if has)

    def update(
        self,
        updates: Updates,
        state: ScaleBySoapState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleBySoapState]:
        del params
        structure = jax.tree.structure(updates)
        if structure.num_leaves == 0:
            return updates, state
        found = matrices(self, updates)

        def read(x: PyTree) -> list[Array]:
            return [m.read(x) for m, x in zip(found, jax.tree.leaves(x), strict=True)]

        def write(xs: list[Array]) -> PyTree:
            return structure.unflatten([m.write(x) for m, x in zip(found, xs, strict=True)])

        grads, mu, nu = read(updates), state.rotated_mu, state.rotated_nu
        statistics, basis = map(structure.flatten_up_to, (state.statistics, state.basis))
        now = self.at(context)
        self._add_numbers(now, state.age)
        rotated = tree.map_leaves(self._to_basis, (grads,), per_param=(basis,), in_turn=True)
        mu, nu = tree.map_leaves(self._moments, (write(rotated), mu, nu), now, like=(mu, nu))
        direction = read(tree.map_leaves(self._direction, (mu, nu), now))
        result = tree.map_leaves(self._from_basis, (direction,), per_param=(basis,), in_turn=True)
        (statistics,) = tree.map_leaves(
            self._add_to_statistics, (grads,), now, per_param=(statistics,), in_turn=True
        )
        due = state.since + 1 >= frequency_at(self, context)
        which = jnp.where(jnp.any(now.is_new), 2, jnp.where(due, 1, 0))
        # After the last use of the old basis, so that the new one is written in its place.
        which = tree.after(which, result[::-1])
        mu, nu, basis = self._refreshed(which, now.is_new, found, mu, nu, basis, statistics)
        return write(result), ScaleBySoapState(
            age=tree.increment(state.age),
            since=jnp.where(
                jnp.any(now.is_new), state.since, jnp.where(due, 0, tree.increment(state.since))
            ),
            rotated_mu=mu,
            rotated_nu=nu,
            statistics=structure.unflatten(statistics),
            basis=structure.unflatten(basis),
        )

    # --- every step -------------------------------------------------------------------------

    def _add_numbers(self, now: SimpleNamespace, age: Int[Array, "*leaves"]) -> None:
        now.is_new = age == 0
        now.c1, now.c2 = 1 - now.b1, 1 - now.b2
        now.c_s = now.c2 if now.shampoo_beta is None else 1 - now.shampoo_beta
        # The first step does not count.
        updates = jnp.maximum(age, 1)
        now.mu_scale = tree.bias_correction(now.b1, updates)
        now.nu_scale = tree.bias_correction(now.b2, updates)

    def _to_basis(self, _, g, basis):
        return self._rotated(bounded_entries(g), basis)

    def _from_basis(self, _, u, basis):
        return self._rotated_back(u, basis)

    def _moments(self, now, rotated, mu, nu):
        new_mu = now.b1 * mu + now.c1 * rotated
        new_nu = now.b2 * nu + now.c2 * tree.bounded_square(rotated)
        # Zero, or NaN where the gradient is not finite: the first step must not hide that.
        first = jnp.zeros((), mu.dtype) * rotated
        return jnp.where(now.is_new, mu + first, new_mu), jnp.where(now.is_new, nu, new_nu)

    def _direction(self, now, mu, nu):
        divisor = tree.root(tree.positive(nu) * now.nu_scale) + now.eps
        return mu * now.mu_scale / divisor

    def _rotated(self, x, basis):
        """Q_Lᴴ·x·Q_R."""
        left, right = by_side(x.shape, self.max_size, basis)
        x = x if left is None else adjoint_times(left, x)
        return x if right is None else x @ right

    def _rotated_back(self, x, basis):
        """Q_L·x·Q_Rᴴ."""
        left, right = by_side(x.shape, self.max_size, basis)
        x = x if left is None else left @ x
        return x if right is None else times_adjoint(x, right)

    def _add_to_statistics(self, now, g, statistics):
        g = bounded_entries(g)
        left, right = by_side(g.shape, self.max_size, statistics)
        if left is not None:
            left = left + now.c_s * (g @ adjoint(g) - left)
        if right is not None:
            right = right + now.c_s * (adjoint(g) @ g - right)
        return (of_sides(left, right),)

    # --- the refresh ------------------------------------------------------------------------

    def _refreshed(
        self,
        which: Int[Array, ""],
        is_new: Bool[Array, "*leaves"],
        found: tuple[Matrix, ...],
        mu: PyTree,
        nu: PyTree,
        basis: list[tuple[Array, ...]],
        statistics: list[tuple[Array, ...]],
    ) -> tuple[PyTree, PyTree, list[tuple[Array, ...]]]:
        """The moments and the basis; in a step with a refresh, in the new basis."""
        new = [is_new if is_new.ndim == 0 else is_new[i] for i in range(len(found))]
        structure = jax.tree.structure(mu)

        def idle(mu, nu, basis, statistics):
            del statistics
            return mu, nu, basis

        def follow(mu, nu, basis, statistics):
            groups = [
                (*qs, *ss, m.read(x), m.read(y))
                for m, x, y, ss, qs in zip(
                    found,
                    jax.tree.leaves(mu),
                    jax.tree.leaves(nu),
                    statistics,
                    basis,
                    strict=True,
                )
            ]
            turned = [
                (m.write(x), m.write(y), *map(by_rows, qs))
                for m, (x, y, *qs) in zip(found, in_batches(self._turned, groups), strict=True)
            ]
            old = zip(jax.tree.leaves(mu), jax.tree.leaves(nu), basis, strict=True)
            turned = [
                in_place_of((x, y, *qs), new) for (x, y, qs), new in zip(old, turned, strict=True)
            ]
            mu, nu = (structure.unflatten([new[k] for new in turned]) for k in (0, 1))
            return mu, nu, [tuple(qs) for _, _, *qs in turned]

        def start(mu, nu, basis, statistics):
            sides = [(s,) for ss in statistics for s in ss]
            vectors = iter(in_batches(eigenvectors, sides))
            # Other parameters may be older than those that were reset.
            basis = [
                tuple(jnp.where(is_new, by_rows(next(vectors)), q) for q in qs)
                for is_new, qs in zip(new, basis, strict=True)
            ]
            return mu, nu, basis

        # XLA copies the state where there are three branches, or where the idle one is the first.
        followed = jax.lax.cond(which == 1, follow, idle, mu, nu, basis, statistics)
        return jax.lax.cond(which == 2, start, idle, *followed, statistics)

    def _turned(self, *arrays):
        """The moments of matrices in a new basis, and that basis."""
        *factors, mu, nu = arrays
        old = factors[: len(factors) // 2]
        found: list[tuple[Array, Array]] = []
        for q, s in zip(old, factors[len(factors) // 2 :], strict=True):
            # One side after the other.
            found.append(refreshed_eigenvectors(s, tree.after(q, found[-1]) if found else q))
        new = [basis for basis, _ in found]
        orders = by_side(mu.shape, self.max_size, [order for _, order in found])
        with jax.default_matmul_precision("highest"):
            # Less work than with the products of old and new eigenvectors.
            wide = tree.after(mu.astype(tree.accumulation_dtype(mu.dtype)), found[-1:])
            turned = self._rotated(self._rotated_back(wide, old), new)
        for order, axis in zip(orders, (1, 2), strict=True):
            if order is not None:
                index = order[:, :, None] if axis == 1 else order[:, None, :]
                nu = jnp.take_along_axis(nu, index, axis=axis)
        return turned.astype(mu.dtype), nu, *new

    # --- traits -----------------------------------------------------------------------------

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return sides_as_text(self, params, "unrotated")
