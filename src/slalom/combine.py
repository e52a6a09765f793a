"""Combinations of several losses, for `tx.combine`.

A combination maps what is known of the terms of a loss, their values and the inner products of
their gradients, to one weight per term. The gradient of the step is that of the weighted sum.
"""

import abc
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from . import fields, tree
from ._core.fields.keys import AbstractKeyed, key_field
from ._core.fields.schedule import read_numbers
from ._core.protocol.context import Context
from ._core.protocol.parts import AbstractDeclared
from .tree.types import PyTree, Tracer

Weights: TypeAlias = Float[Array, " terms"]


class Terms(eqx.Module):
    """The terms of the loss at a step. `sl.train_step` passes them to the transform.

    **Arguments:**

    - `losses`: the value of each term.
    - `gram`: the inner products of the gradients of the terms, where a combination uses them. They
        are multiplied by a power of 4 if they would overflow or underflow.
    """

    losses: Float[Array, " terms"]
    gram: Float[Array, "terms terms"] | None = None


class AbstractCombination(AbstractDeclared):
    """Weights the terms of a loss. A subclass declares its numbers and writes `weigh`.

    The numbers are hyperparameters: inside `tx.combine` they are traced and listed in
    `opt.hyperparams`, and they can be schedules.
    """

    uses_gram: ClassVar[bool] = True
    """Whether the weights depend on the gradients. If not, one backward pass is enough."""

    def init(self, number: int) -> PyTree:
        """The state for a number of terms."""
        return None

    def check(self, number: int) -> None:
        """Raises an error if this many terms cannot be combined."""

    @abc.abstractmethod
    def weigh(self, now: SimpleNamespace, terms: Terms, state: PyTree) -> tuple[Weights, Any]:
        """The weights of a step.

        **Arguments:**

        - `now`: the hyperparameters at this step, by name.
        - `terms`: the losses, and the Gram matrix if this class uses it.
        - `state`: the state.

        **Returns:** one weight per term, and the new state.
        """

    def at_step(self, terms: Terms, state: PyTree, context: Context | None) -> tuple[Weights, Any]:
        """Calls `weigh` with the hyperparameters of the step, all in the dtype of the losses."""
        dtype = terms.losses.dtype

        def cast(x: PyTree) -> PyTree:
            return jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x

        inputs = read_numbers(self, context), terms, state
        numbers, cast_terms, cast_state = jax.tree.map(cast, inputs)
        weights, new = self.weigh(SimpleNamespace(**numbers), cast_terms, cast_state)
        return cast(weights), tree.cast_like(new, state)


def _normalized_gram(terms: Terms) -> Float[Array, "terms terms"]:
    """The Gram matrix divided by its trace; 0 if there is nothing to divide."""
    assert terms.gram is not None
    trace = jnp.trace(terms.gram)
    return terms.gram / jnp.where(trace == 0, 1, trace)


def _as_weights(weights: object) -> Any:
    try:
        array = jnp.asarray(weights, tree.canonical_float())
    except (TypeError, ValueError):
        given = "a dict" if isinstance(weights, dict) else repr(weights)
        raise TypeError(
            "Fixed.weights must be numbers in the order of the terms, such as `[1.0, 0.1]`, got "
            f"{given}."
        ) from None
    if not isinstance(array, Tracer) and not np.all(np.isfinite(array)):
        raise ValueError(f"Fixed.weights must be finite, got {weights!r}.")
    return array


class Fixed(AbstractCombination):
    """Fixed weights: w.

    They are an array of the optimizer, so that other weights do not recompile.

    **Arguments:**

    - `weights`: w, one real number per term, in the order of the terms.
    """

    weights: Float[Array, " terms"] = eqx.field(converter=_as_weights)

    uses_gram: ClassVar[bool] = False

    def check(self, number: int) -> None:
        if self.weights.shape != (number,):
            raise ValueError(
                f"Fixed.weights has shape {self.weights.shape}, and there are {number} terms."
            )

    def weigh(self, now: SimpleNamespace, terms: Terms, state: PyTree) -> tuple[Weights, Any]:
        return self.weights, state


class ReLoBRaLoState(eqx.Module):
    """The state of `ReLoBRaLo`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next draw."""
    age: Int[Array, "*runs"] = fields.until_reset()
    """The number of steps with finite losses."""
    first: Float[Array, "*terms"] = fields.until_reset()
    """The losses of the first step."""
    last: Float[Array, "*terms"] = fields.until_reset()
    """The losses of the last step."""
    weights: Float[Array, "*terms"] = fields.until_reset()
    """The weights of the last step."""


