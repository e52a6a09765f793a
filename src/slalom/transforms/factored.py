"""A mean of squares in the memory of one row and one column: Adafactor."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int, PyTree, Real

from .. import tree
from .._core.fields import Hyperparameter, count_field, hyperparameter
from .._core.marks import per_leaf, per_param
from .._core.transform import AbstractTransform, Context
from .._types import Params, Scalar, Updates
from ._layout import factored_axes
from .clip import shrinking


def _power_decay(step: Real[Array, "*leaves"], decay_rate: Scalar) -> Real[Array, "*leaves"]:
    """1 − (n + 1)^−c: a mean of all squares with c = 1, and of the later ones with c < 1."""
    return 1 - (step + 1) ** -decay_rate


class ScaleByFactoredRmsState(eqx.Module):
    """What `ScaleByFactoredRms` remembers."""

    age: Int[Array, "*leaves"] = per_leaf()
    nu: PyTree[Float[Array, "..."]] = per_param()
    """At each leaf the means along a row and along a column, of size 1 along the axis that is
    averaged away, in the order of the axes; or the one mean of squares of a leaf that is not
    factored."""


class ScaleByFactoredRms(AbstractTransform):
    """Adafactor's scaling: divides by the root of a mean of squares, kept as a row and a column.

        Rₜ = βₜ·Rₜ₋₁ + (1 − βₜ)·mean over inputs of (|gₜ|² + ε)
        Cₜ = βₜ·Cₜ₋₁ + (1 − βₜ)·mean over outputs of (|gₜ|² + ε)
        uₜ = gₜ / √(Rₜ·Cₜ / mean Rₜ)   with   βₜ = 1 − t^−c

    for matrices, and uₜ = gₜ / √vₜ with vₜ = βₜ·vₜ₋₁ + (1 − βₜ)·(|gₜ|² + ε) for the rest. An
    n × m matrix needs n + m numbers. β₁ = 0, so no mean needs a bias correction.

    The two axes are those of outputs and inputs where the layer is one of Equinox's (`Linear`,
    `Conv`, `ConvTranspose`, `Embedding`, `GRUCell`, `LSTMCell`), also in a stack of layers that
    `eqx.filter_vmap` made; for other arrays they are the two longest ones, as in Optax. Which of
    the two comes first makes no difference. R, C and v are kept in at least float32.

    Differs from Optax: t counts from the start of the accumulators, and is 1 until
    `step_offset` has passed, where it would be zero or negative.

    **Arguments:**

    - `factored`: whether to factor at all.
    - `decay_rate`: c, in [0, 1].
    - `step_offset`: a number of steps that t does not count, such as those of an earlier run.
    - `min_dim_size_to_factor`: how long both axes must be, an int ≥ 1.
    - `epsilon`: ε, > 0: without it a gradient of zeros would be divided by zero.
    - `decay_rate_fn`: what gives βₜ instead, a function of t − 1 and c.
    - `clipping_threshold`: d, ≥ 0, which bounds the root mean square of each leaf's update: the
        same as `| sl.ClipByBlockRms(d)`, without writing u to memory in between.
    - `axis`: the two axes to factor, of every array that this transform sees.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018; Zhai et al.,
        [Scaling Vision Transformers](https://arxiv.org/abs/2106.04560), 2021, for a bounded βₜ"
    """

    factored: bool = eqx.field(default=True, static=True)
    decay_rate: Hyperparameter = hyperparameter(0.8, within="[0, 1]")
    step_offset: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    min_dim_size_to_factor: int = count_field(128)
    epsilon: Hyperparameter = hyperparameter(1e-30, within="(0, inf)")
    decay_rate_fn: Callable[..., Any] = eqx.field(default=_power_decay, static=True)
    clipping_threshold: Hyperparameter | None = hyperparameter(None, within="[0, inf]")
    axis: tuple[int, int] | None = eqx.field(default=None, static=True, kw_only=True)

    keeps_zeros: ClassVar[bool] = True

    def __check_init__(self):
        if self.axis is not None and len(set(self.axis)) != 2:
            raise ValueError(f"ScaleByFactoredRms.axis must be two axes, got {self.axis!r}.")

    def init(self, params: Params) -> ScaleByFactoredRmsState:
        tree.check_inexact(params)
        size = self.min_dim_size_to_factor
        axes = factored_axes(type(self).__name__, params, self.axis, size)
        chosen = iter(axes if self.factored else (None,) * len(axes))

        def zeros(x: Any) -> tuple[Array, ...]:
            pair = next(chosen)
            if pair is not None:
                return tree.zeros_of_sums(x, sorted(pair, reverse=True))
            dtype = tree.real_dtype(tree.accumulation_dtype(tree.canonical(x.dtype)))
            return (jnp.zeros_like(x, dtype=dtype),)

        return ScaleByFactoredRmsState(age=tree.fresh_age(), nu=jax.tree.map(zeros, params))

    def update(
        self,
        updates: Updates,
        state: ScaleByFactoredRmsState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByFactoredRmsState]:
        del params
        now = self.at(context)
        steps = jnp.asarray(state.age, now.decay_rate.dtype)
        counted = jnp.maximum(steps - jnp.asarray(now.step_offset, steps.dtype), 0)
        decay = jnp.asarray(self.decay_rate_fn(counted, now.decay_rate), steps.dtype)
        limits = () if now.clipping_threshold is None else (now.clipping_threshold,)

        # XLA writes to memory what two sums, or a sum and a product, take from one expression. So
        # no two take the same: g is read three times, and nothing of its size is written but u.
        def rule(g, nu, epsilon, *numbers):
            *limit, decay, rest = numbers
            nu = tuple(
                decay * before + rest * (_mean_of_squares(g, i, before.shape) + epsilon)
                for i, before in enumerate(nu)
            )
            if len(nu) == 1:
                bound = _bound(lambda: jnp.sum((g / nu[0]) * jnp.conj(g)).real, g.size, *limit)
                return g * (tree.inverse_root(nu[0]) * bound), nu
            row, column = nu
            # Roots of vectors, not of all their products; and the bound is a factor of one.
            by_row = tree.inverse_root(row)
            mean = _over(jnp.mean, row, _smaller(row, column))
            by_column = tree.inverse_root(column) * tree.root(mean)

            def total():
                # Down the columns first: the other way round, the CPU backend of XLA computes
                # both sums of a 50 257 × 768 matrix as one, at a tenth of the speed.
                within_columns = _over(jnp.sum, tree.abs_squared(g * by_row), column.shape)
                return jnp.sum(within_columns * jnp.square(by_column))

            return g * (by_row * _bound(total, g.size, *limit)) * by_column, nu

        updates, nu = tree.map_leaves(
            rule,
            (updates,),
            (now.epsilon, *limits),
            (decay, tree.complement(decay)),
            per_param=(state.nu,),
        )
        return updates, ScaleByFactoredRmsState(
            tree.increment(state.age), tree.cast_like(nu, state.nu)
        )


def _smaller(row: Array, column: Array) -> tuple[int, ...]:
    """The shape that is left when rows and columns are both averaged away."""
    return tuple(map(min, row.shape, column.shape))


def _over(reduction: Any, x: Inexact[Array, "..."], shape: tuple[int, ...]) -> Array:
    """A reduction of the axes that have size 1 in `shape`."""
    axes = tuple(a for a, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m)
    return reduction(x, axes, keepdims=True) if axes else x


def _mean_of_squares(g: Inexact[Array, "..."], i: int, shape: tuple[int, ...]) -> Array:
    """The i-th mean of |g|², worded differently for each i."""
    if i == 0 or jnp.iscomplexobj(g):
        return _over(jnp.mean, tree.abs_squared(g), shape)
    return _over(jnp.mean, (g + g) * g, shape) / 2


def _bound(total: Callable[[], Array], size: int, threshold: Scalar | None = None) -> Scalar | int:
    """The factor that bounds a root mean square, from the total of the squares."""
    if threshold is None:
        return 1
    return shrinking(tree.root(total() / max(size, 1)), threshold)
