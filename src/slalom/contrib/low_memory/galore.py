"""Adam in a low-rank subspace of the gradients, GaLore, and the base that it shares with APOLLO."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.engine.matrices import matrices_or_none, refuse_unequal
from ...rules._base import AbstractTransform, State, advise_keywords
from ...rules.adaptive.adam import AbstractMoments
from ...rules.matrices._orthonormal import adjoint
from ...rules.momentum.momentum import first_moment
from ...rules.shaping.descent import decayed_descent
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike, Matrix, layouts


class WideMatrix(NamedTuple):
    """An array as a batch of matrices whose rows are the shorter side."""

    matrix: Matrix
    rank: int

    @property
    def flipped(self) -> bool:
        return self.matrix.rows > self.matrix.columns

    @property
    def projector(self) -> tuple[int, int, int]:
        """The shape of P."""
        return self.matrix.batch, min(self.matrix.rows, self.matrix.columns), self.rank

    @property
    def projected(self) -> tuple[int, int, int]:
        """The shape of R."""
        return self.matrix.batch, self.rank, max(self.matrix.rows, self.matrix.columns)

    def read(self, x: Array) -> Array:
        matrices = self.matrix.read(x)
        return jnp.matrix_transpose(matrices) if self.flipped else matrices

    def write(self, matrices: Array) -> Array:
        return self.matrix.write(jnp.matrix_transpose(matrices) if self.flipped else matrices)


class _AbstractProjectedFields:
    # Abstract variables would come first in the signature of a rule.
    rank: int
    eps: fields.Number
    layout: Any


class AbstractProjectedAdam(AbstractMoments[State], _AbstractProjectedFields):
    """Adam for gradients that are projected onto fewer rows."""

    over: ClassVar[str] = "leaf"

    def plans(self, params: Params) -> tuple[WideMatrix | None, ...]:
        """The matrices of each leaf."""
        refuse_unequal(type(self).__name__, params, layouts(params, self.layout))
        return tuple(
            None
            if m is None or 0 in (m.rows, m.columns)
            else WideMatrix(m, min(self.rank, m.rows, m.columns))
            for m in matrices_or_none(self, params)
        )

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return tuple(
            None if m is None else f"{m.matrix} at rank {m.rank}" for m in self.plans(params)
        )

    def _fresh(
        self, params: Params, name: str, kept: Callable[[Array, WideMatrix], Array]
    ) -> dict[str, Any]:
        """The fields of the state before the first step. The one with this name has a tuple of what
        is kept at each matrix, and an empty tuple at other leaves."""
        tree.check_inexact(params)
        leaves, structure = jax.tree.flatten(params)
        pairs = list(zip(leaves, self.plans(params), strict=True))
        projected = structure.unflatten(
            x if m is None else jnp.zeros(m.projected, tree.canonical(x.dtype)) for x, m in pairs
        )
        return {
            "age": tree.fresh_count(),
            "mu": first_moment(self, projected, "b1"),
            "nu": tree.second_moment(projected),
            name: structure.unflatten(() if m is None else (kept(x, m),) for x, m in pairs),
        }

    def _moments(self, r: Array, mu: Array, nu: Array) -> tuple[Array, Array]:
        """Both means after a projected gradient."""
        mu = self.b1 * mu + self.c1 * r
        return mu, self.b2 * nu + self.c2 * tree.bounded_square(r)

    def _projected_direction(self, mu: Array, nu: Array) -> Array:
        """Adam's update in the subspace."""
        root = tree.root(tree.positive(nu) * self.nu_scale)
        return self.mu_scale * mu / (root + self.eps)


