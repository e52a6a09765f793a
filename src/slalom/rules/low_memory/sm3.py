"""Adagrad with the memory of a few vectors: SM3."""

import functools
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ... import fields, tree
from ...tree.types import Hyperparameter, Params
from .._base import AbstractRule, AbstractTransform, advise_keywords, chain
from ..momentum.accumulate import divide_by_root
from ..momentum.momentum import first_moment
from ..shaping.scale import ScaleByLearningRate


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
    return chain(ScaleBySm3(momentum, mu_dtype=mu_dtype), ScaleByLearningRate(learning_rate))
