"""SOAP: Adam in the eigenbasis of two factors."""

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
from ..._core.protocol.chain import chain
from ..._core.protocol.context import Context
from ..._core.protocol.rule import AbstractRule
from ..._core.protocol.transform import AbstractTransform, State
from ..._core.state.marks import param_like, per_leaf, per_param, until_reset
from ..._core.text.advice import advise_keywords
from ...tree.types import Params
from ...where.layout import LayoutLike
from ...where.resolve import WhereLike
from ..momentum.momentum import first_moment
from ..shaping.scale import ScaleByLearningRate
from ._kronecker import (
    above_rounding,
    bounded_entries,
    by_side,
    determined,
    first_eigenvectors,
    frequency_at,
    frequency_field,
    into_basis,
    out_of_basis,
    refreshed_eigenvectors,
    sides_as_text,
    toward_products,
    zeros_of_sides,
)
from ._routing import chosen, decay_if_any, with_adam_elsewhere


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
        # The mean is rounded again whenever it turns.
        keep = above_rounding(leaf.rotated_mu, self.max_size)
        keep = keep & determined(leaf.rotated_nu, self.max_size)
        mu = jnp.where(keep, leaf.rotated_mu, 0) * now.mu_scale
        return out_of_basis(mu / divisor, leaf.basis, self.max_size)

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
        rotated = jnp.where(above_rounding(rotated, self.max_size), rotated, 0)
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
    `ScaleByAdam`, after the correction of the bias. An entry of G' or M that is not above the
    rounding error of the largest one counts as 0: where inputs are collinear, the authors' code
    makes full steps of rounding errors, out of the span of the inputs.

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


@advise_keywords
def soap(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    precondition_frequency: Any = 10,
    shampoo_beta: Hyperparameter | None = None,
    max_size: int = 10_000,
    mu_dtype: Any | None = None,
    *,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """SOAP for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(Q_L·(M̂ / (√V̂ + ε))·Q_Rᴴ + λ·p)

    It is Adam in the eigenbasis of Shampoo's factors, with the learning rates of Adam: 3e-3 in the
    paper. Matrices are what `sl.where.matrix` selects. Vectors, embeddings and what `where` leaves
    out go to AdamW. `opt.describe(model)` shows which is which. The first step of a matrix only
    initializes its basis, and decays.

    In the authors' code, the first step does not decay, and later ones decay p after the update.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which of the matrices decay. Defaults to all.
    - `b1`, `b2`, `eps`, `precondition_frequency`, `shampoo_beta`, `max_size`, `mu_dtype`,
        `layout`: as in `ScaleBySoap`.
    - `where`: which matrices are trained with SOAP. Defaults to all.
    - `adam_learning_rate`: the learning rate of AdamW. Defaults to η.
    - `adam_b1`, `adam_b2`, `adam_weight_decay`: as in `adamw`.

    **Returns:** a partition of the chain of `ScaleBySoap`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ```python
    >>> sl.soap(3e-3)
    (sl.ScaleByAdam() | sl.ScaleByLearningRate(0.003)).partition(
        {sl.where.matrix(): sl.ScaleBySoap() | sl.ScaleByLearningRate(0.003)},
        names=('soap',)
    )

    ```

    ??? cite "Vyas et al., [SOAP: Improving and Stabilizing Shampoo using
        Adam](https://arxiv.org/abs/2409.11321), 2024"
    """
    rule = chain(
        ScaleBySoap(
            b1,
            b2,
            eps,
            precondition_frequency,
            shampoo_beta,
            max_size,
            mu_dtype=mu_dtype,
            layout=layout,
        ),
        *decay_if_any(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    return with_adam_elsewhere(rule, "soap", chosen(where, layout), learning_rate, *adam_numbers)
