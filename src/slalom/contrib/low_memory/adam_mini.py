"""Adam with one mean of squares for each block of parameters: Adam-mini."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ... import fields, tree
from ...rules._base import AbstractTransform, advise_keywords
from ...rules._layout import block_counts, warn_guessed
from ...rules.adaptive.adam import AbstractMoments, AbstractMomentsState
from ...rules.momentum.momentum import first_moment
from ...rules.shaping.descent import decayed_descent
from ...tree.paths import leaf_paths
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike


class ScaleByAdamMiniState(AbstractMomentsState):
    """The state of `ScaleByAdamMini`."""

    nu: PyTree[Float[Array, "..."]] = fields.per_param(stored="reduced")
    """At each leaf a tuple of the means of squares, with as many axes as the leaf: an entry for
    each block along each axis."""


class ScaleByAdamMini(AbstractMoments[ScaleByAdamMiniState]):
    """Adam-mini: Adam with one mean of squares for each block of parameters.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·mean over the block of |gₜ|²
        uₜ = m̂ₜ / (√v̂ₜ + ε)   with   m̂ₜ = mₜ / (1 − β₁ᵗ),   v̂ₜ = vₜ / (1 − β₂ᵗ)

    An n × m matrix needs n elements for v instead of n·m, so the state is half of Adam's. The
    blocks follow version 1.1.1 of the authors' code, which has finer ones than the first version of
    the paper:

    - the weights of one output, in `Linear`, `Conv` and other layers with outputs and inputs; in
        the output layer of a language model these are the weights of one token;
    - the row of one token, in an `Embedding`;
    - one head, in the query and key projections of an `eqx.nn.MultiheadAttention`, and one block of
        outputs wherever a layout has blocks, such as `(8o)i` for 8 heads;
    - each element, in a bias;
    - the whole array, in a norm's scale and any other vector.

    Other arrays follow Optax, where inputs come first. If such an array belongs to a module of your
    own, creating the optimizer warns about it.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the means of squares, in [0, 1).
    - `eps`: ε, added after the root, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.
    - `layout`: which axes are outputs and inputs, as for `UnitwiseClip`.

    ??? cite "Zhang et al., [Adam-mini: Use Fewer Learning Rates To Gain
        More](https://arxiv.org/abs/2406.16793), 2024"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.999, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "leaf"

    def notes(self, params: Params) -> tuple[str | None, ...]:
        counts = (int(np.prod(c, dtype=int)) for c in self._counts(params))
        return tuple(f"{n} block{'s' * (n != 1)}" for n in counts)

    def init(self, params: Params) -> ScaleByAdamMiniState:
        tree.check_inexact(params)
        warn_guessed(self, params)
        counts = iter(self._counts(params))
        return ScaleByAdamMiniState(
            age=tree.fresh_count(),
            mu=first_moment(self, params, "b1"),
            nu=jax.tree.map(lambda x: _zeros(x, next(counts)), params),
        )

    def advance(self, g, leaf):
        (nu,) = leaf.nu
        leaf.mu = self.b1 * leaf.mu + self.c1 * g
        leaf.nu = (self.b2 * nu + self.c2 * tree.bounded(_mean_of_squares(g, nu.shape)),)

    def direction(self, g, leaf):
        return _scaled(leaf.mu, self.mu_scale / self._divisor(leaf.nu[0]))

    def _counts(self, params: Params) -> tuple[tuple[int, ...], ...]:
        """For each leaf the number of blocks along each axis."""
        leaves = jax.tree.leaves(params)
        names = (path.rpartition(".")[2] for path in leaf_paths(params))
        return tuple(
            tuple(np.shape(x)) if name.startswith("bias") else counts
            for x, name, counts in zip(leaves, names, block_counts(self, params), strict=True)
        )


# --- blocks ---------------------------------------------------------------------------------


def _split(shape: tuple[int, ...], counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The axes that replace each axis: the number of blocks and their length, or the axis itself
    where one of the two is 1."""
    return [(c, n // c) if 1 < c < n else (n,) for n, c in zip(shape, counts, strict=True)]


def _within(shape: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
    """The axes inside the blocks, among those of `_split`."""
    inside: list[bool] = []
    for axes, c in zip(_split(shape, counts), counts, strict=True):
        inside += [False, True] if len(axes) == 2 else [axes[0] != c]
    return tuple(a for a, within in enumerate(inside) if within)


def _in_blocks(x: Array, counts: tuple[int, ...]) -> Array:
    shape = tuple(n for axes in _split(x.shape, counts) for n in axes)
    return x if shape == x.shape else jnp.reshape(x, shape)


def _zeros(x: Any, counts: tuple[int, ...]) -> tuple[Array, ...]:
    within = _within(np.shape(x), counts)
    (zeros,) = tree.zeros_of_sums(_in_blocks(x, counts), [within])
    return (zeros if zeros.shape == counts else jnp.reshape(zeros, counts),)


def _mean_of_squares(g: Array, counts: tuple[int, ...]) -> Array:
    """The mean of |g|² over each block."""
    within = _within(g.shape, counts)
    total = jnp.sum(tree.abs_squared(_in_blocks(g, counts)), within)
    return jnp.reshape(total / float(max(g.size // max(total.size, 1), 1)), counts)


def _scaled(x: Array, factors: Array) -> Array:
    """`x`, with each block multiplied by its factor."""
    split, within = _in_blocks(x, factors.shape), _within(x.shape, factors.shape)
    column = tuple(1 if a in within else n for a, n in enumerate(split.shape))
    return jnp.reshape(split * jnp.reshape(factors, column), x.shape)


@advise_keywords
def adam_mini(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    layout: LayoutLike = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Adam-mini: AdamW with one mean of squares for each block of parameters.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·mean over the block of |gₜ|²

    A block is one output, one token or one attention head. The state is half of Adam's.

    **Arguments:**

    - `learning_rate`: η, as for AdamW.
    - `b1`, `b2`, `eps`: as in `ScaleByAdamMini`.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
        The authors exclude biases and norms: `sl.where.ndim(min=2)`.
    - `mu_dtype`, `layout`: as in `ScaleByAdamMini`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleByAdamMini`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhang et al., [Adam-mini: Use Fewer Learning Rates To Gain
        More](https://arxiv.org/abs/2406.16793), 2024"
    """
    rule = ScaleByAdamMini(b1, b2, eps, mu_dtype=mu_dtype, layout=layout)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
