"""Adam in a low-rank subspace of the gradients: GaLore, and APOLLO."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ..._core.engine.matrices import matrices_or_none, refuse_unequal
from ..._core.fields.keys import AbstractKeyed, key_field
from ...rules._base import AbstractTransform, advise_keywords
from ...rules.adaptive.adam import AbstractMoments, AbstractMomentsState, MomentsState
from ...rules.matrices._orthonormal import adjoint
from ...rules.shaping.descent import decayed_descent
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike, Matrix, layouts


class _WideMatrix(NamedTuple):
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
    layout: Any


class _AbstractProjectedAdam(AbstractMoments[MomentsState], _AbstractProjectedFields):
    """Adam for gradients that are projected onto fewer rows."""

    over: ClassVar[str] = "leaf"

    def plans(self, params: Params) -> tuple[_WideMatrix | None, ...]:
        """The matrices of each leaf."""
        refuse_unequal(type(self).__name__, params, layouts(params, self.layout))
        return tuple(
            None
            if m is None or 0 in (m.rows, m.columns)
            else _WideMatrix(m, min(self.rank, m.rows, m.columns))
            for m in matrices_or_none(self, params)
        )

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return tuple(
            None if m is None else f"{m.matrix} at rank {m.rank}" for m in self.plans(params)
        )

    def direction(self, g, leaf):
        return self._debiased_mean(g, leaf.mu) / self._divisor(leaf.nu)

    def _fresh(
        self, params: Params, name: str, kept: Callable[[Array, _WideMatrix], Array]
    ) -> dict[str, Any]:
        """The fields of the state before the first step. The one with this name has a tuple of what
        is kept at each matrix, and an empty tuple at other leaves."""
        tree.check_inexact(params)
        leaves, structure = jax.tree.flatten(params)
        pairs = list(zip(leaves, self.plans(params), strict=True))
        projected = structure.unflatten(
            x if m is None else jnp.zeros(m.projected, tree.canonical(x.dtype)) for x, m in pairs
        )
        of_matrices = structure.unflatten(() if m is None else (kept(x, m),) for x, m in pairs)
        return {**self._fresh_moments(projected), name: of_matrices}


class _AbstractProjectedState(AbstractMomentsState):
    """The state of Adam for gradients that are projected onto fewer rows."""

    mu: PyTree[Inexact[Array, "..."]] = fields.per_param()
    nu: PyTree[Float[Array, "..."]] = fields.per_param()


class ScaleByGaloreState(_AbstractProjectedState):
    """The state of `ScaleByGalore`."""

    projector: PyTree[Inexact[Array, "..."]] = fields.per_param()
    """At each matrix a tuple of P, at other arrays an empty tuple."""


class ScaleByGalore(_AbstractProjectedAdam[ScaleByGaloreState]):
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
        def zeros(x: Array, wide: _WideMatrix) -> Array:
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
        super().advance(g, leaf)

    def direction(self, g, leaf):
        n = super().direction(g, leaf)
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


# --- APOLLO -------------------------------------------------------------------------------


class ScaleByApolloState(_AbstractProjectedState):
    """The state of `ScaleByApollo`."""

    norm: PyTree[Float[Array, "..."]] = fields.per_param()
    """At each matrix a tuple of the norm of its last update, at other arrays an empty tuple."""


class ScaleByApollo(AbstractKeyed, _AbstractProjectedAdam[ScaleByApolloState]):
    """APOLLO: scales each channel of a gradient as Adam scales a random projection of it.

        Rₜ = P·Gₜ   with   P of r rows, normal with variance 1 / r, new every T steps
        Nₜ = Adam of Rₜ:   m̂ₜ / (√v̂ₜ + ε)
        Sₜ = Gₜ, with column j multiplied by ‖Nₜ[:, j]‖ / ‖Rₜ[:, j]‖
        uₜ = α·Sₜ·min(1, γ·‖S̃ₜ₋₁‖ / ‖Sₜ‖)

    for an m × n matrix with m ≤ n, where S̃ is S after the limit of its growth; a matrix with m > n
    is transposed. Its state has 2·n·r elements instead of 2·m·n: P is drawn again in each step,
    from the key and the path of the array. Other arrays, such as biases and embeddings, follow
    Adam.

    With `per_tensor` there is one factor ‖Nₜ‖ / ‖Rₜ‖ for all columns. APOLLO-Mini is
    `sl.contrib.ScaleByApollo(rank=1, scale=128**0.5, per_tensor=True)`.

    `sl.where.matrix` selects the matrices; the matrices of a stack are projected separately. As in
    the paper the gradient itself is scaled; `pytorch-optimizer` scales its projection.

    **Arguments:**

    - `rank`: r, an int ≥ 1, at most the shorter side of each matrix.
    - `update_proj_gap`: T, an int ≥ 1.
    - `scale`: α.
    - `per_tensor`: whether a matrix has one factor instead of one for each channel.
    - `key`: the key of P, an int in [0, 2³¹) or a PRNG key.
    - `b1`, `b2`, `eps`: as in `ScaleByAdam`.
    - `max_growth`: γ, ≥ 1; `inf` sets no limit.
    - `mu_dtype`: as in `ScaleByAdam`.
    - `layout`: which axes are outputs and inputs, as for `UnitwiseClip`.

    ??? cite "Zhu et al., [APOLLO: SGD-like Memory, AdamW-level
        Performance](https://arxiv.org/abs/2412.05270), 2024"
    """

    rank: int = fields.count_field(256)
    update_proj_gap: int = fields.count_field(200)
    scale: fields.Number = fields.hyperparameter(1.0)
    per_tensor: bool = eqx.field(default=False, static=True)
    key: Any = key_field(default=0)
    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)", kw_only=True)
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)", kw_only=True)
    eps: fields.Number = fields.hyperparameter(1e-6, within="[0, inf)", kw_only=True)
    max_growth: fields.Number = fields.hyperparameter(1.01, within="[1, inf]", kw_only=True)
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    layout: LayoutLike = fields.layout_field()

    def init(self, params: Params) -> ScaleByApolloState:
        def zeros(x: Array, wide: _WideMatrix) -> Array:
            return jnp.zeros(wide.matrix.batch, tree.sum_dtype(x))

        return ScaleByApolloState(**self._fresh(params, "norm", zeros))

    def begin(self, state):
        self.window = state.age // self.update_proj_gap
        self.key = self._typed_key(self._fresh_key_data())
        self._correct_biases(state)

    def advance(self, g, leaf):
        if self.plan is None:
            super().advance(g, leaf)
            return
        x = self.plan.read(g)
        key = jax.random.fold_in(self.key, self.window.astype(jnp.uint32))
        r = _projection(key, self.plan, x) @ x
        super().advance(r, leaf)
        self.scaled, norm = self._scaled(x, r, super().direction(r, leaf), *leaf.norm)
        leaf.norm = (norm,)

    def direction(self, g, leaf):
        return super().direction(g, leaf) if self.plan is None else self.plan.write(self.scaled)

    def _scaled(self, g: Array, r: Array, n: Array, last: Array) -> tuple[Array, Array]:
        """The updates of a batch of matrices, and their norms."""
        axes = (-2, -1) if self.per_tensor else (-2,)
        adam = jnp.sum(tree.abs_squared(n), axes, keepdims=True)
        before = jnp.sum(tree.abs_squared(r), axes, keepdims=True)
        divisor = tree.inverse_root(tree.positive(tree.bounded(before)))
        scaled = g * (tree.root(adam) * divisor)
        norm = tree.root(tree.bounded(jnp.sum(tree.abs_squared(scaled), (-2, -1))))
        limit = self.max_growth * last
        too_long = (last > 0) & (norm > limit)
        factor = jnp.where(too_long, limit / jnp.where(too_long, norm, 1), 1)
        return self.scale * factor[:, None, None] * scaled, norm * factor


def _projection(key: Array, wide: _WideMatrix, g: Array) -> Array:
    """P for each matrix, normal with variance 1 / r."""
    batch, short, rank = wide.projector
    normal = jax.random.normal(key, (batch, rank, short), g.real.dtype)
    return (normal * rank**-0.5).astype(g.dtype)


@advise_keywords
def apollo(
    learning_rate: Hyperparameter,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    per_tensor: bool = False,
    key: object = 0,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    max_growth: Hyperparameter = 1.01,
    mu_dtype: Any | None = None,
    layout: LayoutLike = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """APOLLO: gradients of matrices, scaled as AdamW scales a random projection of them.

        p ↦ p − η·(α·S + λ·p)

    S is the gradient, with each of its columns scaled as in `ScaleByApollo`.

    APOLLO-Mini, whose state is about as small as SGD's:

    ```python
    >>> tx = sl.contrib.apollo(1e-2, rank=1, scale=128**0.5, per_tensor=True)

    ```

    **Arguments:**

    - `learning_rate`: η; 0.01 in the paper.
    - `rank`, `update_proj_gap`, `scale`: as in `ScaleByApollo`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `per_tensor`, `key`, `b1`, `b2`, `eps`, `max_growth`, `mu_dtype`, `layout`: as in
        `ScaleByApollo`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByApollo`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhu et al., [APOLLO: SGD-like Memory, AdamW-level
        Performance](https://arxiv.org/abs/2412.05270), 2024"
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "max_growth": max_growth}
    options = {**numbers, "mu_dtype": mu_dtype, "layout": layout}
    rule = ScaleByApollo(rank, update_proj_gap, scale, per_tensor, key, **options)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
