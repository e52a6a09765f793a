"""The inverse fourth roots of two Kronecker factors: Shampoo."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.engine.matrices import of_matrices
from ...tree.types import Hyperparameter, Params, Scalar, WhereLike
from ...where.layout import LayoutLike, Matrix
from .._base import AbstractTransform, advise_keywords
from .._layout import matrices_as_text
from ..low_memory.rms import ScaleByRms
from ..momentum.momentum import Ema
from ._kronecker import AbstractRefreshed, Frequency, bounded_entries, frequency_field
from ._orthonormal import adjoint, eigh, product, products_of, times_adjoint
from ._routing import chosen, descent, with_adam_elsewhere


class ScaleByShampooState(eqx.Module):
    """The state of `ScaleByShampoo`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    since: Int[Array, ""] = fields.until_reset()
    """The number of steps since the last refresh."""
    statistics: PyTree[Inexact[Array, "..."]] = fields.per_param(spread=True)
    """At each leaf a tuple of L and R, with an entry for each block."""
    roots: PyTree[Inexact[Array, "..."]] = fields.per_param(spread=True)
    """At each leaf a tuple of their inverse fourth roots."""


class ScaleByShampoo(AbstractRefreshed[ScaleByShampooState]):
    """Shampoo: preconditions both sides of a matrix by inverse fourth roots.

        Lₜ = β·Lₜ₋₁ + (1 − β)·G·Gᴴ,   Rₜ = β·Rₜ₋₁ + (1 − β)·Gᴴ·G
        U = L̂^(−1/4)·G·R̂^(−1/4)

    L̂ and R̂ are corrected for the bias towards the start at zero. With β = 1, L and R are sums.
    The roots are taken of L̂ + ε·λ·I, where λ is the largest eigenvalue. They are computed in the
    first step and then every f steps, in one branch, so the steps in between do not pay for it.

    A matrix with a side longer than `block_size` is cut into blocks of equal size, each with
    factors of its own.

    Follows Anil et al., who give each update the norm of another rule's update, and apply momentum
    after the preconditioner: `sl.ScaleByShampoo().graft(sl.ScaleByAdam()) | sl.Ema(0.9)`, as in
    `sl.shampoo`. There ε is also added to the first L and R.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. Factors and roots
    have 2·(n² + m²) elements for an n × m block, in at least float32. Devices that share a matrix
    divide them, if the mesh has automatic axes. Under a `vmap` that batches the state, each step
    costs as much as a refresh.

    **Arguments:**

    - `b2`: β, in [0, 1].
    - `eps`: ε, ≥ 0.
    - `precondition_frequency`: f, the number of steps from one refresh to the next: an int ≥ 1,
        or a schedule, rounded to the nearest integer ≥ 1.
    - `block_size`: the longest side of a block.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "Gupta, Koren & Singer, [Shampoo: Preconditioned Stochastic Tensor
        Optimization](https://arxiv.org/abs/1802.09568), 2018; Anil et al., [Scalable Second Order
        Optimization for Deep Learning](https://arxiv.org/abs/2002.09018), 2020, for blocks"
    """

    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1]")
    eps: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)")
    precondition_frequency: Frequency = frequency_field(10)
    block_size: int = fields.count_field(1024)
    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "matrix"
    refreshes: ClassVar[tuple[str, ...]] = ("roots",)

    def init(self, params: Params) -> ScaleByShampooState:
        def blocks(rows: int, columns: int, dtype: np.dtype) -> tuple[Array, Array]:
            return _Blocks.of((rows, columns), self.block_size).zeros(dtype)

        # Two trees, since no two leaves of a state may share a buffer.
        statistics, roots = (self.for_each_matrix(params, blocks) for _ in range(2))
        return ScaleByShampooState(
            age=tree.fresh_count(),
            since=tree.fresh_count(),
            statistics=statistics,
            roots=roots,
        )

    # --- the phases -------------------------------------------------------------------------

    def begin(self, state):
        is_new = jnp.any(state.age == 0)
        state.age = tree.increment(state.age)
        is_sum = self.b2 == 1
        self.c2 = jnp.where(is_sum, 1, 1 - self.b2)
        self.scale = jnp.where(
            is_sum, 1, tree.bias_correction(jnp.where(is_sum, 0, self.b2), state.age)
        )
        self.due = is_new | (state.since + 1 >= self.precondition_frequency)
        state.since = jnp.where(self.due, 0, tree.increment(state.since))

    def advance(self, g, leaf):
        blocks = _Blocks.of(g.shape, self.block_size).split(bounded_entries(g))
        left, right = leaf.statistics
        left = self.b2 * left + self.c2 * products_of(adjoint(blocks))
        right = self.b2 * right + self.c2 * products_of(blocks)
        leaf.statistics = (left, right)

    def refresh(self, g, leaf):

        def root(x):
            return _inverse_fourth_root(x * self.scale, self.eps)

        leaf.roots = tuple(
            root(x) if x.ndim == 2 else of_matrices(root, x) for x in leaf.statistics
        )

    def direction(self, g, leaf):
        cut = _Blocks.of(g.shape, self.block_size)
        left, right = leaf.roots
        blocks = cut.split(bounded_entries(g))
        return cut.join(product(product(left, blocks), right))

    # --- traits -----------------------------------------------------------------------------

    def notes(self, params: Params) -> tuple[str | None, ...]:
        def text(matrix: Matrix) -> str:
            blocks = str(_Blocks.of((matrix.rows, matrix.columns), self.block_size))
            return ", ".join(filter(None, (str(matrix), blocks)))

        return matrices_as_text(self, params, text)


