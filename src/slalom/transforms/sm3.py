"""Adagrad in the memory of a few vectors: SM3."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from .. import tree
from .._core.fields import Hyperparameter, dtype_field, hyperparameter
from .._core.marks import param_like, per_param
from .._core.transform import AbstractTransform, Context
from .._types import Params, Updates


class ScaleBySM3State(eqx.Module):
    """What `ScaleBySM3` remembers."""

    accumulators: PyTree[Float[Array, "..."]] = per_param()
    """At each leaf one for each axis, of size 1 along the others."""
    mu: PyTree[Inexact[Array, "..."]] = param_like()


class ScaleBySM3(AbstractTransform):
    """SM3: Adagrad whose sums of squares are bounded by one number for each row and column.

        vₜ = min over the axes k of aₖ + |gₜ|²,   aₖ = max of vₜ over all axes but k
        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ / √(vₜ + ε),   uₜ = mₜ

    With β₂ < 1 it is vₜ = β₂·min aₖ + (1 − β₂)·|gₜ|². Vectors and scalars keep all of v. Where
    v is 0 the quotient is 0.

    **Arguments:**

    - `b1`: β₁, the decay of the momentum, in [0, 1).
    - `b2`: β₂, the decay of the accumulators, in [0, 1]; 1 sums.
    - `eps`: ε, ≥ 0.
    - `mu_dtype`: how m is stored; the parameter's own dtype without it.

    ??? cite "Anil et al., [Memory-Efficient Adaptive
        Optimization](https://arxiv.org/abs/1901.11150), 2019"
    """

    b1: Hyperparameter = hyperparameter(0.9, within="[0, 1)")
    b2: Hyperparameter = hyperparameter(1.0, within="[0, 1]")
    eps: Hyperparameter = hyperparameter(1e-8, within="[0, inf)")
    mu_dtype: np.dtype | None = dtype_field(kw_only=True)

    def init(self, params: Params) -> ScaleBySM3State:
        mu = tree.first_moment(params, self.mu_dtype)
        accumulators = jax.tree.map(lambda x: tree.zeros_of_sums(x, _others(x.ndim)), params)
        return ScaleBySM3State(accumulators, mu)

    def update(
        self,
        updates: Updates,
        state: ScaleBySM3State,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleBySM3State]:
        del params
        now = self.at(context)
        bounds = jax.tree.map(
            lambda _, along: functools.reduce(jnp.minimum, along), updates, state.accumulators
        )

        # The total is written to memory, since a maximum along each axis and the quotient read it.
        # Worded anew for each of them, as Adafactor's squares are, it would not be: but XLA's fast
        # reductions take no minimum along, and its others cost more than the memory.
        def rule(g, bound, mu, b1, c1, b2, c2, eps):
            total = b2 * bound + c2 * tree.abs_squared(g)
            scaled = g * jnp.where(total == 0, 0, jax.lax.rsqrt(total + eps))
            return b1 * mu + c1 * scaled, total

        share = jnp.where(now.b2 == 1, 1, tree.complement(now.b2))
        mu, total = tree.map_leaves(
            rule,
            (updates, bounds, state.mu),
            (now.b1, tree.complement(now.b1), now.b2, share, now.eps),
            like=(state.mu, bounds),
        )
        accumulators = jax.tree.map(_greatest, total, state.accumulators)
        return tree.widened(mu), ScaleBySM3State(accumulators, mu)


def _others(ndim: int) -> list[tuple[int, ...]]:
    """For each accumulator of a leaf, the axes that it has no entries along."""
    if ndim < 2:
        return [()]
    return [tuple(axis for axis in range(ndim) if axis != kept) for kept in range(ndim)]


def _greatest(total: Array, accumulators: tuple[Array, ...]) -> tuple[Array, ...]:
    """The greatest entries along all axes but one, for each axis."""
    if total.ndim < 2:
        return (jnp.asarray(total, accumulators[0].dtype),)

    # The least sum of squares is 0: so there is a greatest one also of none.
    return tuple(
        jnp.asarray(jnp.max(total, others, keepdims=True, initial=0), before.dtype)
        for others, before in zip(_others(total.ndim), accumulators, strict=True)
    )
