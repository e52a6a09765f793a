"""Squares that are stored as numbers of rows and columns: Adafactor, and SM3."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree, Real

from ... import fields, tree
from ..._core.fields.schedule import call_schedule
from ...tree.types import Hyperparameter, Params, Scalar, WhereLike
from ...where.layout import LayoutLike
from .._base import AbstractRule, AbstractTransform, advise_keywords, chain
from .._layout import factored_axes
from ..adaptive.trust import ScaleByParamBlockRms
from ..momentum.accumulate import divide_by_root
from ..momentum.momentum import Ema, first_moment
from ..shaping.clip import clip_factor
from ..shaping.descent import ScaleByLearningRate, decayed
from ..shaping.scale import Scale


def _power_decay(step: Real[Array, "*leaves"], decay_rate: Scalar) -> Real[Array, "*leaves"]:
    """1 − (n + 1)^−c: a uniform mean for c = 1, and one that favors recent squares for c < 1."""
    return 1 - (step + 1) ** -decay_rate


class ScaleByFactoredRmsState(eqx.Module):
    """The state of `ScaleByFactoredRms`."""

    age: Int[Array, "*leaves"] = fields.per_leaf()
    nu: PyTree[Float[Array, "..."]] = fields.per_param(stored="reduced")
    """At each factored leaf the row and column means, of size 1 along the averaged axis, in the
    order of the axes; at each other leaf a tuple of the one mean of squares."""


class ScaleByFactoredRms(AbstractRule[ScaleByFactoredRmsState]):
    """Adafactor's scaling: divides by the root of a factored mean of squares.

        Rₜ = βₜ·Rₜ₋₁ + (1 − βₜ)·mean over inputs of (|gₜ|² + ε)
        Cₜ = βₜ·Cₜ₋₁ + (1 − βₜ)·mean over outputs of (|gₜ|² + ε)
        uₜ = gₜ / √(Rₜ·Cₜ / mean Rₜ)   with   βₜ = 1 − t^−c

    for matrices, and uₜ = gₜ / √vₜ with vₜ = βₜ·vₜ₋₁ + (1 − βₜ)·(|gₜ|² + ε) for other arrays. An
    n × m matrix needs n + m elements. No mean needs a bias correction, since β₁ = 0.

    The two axes are outputs and inputs in the layers of Equinox (`Linear`, `Conv`, `ConvTranspose`,
    `Embedding`, `GRUCell`, `LSTMCell`), even when `eqx.filter_vmap` stacks them. For other arrays
    they are the two longest axes, as in Optax. Their order makes no difference. The means R, C and
    v are stored in at least float32.

    Differs from Optax: t counts from the start of the accumulators, and stays at 1 for the first
    `step_offset` steps, where it would be zero or negative. 1 − βₜ = t^−c is not rounded to a
    multiple of the distance between 1 and its neighbors, which costs Optax 5 % at t = 1e8.

    **Arguments:**

    - `factored`: whether to factor any array.
    - `decay_rate`: c, in [0, 1].
    - `step_offset`: the number of steps that t leaves out, such as the steps of an earlier run, ≥
        0.
    - `min_dim_size_to_factor`: the smallest size of both axes of a factored array, an int ≥ 1.
    - `eps`: ε, > 0; prevents a division by zero where the gradient is zero.
    - `decay_rate_fn`: a function of t − 1 and c that returns βₜ. Defaults to 1 − t^−c.
    - `clipping_threshold`: the largest root mean square of each leaf's update, ≥ 0. It is
        equivalent to `| sl.ClipByBlockRms(d)`, but does not write u to memory in between.
        Defaults to no clipping.
    - `layout`: which axes are outputs and inputs, as for `UnitwiseClip`. Defaults to the axes
        described above.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018; Zhai et al.,
        [Scaling Vision Transformers](https://arxiv.org/abs/2106.04560), 2021, for a bounded βₜ"
    """

    factored: bool = eqx.field(default=True, static=True)
    decay_rate: fields.Number = fields.hyperparameter(0.8, within="[0, 1]")
    step_offset: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    min_dim_size_to_factor: int = fields.count_field(128)
    eps: fields.Number = fields.hyperparameter(1e-30, within="(0, inf)")
    decay_rate_fn: Callable[..., Any] = eqx.field(default=_power_decay, static=True)
    clipping_threshold: fields.OptionalNumber = fields.hyperparameter(None, within="[0, inf]")
    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "leaf"
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByFactoredRmsState:
        tree.check_inexact(params)
        axes = factored_axes(self, params, self.min_dim_size_to_factor)
        chosen = iter(axes if self.factored else (None,) * len(axes))

        def zeros(x: Any) -> tuple[Array, ...]:
            pair = next(chosen)
            if pair is not None:
                return tree.zeros_of_sums(x, sorted(pair, reverse=True))
            return (tree.second_moment(x),)

        return ScaleByFactoredRmsState(age=tree.fresh_count(), nu=jax.tree.map(zeros, params))

    def begin(self, state):
        steps = jnp.asarray(state.age, self.decay_rate.dtype)
        offset = jnp.asarray(self.step_offset, steps.dtype)
        # `jnp.maximum` has half the derivative with respect to an offset of 0.
        counted = jnp.where(steps > offset, steps - offset, 0)
        if self.decay_rate_fn is _power_decay:
            # Not 1 − βₜ: at t = 1e5 it has lost 4 of its 8 digits.
            self.weight = (counted + 1) ** -self.decay_rate
        else:
            name, function = "ScaleByFactoredRms.decay_rate_fn", self.decay_rate_fn
            beta = call_schedule(name, function, counted, decay_rate=self.decay_rate)
            self.weight = 1 - jnp.asarray(beta, steps.dtype)
        # An ε that underflows would not prevent a division by zero.
        self.eps = tree.positive(self.eps)
        state.age = tree.increment(state.age)

    # No two reductions share an expression (see `_core/engine`): g is read three times, and u is
    # the only array of its size that is written.

    def advance(self, g, leaf):
        leaf.nu = tuple(
            tree.moved(old, _mean_of_squares(g, i, old.shape) + self.eps, self.weight)
            for i, old in enumerate(leaf.nu)
        )

    def direction(self, g, leaf):
        if len(leaf.nu) == 1:
            (nu,) = leaf.nu

            def norm_from_quotients():
                return tree.root(jnp.sum(tree.quotient(g, nu) * jnp.conj(g)).real)

            return g * (tree.inverse_root(nu) * self._rms_clip_factor(g, norm_from_quotients))
        row, column = leaf.nu
        # Divided first, since the sum of the largest squares would overflow.
        smaller = tuple(map(min, row.shape, column.shape))  # with both averaged
        mean = _reduce(jnp.sum, row * (math.prod(smaller) / max(row.size, 1)), smaller)
        # Roots of vectors are cheaper than roots of all their products.
        by_row, by_column = tree.inverse_root(row), tree.inverse_root(column)
        scale = tree.root(mean)

        def norm_along(one: Array, other: Array) -> Scalar:
            within = _reduce(jnp.sum, tree.abs_squared(g * one), other.shape)
            # Where g is huge in other rows and columns, a square of the second factor overflows.
            return tree.norm(tree.root(within) * (other * scale))

        def norm():
            # Rows are contiguous, but on a CPU XLA would compute both sums of a 50 257 × 768 matrix
            # at once, at a tenth of the speed.
            return jax.lax.platform_dependent(
                by_row,
                by_column,
                cpu=norm_along,
                default=lambda row, column: norm_along(column, row),
            )

        return g * (by_row * self._rms_clip_factor(g, norm)) * (by_column * scale)

    def _rms_clip_factor(self, g: Array, norm: Callable[[], Scalar]) -> Scalar | int:
        """The factor that clips an update, shaped like `g`, with this norm."""
        if self.clipping_threshold is None:
            return 1
        return clip_factor(norm() / math.sqrt(max(g.size, 1)), self.clipping_threshold)


def _reduce(
    reduction: Callable[..., Array], x: Inexact[Array, "..."], shape: tuple[int, ...]
) -> Array:
    """Reduces the axes that have size 1 in `shape`."""
    axes = tuple(a for a, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m)
    return reduction(x, axes, keepdims=True) if axes else x


def _mean_of_squares(g: Inexact[Array, "..."], i: int, shape: tuple[int, ...]) -> Array:
    """The mean of |g|² over the i-th axis, phrased differently for each i (see `_core/engine`).

    Bounded as in `tree.bounded_square`: one gradient of 1e20 would make all later updates 0.
    """
    if i == 0 or jnp.iscomplexobj(g):
        return tree.bounded(_reduce(jnp.mean, tree.abs_squared(g), shape))
    return tree.bounded(_reduce(jnp.mean, (g + g) * g, shape) / 2)


@advise_keywords
def adafactor(
    learning_rate: Hyperparameter | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: Hyperparameter = 0.8,
    step_offset: Hyperparameter = 0.0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: Hyperparameter | None = 1.0,
    momentum: Hyperparameter | None = None,
    accumulator_dtype: Any = jnp.float32,
    weight_decay: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-30,
    factored: bool = True,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """Adafactor: steps in proportion to the parameters, with a factored mean of squares.

        p ↦ p − η·rms(p)·û − λ·p   with   û = u·min(1, d / rms(u))

    u is the gradient divided by the root of its mean square, which is stored as one row and one
    column per matrix. The update is scaled by the size of the parameter, so η is much larger than
    for Adam. The decay is not multiplied by η: each step subtracts λ·p.

    Differs from Optax: the weight decay is called `weight_decay` and `decay_where`, not
    `weight_decay_rate` and `weight_decay_mask`. See also `ScaleByFactoredRms`.

    **Arguments:**

    - `learning_rate`: η. Defaults to 1.
    - `min_dim_size_to_factor`: a matrix is factored if both axes have at least this size, an int
        ≥ 1.
    - `decay_rate`: c, in [0, 1]. The mean of squares decays by 1 − t^−c at step t.
    - `step_offset`: a number of steps to subtract from t, such as the steps of an earlier run.
    - `multiply_by_parameter_scale`: whether to multiply the update by max(rms(p), 0.001).
    - `clipping_threshold`: d, ≥ 0. `None` for no clipping.
    - `momentum`: the decay of a mean of the updates, in [0, 1). Defaults to no momentum, and no
        memory for it.
    - `accumulator_dtype`: the dtype of this mean.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay.
    - `eps`: ε, > 0, added to the squares.
    - `factored`: whether to store rows and columns instead of full means of squares.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

    **Returns:** a chain of `ScaleByFactoredRms`, which also clips, `ScaleByLearningRate`,
    `ScaleByParamBlockRms`, `Ema`, `AddDecayedWeights` and `Scale`. Links that are switched off are
    left out.

    ??? cite "Shazeer & Stern, [Adafactor](https://arxiv.org/abs/1804.04235), 2018"
    """
    links: list[AbstractTransform] = [
        ScaleByFactoredRms(
            factored,
            decay_rate,
            step_offset,
            min_dim_size_to_factor,
            eps,
            clipping_threshold=clipping_threshold,
        )
    ]
    if learning_rate is not None:
        links.append(ScaleByLearningRate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        links.append(ScaleByParamBlockRms())
    if momentum is not None:
        links.append(Ema(momentum, debias=False, accumulator_dtype=accumulator_dtype))
    if weight_decay is not None:
        links.append(decayed(weight_decay, decay_where))
    return chain(*links, Scale(-1.0))


class ScaleBySm3State(eqx.Module):
    """The state of `ScaleBySm3`."""

    accumulators: PyTree[Float[Array, "..."]] = fields.per_param(stored="reduced")
    """At each leaf one accumulator per axis, of size 1 along the others."""
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()


class ScaleBySm3(AbstractRule[ScaleBySm3State]):
    """SM3: Adagrad with sums of squares that are bounded by one number per row and column.

        vₜ = min over the axes k of aₖ + |gₜ|²,   aₖ = max of vₜ over all axes but k
        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ / √(vₜ + ε),   uₜ = mₜ

    With β₂ < 1, vₜ = β₂·min aₖ + (1 − β₂)·|gₜ|². Vectors and scalars store all of v. The quotient
    is 0 where v is 0.

    **Arguments:**

    - `b1`: β₁, the decay of the momentum, in [0, 1).
    - `b2`: β₂, the decay of the accumulators, in [0, 1]; 1 sums.
    - `eps`: ε, ≥ 0.
    - `mu_dtype`: the dtype in which m is stored; see `ScaleByAdam`.

    ??? cite "Anil et al., [Memory-Efficient Adaptive
        Optimization](https://arxiv.org/abs/1901.11150), 2019"
    """

    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(1.0, within="[0, 1]")
    eps: fields.Number = fields.hyperparameter(1e-8, within="[0, inf)")
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)

    over: ClassVar[str] = "leaf"

    def init(self, params: Params) -> ScaleBySm3State:
        mu = first_moment(self, params, "b1")
        accumulators = jax.tree.map(lambda x: tree.zeros_of_sums(x, _others(x.ndim)), params)
        return ScaleBySm3State(accumulators, mu)

    def begin(self, state):
        self.c1 = 1 - self.b1
        self.c2 = jnp.where(self.b2 == 1, 1, 1 - self.b2)

    def advance(self, g, leaf):
        # XLA writes the total to memory, since a maximum along each axis and the quotient read it.
        # Phrasing it differently for each, as Adafactor does, would be slower: XLA's fast
        # reductions do not fuse with a minimum.
        bound = functools.reduce(jnp.minimum, leaf.accumulators)
        total = self.b2 * bound + self.c2 * tree.bounded_square(g)
        leaf.mu = self.b1 * leaf.mu + self.c1 * divide_by_root(g, total, self.eps)
        leaf.accumulators = _maxima(total)

    def direction(self, g, leaf):
        return leaf.mu


def _others(ndim: int) -> list[tuple[int, ...]]:
    """For each accumulator of a leaf, the axes along which it has size 1."""
    if ndim < 2:
        return [()]
    return [tuple(axis for axis in range(ndim) if axis != kept) for kept in range(ndim)]


def _maxima(total: Array) -> tuple[Array, ...]:
    """The maximum along all axes but one, for each axis."""
    if total.ndim < 2:
        return (total,)
    # The initial value is for empty arrays; sums of squares are never negative.
    return tuple(jnp.max(total, a, keepdims=True, initial=0) for a in _others(total.ndim))


@advise_keywords
def sm3(
    learning_rate: Hyperparameter,
    momentum: Hyperparameter = 0.9,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """SM3: Adagrad with momentum that keeps one number per row and column.

        p ↦ p − η·mₜ   with   mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ / √(vₜ + ε)

    v is the bound of the sums of squares in `ScaleBySm3`.

    **Arguments:**

    - `learning_rate`: η.
    - `momentum`: the decay of the momentum, in [0, 1).
    - `mu_dtype`: the dtype of the momentum; complex parameters use its complex
        counterpart. Defaults to the parameter's dtype, but float32 for float16 parameters.

    **Returns:** a chain of `ScaleBySm3` and `ScaleByLearningRate`.

    ??? cite "Anil et al., [Memory-Efficient Adaptive
        Optimization](https://arxiv.org/abs/1901.11150), 2019"
    """
    return ScaleBySm3(momentum, mu_dtype=mu_dtype) | ScaleByLearningRate(learning_rate)