class ReLoBRaLo(AbstractKeyed, AbstractCombination):
    """Larger weights for the terms that have fallen least, relative to a random earlier step.

    With λ̂(s) = K·softmax(L(t) / (T·L(s))) of the K losses L,

        w ← α·(ρ·w + (1 − ρ)·λ̂(0)) + (1 − α)·λ̂(t − 1)

    where ρ is 1 with the probability `rho`, else 0. The first weights are 1, and the second ones
    λ̂(0). A step with a loss that is not finite keeps the weights.

    **Arguments:**

    - `alpha`: α, in [0, 1].
    - `temperature`: T, > 0. A smaller one makes the weights differ more.
    - `rho`: the probability with which the old weights are kept instead of looking back to the
        first losses, in [0, 1].
    - `key`: the key of the draws, an int in [0, 2³¹), or a PRNG key.

    ??? cite "Bischof & Kraus, [Multi-Objective Loss Balancing for Physics-Informed Deep
        Learning](https://arxiv.org/abs/2110.09813), 2021"
    """

    alpha: fields.Number = fields.hyperparameter(0.999, within="[0, 1]")
    temperature: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")
    rho: fields.Number = fields.hyperparameter(1.0, within="[0, 1]")
    key: Any = key_field(default=0)

    uses_gram: ClassVar[bool] = False

    def init(self, number: int) -> ReLoBRaLoState:
        # Three arrays of their own, which can be donated.
        first, last, weights = (jnp.full(number, x, tree.canonical_float()) for x in (1, 1, 1))
        key = self._fresh_key_data()
        return ReLoBRaLoState(key, tree.fresh_count(), first, last, weights)

    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: ReLoBRaLoState
    ) -> tuple[Weights, ReLoBRaLoState]:
        losses = terms.losses
        number = losses.shape[0]
        is_finite = jnp.all(jnp.isfinite(losses))
        first = jnp.where(state.age == 0, losses, state.first)

        def relative_to(earlier: Array) -> Array:
            return number * jax.nn.softmax(losses / (now.temperature * earlier + 1e-12))

        key, drawn = jax.random.split(self._typed_key(state.key))
        keeps = jax.random.uniform(drawn, (), losses.dtype) < now.rho
        old = jnp.where(keeps, state.weights, relative_to(first))
        alpha = jnp.where(state.age == 1, 0, now.alpha)
        new = alpha * old + (1 - alpha) * relative_to(state.last)
        new = jnp.where(state.age == 0, 1, new)
        age, key = tree.increment(state.age), jax.random.key_data(key)
        moved = ReLoBRaLoState(key, age, first, losses, new)
        kept = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), moved, state)
        return kept.weights, kept


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

    def weigh(self, now: SimpleNamespace, terms: Terms, state: PyTree) -> tuple[Weights, Any]:
        gram = _normalized_gram(terms)
        number = gram.shape[0]
        gram = gram + now.regularization * jnp.eye(number, dtype=gram.dtype)
        least = jnp.eye(number, dtype=gram.dtype) / number
        # v = u + z with z ≥ 0.
        rest = jax.vmap(lambda c: _nonnegative_minimum(gram, c))(tree.matmul(least, gram))
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

    def weigh(self, now: SimpleNamespace, terms: Terms, state: PyTree) -> tuple[Weights, Any]:
        # A common factor changes nothing, and squares may overflow.
        gram = _normalized_gram(terms)
        number = gram.shape[0]

        def improve(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            n, weights, _ = carry
            products = gram @ weights
            nearest = jnp.argmin(products)
            a, b, c = products[nearest], weights @ products, gram[nearest, nearest]
            curvature = b + c - 2 * a
            inside = (b - a) / jnp.where(curvature > 0, curvature, 1)
            share = jnp.where(c <= a, 1.0, jnp.where(b <= a, 0.0, inside)).astype(gram.dtype)
            corner = jnp.arange(number) == nearest
            return n + 1, (1 - share) * weights + jnp.where(corner, share, 0), share

        def goes_on(carry: tuple[Array, ...]) -> Array:
            n, _, share = carry
            return (n < self.max_steps) & (share >= now.tol)

        start = (jnp.int32(0), jnp.full(number, 1 / number, gram.dtype), jnp.ones((), gram.dtype))
        return tree.while_loop(type(self).__name__, goes_on, improve, start)[1], state


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
        return PCGradState(self._fresh_key_data())

    def weigh(
        self, now: SimpleNamespace, terms: Terms, state: PCGradState
    ) -> tuple[Weights, PCGradState]:
        gram = terms.gram
        assert gram is not None
        number = gram.shape[0]
        key, *keys = jax.random.split(self._typed_key(state.key), number + 1)
        orders = jnp.stack([jax.random.permutation(k, number) for k in keys])

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

    def improve(carry: tuple[Array, ...]) -> tuple[Array, ...]:
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

    def goes_on(carry: tuple[Array, ...]) -> Array:
        n, _, _, done = carry
        return ~done & (n < 10 * number)

    start = (jnp.int32(0), jnp.zeros_like(linear), jnp.zeros(number, bool), jnp.array(False))
    return tree.while_loop("UPGrad", goes_on, improve, start)[1]


__all__ = ["MGDA", "AbstractCombination", "Fixed", "PCGrad", "ReLoBRaLo", "Terms", "UPGrad"]