# --- blocks ---------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Cuts a matrix into blocks of equal size, padded with zeros."""

    rows: int
    columns: int
    down: int
    """The number of blocks from the first row to the last."""
    across: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...], size: int) -> "_Blocks":
        rows, columns = shape
        down, across = max(1, -(-rows // size)), max(1, -(-columns // size))
        return cls(rows, columns, down, across, -(-rows // down), -(-columns // across))

    @property
    def number(self) -> tuple[int, ...]:
        """The number of blocks; nothing for one."""
        return () if self.down == self.across == 1 else (self.down * self.across,)

    def zeros(self, dtype: np.dtype) -> tuple[Array, Array]:
        return (
            jnp.zeros((*self.number, self.height, self.height), dtype),
            jnp.zeros((*self.number, self.width, self.width), dtype),
        )

    def split(self, x: Inexact[Array, "n m"]) -> Inexact[Array, "*blocks _ _"]:
        """The blocks of a matrix, row by row."""
        if not self.number:
            return x
        more = self.down * self.height - self.rows, self.across * self.width - self.columns
        x = jnp.pad(x, ((0, more[0]), (0, more[1])))
        x = x.reshape(self.down, self.height, self.across, self.width)
        return x.swapaxes(1, 2).reshape(-1, self.height, self.width)

    def join(self, blocks: Inexact[Array, "*blocks _ _"]) -> Inexact[Array, "n m"]:
        """Undoes `split`."""
        if not self.number:
            return blocks
        x = blocks.reshape(self.down, self.across, self.height, self.width)
        x = x.swapaxes(1, 2).reshape(self.down * self.height, self.across * self.width)
        return x[: self.rows, : self.columns]

    def __str__(self) -> str:
        return f"{self.number[0]} blocks of {self.height} × {self.width}" if self.number else ""


# --- numbers --------------------------------------------------------------------------------


def _inverse_fourth_root(x: Inexact[Array, "n n"], eps: Scalar) -> Inexact[Array, "n n"]:
    """(x + ε·λ·I)^(−1/4) of a positive semidefinite matrix with largest eigenvalue λ."""
    limits = jnp.finfo(tree.real_dtype(x.dtype))
    # The diagonal of a stack of one: for that of one matrix JAX has a conditional by platform.
    largest = jnp.max(jnp.diagonal(x[None], axis1=-2, axis2=-1).real)
    # The bound is larger than that of `tree.positive`, so that roots of small gradients do not make
    # the next update overflow. After gradients of zeros alone, as below a last layer that starts at
    # zero, the roots are the identity.
    scale = jnp.where(largest > 0, jnp.maximum(largest, float(limits.tiny) ** 0.75), 1)
    scale = jax.lax.stop_gradient(scale)  # the roots do not depend on it
    values, vectors = eigh(x * (1 / scale))
    largest = jnp.maximum(values[-1], 0)
    values = jnp.maximum(values, 0) + eps.astype(values.dtype) * largest
    powers = jnp.where(largest > 0, tree.positive(values), 1) ** -0.25
    return product(vectors * powers[None, :], vectors, times_adjoint) * scale**-0.25


@advise_keywords
def shampoo(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    precondition_frequency: Hyperparameter = 10,
    block_size: int = 1024,
    mu_dtype: Any | None = None,
    *,
    graft: AbstractTransform | None = None,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """Shampoo for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(m̂ + λ·p)   with the mean m of   Δ·‖S‖ / ‖Δ‖,   Δ = L̂^(−1/4)·G·R̂^(−1/4)

    S is Adam's update. Each update is given its norm, so that Adam's learning rates fit, and then
    enters a mean. `sl.where.matrix` selects the matrices. Vectors, embeddings and parameters that
    `where` leaves out go to AdamW. `opt.describe(model)` shows which is which.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`: the decay of the mean of updates, in [0, 1).
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which of the matrices decay. Defaults to all.
    - `mu_dtype`: the dtype of the mean of updates.
    - `graft`: the transform whose norm the updates take. Defaults to Adam without a mean of
        gradients, `sl.ScaleByRms(b2, eps_in_sqrt=False, bias_correction=True)`.
    - `b2`, `eps`, `precondition_frequency`, `block_size`, `layout`: as in `ScaleByShampoo`.
    - `where`: which matrices are trained with Shampoo. Defaults to all.
    - `adam_learning_rate`: the learning rate of AdamW. Defaults to η.
    - `adam_b1`, `adam_b2`, `adam_weight_decay`: as in `adamw`.

    **Returns:** a partition of the chain of `ScaleByShampoo`, `Ema`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ??? cite "Gupta, Koren & Singer, [Shampoo: Preconditioned Stochastic Tensor
        Optimization](https://arxiv.org/abs/1802.09568), 2018; Anil et al., [Scalable Second Order
        Optimization for Deep Learning](https://arxiv.org/abs/2002.09018), 2020"
    """
    if graft is None:
        graft = ScaleByRms(b2, eps_in_sqrt=False, bias_correction=True)
    rule = ScaleByShampoo(b2, eps, precondition_frequency, block_size, layout=layout).graft(graft)
    mean = Ema(b1, accumulator_dtype=mu_dtype)
    rule = descent(rule | mean, learning_rate, weight_decay, decay_where)
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    return with_adam_elsewhere(rule, "shampoo", chosen(where, layout), learning_rate, *adam_numbers)
