"""Gradients that are scaled as Adam scales a random projection of them: APOLLO."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.fields.keys import AbstractKeyed, key_field
from ...rules._base import AbstractTransform, advise_keywords
from ...rules.shaping.descent import decayed_descent
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike
from .galore import AbstractProjectedAdam, WideMatrix


class ScaleByApolloState(eqx.Module):
    """The state of `ScaleByApollo`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = fields.per_param()
    nu: PyTree[Float[Array, "..."]] = fields.per_param()
    norm: PyTree[Float[Array, "..."]] = fields.per_param()
    """At each matrix a tuple of the norm of its last update, at other arrays an empty tuple."""


class ScaleByApollo(AbstractKeyed, AbstractProjectedAdam[ScaleByApolloState]):
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
        def zeros(x: Array, wide: WideMatrix) -> Array:
            return jnp.zeros(wide.matrix.batch, tree.sum_dtype(x))

        return ScaleByApolloState(**self._fresh(params, "norm", zeros))

    def begin(self, state):
        self.window = state.age // self.update_proj_gap
        self.key = self._typed_key(self._fresh_key_data())
        self._correct_biases(state)

    def advance(self, g, leaf):
        wide = self.plan
        if wide is None:
            leaf.mu, leaf.nu = self._moments(g, leaf.mu, leaf.nu)
            return
        x = wide.read(g)
        key = jax.random.fold_in(self.key, self.window.astype(jnp.uint32))
        r = _projection(key, wide, x) @ x
        leaf.mu, leaf.nu = self._moments(r, leaf.mu, leaf.nu)
        self.scaled, norm = self._scaled(
            x, r, self._projected_direction(leaf.mu, leaf.nu), *leaf.norm
        )
        leaf.norm = (norm,)

    def direction(self, g, leaf):
        if self.plan is None:
            return self._projected_direction(leaf.mu, leaf.nu)
        return self.plan.write(self.scaled)

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


def _projection(key: Array, wide: WideMatrix, g: Array) -> Array:
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
