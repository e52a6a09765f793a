"""SOAP: Adam in the eigenbasis of two factors."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike
from .._base import AbstractTransform, advise_keywords
from ..momentum.momentum import first_moment
from ._kronecker import (
    AbstractTwoSided,
    Frequency,
    bounded_entries,
    first_eigenvectors,
    frequency_field,
    refreshed_eigenvectors,
)
from ._orthonormal import product
from ._routing import chosen, descent, with_adam_elsewhere


class AbstractInEigenbasisState(eqx.Module):
    """The state of a rule that runs Adam in an eigenbasis."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    since: Int[Array, ""] = fields.until_reset()
    """The number of steps since the last refresh."""
    rotated_mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    """The mean of gradients, in the eigenbasis."""
    rotated_nu: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    """The mean of squares, in the eigenbasis."""
    statistics: PyTree[Inexact[Array, "_ _ _"]] = fields.per_param(spread=True)
    """A tuple of L and R for each leaf. Sides that are too long have none."""
    basis: PyTree[Inexact[Array, "_ _ _"]] = fields.per_param(spread=True)
    """At each leaf a tuple of the eigenvectors of L and R."""


EigenState = TypeVar("EigenState", bound=AbstractInEigenbasisState)


class AbstractInEigenbasis(AbstractTwoSided[EigenState]):
    """Adam in a basis of two factors, which follow the gradients.

    The first step makes the factors, and does not update. The second one begins with their first
    eigenvectors.
    """

    b1: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    precondition_frequency: Frequency = frequency_field(10)
    shampoo_beta: fields.OptionalNumber = fields.hyperparameter(None, within="[0, 1)")
    max_size: int = fields.count_field(10_000)
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    layout: LayoutLike = fields.layout_field()

    # --- the phases -------------------------------------------------------------------------

    def begin(self, state):
        self.is_first, is_second = state.age == 0, state.age == 1
        self.starts = jnp.any(is_second)
        follows = ~self.starts & (state.since >= self.precondition_frequency)
        self.due = is_second | follows
        state.since = jnp.where(
            self.starts, state.since, jnp.where(follows, 1, tree.increment(state.since))
        )
        self.c1, self.c2 = (jnp.where(self.is_first, 0, 1 - b) for b in (self.b1, self.b2))
        self.c_s = 1 - (self.b2 if self.shampoo_beta is None else self.shampoo_beta)
        updates = jnp.maximum(state.age, 1)
        self.mu_scale = tree.bias_correction(self.b1, updates)
        self.nu_scale = tree.bias_correction(self.b2, updates)
        state.age = tree.increment(state.age)

    def advance(self, g, leaf):
        g = bounded_entries(g)
        rotated = self._into_basis(g, leaf.basis)
        used = jnp.where(self._above_rounding(rotated), rotated, 0)
        leaf.rotated_mu = self.b1 * leaf.rotated_mu + self.c1 * used
        leaf.rotated_nu = self.b2 * leaf.rotated_nu + self.c2 * tree.bounded_square(used)
        self._follow_factors(g, rotated, leaf)

    def direction(self, g, leaf):
        divisor = tree.root(tree.positive(leaf.rotated_nu) * self.nu_scale) + self.eps
        # The mean is rounded again whenever it turns.
        keep = self._above_rounding(leaf.rotated_mu)
        keep = keep & self._determined(leaf.rotated_nu)
        mu = jnp.where(keep, leaf.rotated_mu, 0) * self.mu_scale
        return self._out_of_basis(mu / divisor, leaf.basis)

    def _fresh(self, params: Params) -> dict[str, Any]:
        """The fields that the states have in common, before the first step."""
        return {
            "age": tree.fresh_count(),
            "since": tree.fresh_count(),
            "rotated_mu": first_moment(self, params, "b1"),
            "rotated_nu": tree.second_moment(params),
            "statistics": self.for_each_matrix(params, self._zeros),
            "basis": self.for_each_matrix(params, self._zeros),
        }

    # --- one matrix -------------------------------------------------------------------------

    def _follow_basis(
        self,
        basis: tuple[Array, ...],
        statistics: tuple[Array, ...],
        mu: Array,
        again: Callable[..., Any],
    ) -> tuple[tuple[Array, ...], Array, list[Array]]:
        """Brings the basis of a matrix up to date, and turns the mean with it.

        **Arguments:**

        - `basis`, `statistics`, `mu`: the fields of the state at this matrix.
        - `again`: from a factor and its basis to a better one, and where its vectors were.

        **Returns:** the new basis and mean, and for each side where its vectors were.
        """
        sides: list[tuple[Array, Array]] = []
        for x, q in zip(statistics, basis, strict=True):
            # One side after the other. The branches wait, and not their predicate: a `vmap` over
            # matrices would batch it, and take both branches.
            side = jax.lax.cond(
                self.starts,
                lambda x, q, done: first_eigenvectors(tree.after(x, done), q),
                lambda x, q, done: again(x, tree.after(q, done)),
                *(x, q, sides[-1:]),
            )
            sides.append(side)
        new = tuple(q for q, _ in sides)
        mu = tree.after(mu, sides[-1:])
        # Less work than with the products of old and new eigenvectors.
        mu = self._into_basis(self._out_of_basis(mu, basis, product), new)
        return new, mu, [order for _, order in sides]

    @abc.abstractmethod
    def _follow_factors(self, g: Array, rotated: Array, leaf: EigenState) -> None:
        """Assigns the new `statistics` of a matrix, and other fields that follow from its gradient.

        **Arguments:**

        - `g`, `rotated`: the gradient, and the same in the basis.
        - `leaf`: as for `advance`.
        """


