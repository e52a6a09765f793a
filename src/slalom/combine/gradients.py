"""Combinations that weigh losses by the inner products of their gradients."""

from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from .. import fields
from .._core.fields.keys import AbstractKeyed, key_field
from ..tree import while_loop
from ._combination import AbstractCombination, Terms, normalized


class UPGrad(AbstractCombination):
    """Projects each gradient onto the directions that hurt no term, and averages.

    With the Gram matrix G = JJᵀ of the K gradients, divided by its trace, and uᵢ = eᵢ / K,

        w = Σᵢ argmin vᵀ(G + r·I)v   over v ≥ uᵢ

    The step along Jᵀw increases no term to first order, up to the regularization r. The small
    quadratic programs are solved exactly, with an active set.

    **Arguments:**

    - `regularization`: r, > 0.

    ??? cite "Quinton & Rey, [Jacobian Descent for Multi-Objective
        Optimization](https://arxiv.org/abs/2406.16232), 2024"
    """

    regularization: fields.Number = fields.hyperparameter(1e-4, within="(0, inf)")

    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: Any
    ) -> tuple[Float[Array, " terms"], Any]:
        assert terms.gram is not None
        gram = normalized(terms.gram)
        number = gram.shape[0]
        gram = gram + now.regularization * jnp.eye(number, dtype=gram.dtype)
        least = jnp.eye(number, dtype=gram.dtype) / number
        # v = u + z with z ≥ 0.
        rest = jax.vmap(lambda u: _nonnegative_minimum(gram, gram @ u))(least)
        return jnp.sum(least + rest, axis=0), state


class MGDA(AbstractCombination):
    """The shortest vector in the convex hull of the gradients.

        w = argmin wᵀGw   over w ≥ 0 with Σw = 1

    by the Frank–Wolfe method from wᵢ = 1/K, as in the paper. Near a Pareto-stationary point the
    gradient vanishes.

    **Arguments:**

    - `tol`: the iteration stops when w moves by a smaller share than this, ≥ 0.
    - `max_steps`: the maximum number of iterations, an int ≥ 1.

    ??? cite "Désidéri, [Multiple-gradient descent algorithm
        (MGDA)](https://doi.org/10.1016/j.crma.2012.03.014), 2012; Sener & Koltun, [Multi-Task
        Learning as Multi-Objective Optimization](https://arxiv.org/abs/1810.04650), 2018"
    """

    tol: fields.Number = fields.hyperparameter(1e-3, within="[0, inf)")
    max_steps: int = fields.count_field(100)

    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: Any
    ) -> tuple[Float[Array, " terms"], Any]:
        gram = terms.gram
        assert gram is not None
        number = gram.shape[0]
        # A common factor changes nothing, and squares may overflow.
        gram = normalized(gram)

        def improve(carry: Any) -> Any:
            n, weights, _ = carry
            products = gram @ weights
            nearest = jnp.argmin(products)
            a, b, c = products[nearest], weights @ products, gram[nearest, nearest]
            curvature = b + c - 2 * a
            inside = (b - a) / jnp.where(curvature > 0, curvature, 1)
            share = jnp.where(c <= a, 1.0, jnp.where(b <= a, 0.0, inside)).astype(gram.dtype)
            corner = jnp.arange(number) == nearest
            return n + 1, (1 - share) * weights + jnp.where(corner, share, 0), share

        def goes_on(carry: Any) -> Any:
            n, _, share = carry
            return (n < self.max_steps) & (share >= now.tol)

        start = (jnp.int32(0), jnp.full(number, 1 / number, gram.dtype), jnp.ones((), gram.dtype))
        return while_loop(type(self).__name__, goes_on, improve, start)[1], state


class PCGradState(eqx.Module):
    """The state of `PCGrad`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next orders of projection."""


class PCGrad(AbstractKeyed, AbstractCombination):
    """Removes the conflict with the others from each gradient, and sums.

        for each i, for all j ≠ i in random order:
            if ⟨gᵢ', gⱼ⟩ < 0:   gᵢ' ← gᵢ' − (⟨gᵢ', gⱼ⟩ / ‖gⱼ‖²)·gⱼ,   from gᵢ' = gᵢ

    and the result is Σᵢ gᵢ'.

    **Arguments:**

    - `key`: the key of the random orders, an int in [0, 2³¹), or a PRNG key.

    ??? cite "Yu et al., [Gradient Surgery for Multi-Task
        Learning](https://arxiv.org/abs/2001.06782), 2020"
    """

    key: Any = key_field(default=0)

    def init(self, number: int) -> PCGradState:
        del number
        return PCGradState(self._fresh_key_data())

    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: PCGradState
    ) -> tuple[Float[Array, " terms"], PCGradState]:
        gram = terms.gram
        assert gram is not None
        number = gram.shape[0]
        key, *drawn = jax.random.split(self._typed_key(state.key), number + 1)
        orders = jnp.stack([jax.random.permutation(own, number) for own in drawn])

        def projected(i: Array, order: Array) -> Array:
            def remove(n: Array, weights: Array) -> Array:
                j = order[n]
                product = gram[j] @ weights
                square = gram[j, j]
                change = jnp.where(product < 0, product / jnp.where(square > 0, square, 1), 0)
                return weights - jnp.where((jnp.arange(number) == j) & (j != i), change, 0)

            start = (jnp.arange(number) == i).astype(gram.dtype)
            return jax.lax.fori_loop(0, number, remove, start)

        weights = jnp.sum(jax.vmap(projected)(jnp.arange(number), orders), axis=0)
        return weights, PCGradState(jax.random.key_data(key))


def _nonnegative_minimum(
    matrix: Float[Array, "terms terms"], linear: Float[Array, " terms"]
) -> Float[Array, " terms"]:
    """argmin ½zᵀMz + bᵀz over z ≥ 0 for a positive definite M: the method of Lawson and Hanson."""
    number = linear.shape[0]
    eye = jnp.eye(number, dtype=matrix.dtype)
    least = 10 * float(jnp.finfo(matrix.dtype).eps) * jnp.max(jnp.abs(matrix))

    def minimum_on(free: Bool[Array, " terms"]) -> Float[Array, " terms"]:
        both = free[:, None] & free[None, :]
        solved = jnp.linalg.solve(jnp.where(both, matrix, eye), jnp.where(free, -linear, 0))
        return jnp.where(free, solved, 0)

    def improve(carry: Any) -> Any:
        n, z, free, _ = carry
        target = minimum_on(free)
        outside = free & (target <= 0)
        is_inside = ~jnp.any(outside)
        # As far towards the minimum as all stay ≥ 0. Those that reach 0 are fixed there.
        room = jnp.where(outside, z / jnp.where(outside, z - target, 1), jnp.inf)
        share = jnp.where(is_inside, 1, jnp.min(room))
        blocked = outside & (room <= share)
        moved = jnp.where(is_inside, target, z + share * (target - z))
        slope = jnp.where(free, jnp.inf, matrix @ target + linear)
        steepest = jnp.argmin(slope)
        descends = slope[steepest] < -least
        more = free | (descends & (jnp.arange(number) == steepest))
        free = jnp.where(is_inside, more, free & ~blocked)
        return n + 1, jnp.where(free | is_inside, moved, 0), free, is_inside & ~descends

    def goes_on(carry: Any) -> Any:
        n, _, _, done = carry
        return ~done & (n < 10 * number)

    start = (jnp.int32(0), jnp.zeros_like(linear), jnp.zeros(number, bool), jnp.array(False))
    return while_loop("UPGrad", goes_on, improve, start)[1]