class ScaleByGaloreState(eqx.Module):
    """The state of `ScaleByGalore`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    projector: PyTree[Inexact[Array, "..."]] = fields.per_param()
    """At each matrix a tuple of P, at other arrays an empty tuple."""
    mu: PyTree[Inexact[Array, "..."]] = fields.per_param()
    nu: PyTree[Float[Array, "..."]] = fields.per_param()


class ScaleByGalore(AbstractProjectedAdam[ScaleByGaloreState]):
    """GaLore: Adam on gradients that are projected to their strongest directions.

        P = the first r left singular vectors of Gₜ, every T steps
        Rₜ = Pᵀ·Gₜ
        Nₜ = Adam of Rₜ:   m̂ₜ / (√v̂ₜ + ε)
        uₜ = α·P·Nₜ

    for an m × n matrix with m ≤ n; a matrix with m > n is transposed. Its state has m·r + 2·n·r
    elements instead of 2·m·n. Other arrays, such as biases and embeddings, follow Adam. The moments
    stay as they are when P changes, as in the paper.

    `sl.where.matrix` selects the matrices; the matrices of a stack are projected separately. All
    singular value decompositions run in one `lax.cond`, which idle steps skip. P is stored in at
    least float32.

    Differs from Optax, which projects the longer side of a matrix, and takes any transformation
    instead of Adam, and from the authors' code, which projects the columns of square matrices.

    **Arguments:**

    - `rank`: r, an int ≥ 1, at most the shorter side of each matrix.
    - `update_proj_gap`: T, an int ≥ 1.
    - `scale`: α; 0.25 in the paper, together with a learning rate of 0.01.
    - `b1`, `b2`, `eps`: as in `ScaleByAdam`.
    - `mu_dtype`: as in `ScaleByAdam`.
    - `layout`: which axes are outputs and inputs, as for `UnitwiseClip`.

    ??? cite "Zhao et al., [GaLore: Memory-Efficient LLM Training by Gradient Low-Rank
        Projection](https://arxiv.org/abs/2403.03507), 2024"
    """

    rank: int = fields.count_field(128)
    update_proj_gap: int = fields.count_field(200)
    scale: fields.Number = fields.hyperparameter(1.0)
    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)", kw_only=True)
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)", kw_only=True)
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)", kw_only=True)
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    layout: LayoutLike = fields.layout_field()

    refreshes: ClassVar[tuple[str, ...]] = ("projector",)
    refresh_before: ClassVar[str] = "advance"

    def init(self, params: Params) -> ScaleByGaloreState:
        def zeros(x: Array, wide: WideMatrix) -> Array:
            return jnp.zeros(wide.projector, tree.accumulation_dtype(tree.canonical(x.dtype)))

        return ScaleByGaloreState(**self._fresh(params, "projector", zeros))

    def begin(self, state):
        self.due = state.age % self.update_proj_gap == 0
        self._correct_biases(state)

    def refresh(self, g, leaf):
        if self.plan is not None:
            vectors, _, _ = jnp.linalg.svd(self.plan.read(g), full_matrices=False)
            leaf.projector = (vectors[..., : self.plan.rank],)

    def advance(self, g, leaf):
        if self.plan is not None:
            (p,) = leaf.projector
            g = adjoint(p) @ self.plan.read(g)
        leaf.mu, leaf.nu = self._moments(g, leaf.mu, leaf.nu)

    def direction(self, g, leaf):
        n = self._projected_direction(leaf.mu, leaf.nu)
        if self.plan is None:
            return n
        (p,) = leaf.projector
        return self.plan.write(self.scale * (p @ n))


@advise_keywords
def galore(
    learning_rate: Hyperparameter,
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    mu_dtype: Any | None = None,
    layout: LayoutLike = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """GaLore: AdamW on gradients of matrices that are projected to a low rank.

        p ↦ p − η·(α·P·N + λ·p)   with   N = m̂ / (√v̂ + ε) of Pᵀ·G

    P holds the strongest directions of a recent gradient G.

    Differs from Optax in the side of a matrix that is projected: see `ScaleByGalore`.

    **Arguments:**

    - `learning_rate`: η.
    - `rank`, `update_proj_gap`, `scale`: as in `ScaleByGalore`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `b1`, `b2`, `eps`, `mu_dtype`, `layout`: as in `ScaleByGalore`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByGalore`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhao et al., [GaLore: Memory-Efficient LLM Training by Gradient Low-Rank
        Projection](https://arxiv.org/abs/2403.03507), 2024"
    """
    options = {"b1": b1, "b2": b2, "eps": eps, "mu_dtype": mu_dtype}
    rule = ScaleByGalore(rank, update_proj_gap, scale, **options, layout=layout)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