class ScaleBySoapState(AbstractInEigenbasisState):
    """The state of `ScaleBySoap`."""


class ScaleBySoap(AbstractInEigenbasis[ScaleBySoapState]):
    """SOAP: Adam in the basis of the eigenvectors of Shampoo's two factors.

        G' = Q_Lᴴ·G·Q_R
        Mₜ = β₁·Mₜ₋₁ + (1 − β₁)·G',   Vₜ = β₂·Vₜ₋₁ + (1 − β₂)·|G'|²
        U = Q_L·(M̂ₜ / (√V̂ₜ + ε))·Q_Rᴴ
        Lₜ = β_s·Lₜ₋₁ + (1 − β_s)·G·Gᴴ,   Rₜ = β_s·Rₜ₋₁ + (1 − β_s)·Gᴴ·G

    Q_L and Q_R are the eigenvectors of L and R. Every f steps one step of a power iteration, Q ←
    QR(L·Q), makes them follow; M turns with them, and V is permuted as their eigenvalues are
    sorted. All of this happens in one branch, so the steps in between do not pay for it. The first
    step of a parameter computes L, R and their eigenvectors, and does not update it. G', L, R and
    the eigenvectors have full precision on any device. The product for U follows
    `jax.default_matmul_precision`.

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

    refreshes: ClassVar[tuple[str, ...]] = ("rotated_mu", "rotated_nu", "basis")

    def init(self, params: Params) -> ScaleBySoapState:
        return ScaleBySoapState(**self._fresh(params))

    def refresh(self, g, leaf):
        leaf.basis, leaf.rotated_mu, orders = self._follow_basis(
            leaf.basis, leaf.statistics, leaf.rotated_mu, refreshed_eigenvectors
        )
        nu = tree.after(leaf.rotated_nu, leaf.basis[-1:])
        rows, columns = (
            jnp.arange(size) if order is None else order
            for size, order in zip(nu.shape, self._by_side(nu.shape, orders), strict=True)
        )
        # By one gather: of two, XLA makes an invalid program where a mesh divides both sides.
        leaf.rotated_nu = nu[rows[:, None], columns]

    def _follow_factors(self, g, rotated, leaf):
        leaf.statistics = self._toward_products(leaf.statistics, self.c_s, g)


@advise_keywords
def soap(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    precondition_frequency: Hyperparameter = 10,
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
    paper. `sl.where.matrix` selects the matrices. Vectors, embeddings and parameters that `where`
    leaves out go to AdamW. `opt.describe(model)` shows which is which. The first step of a matrix
    only initializes its basis, and decays.

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
    rule = ScaleBySoap(
        b1,
        b2,
        eps,
        precondition_frequency,
        shampoo_beta,
        max_size,
        mu_dtype=mu_dtype,
        layout=layout,
    )
    rule = descent(rule, learning_rate, weight_decay, decay_where)
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    return with_adam_elsewhere(rule, "soap", chosen(where, layout), learning_rate, *adam_numbers)
