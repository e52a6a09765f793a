"""The limited-memory quasi-Newton rule."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.protocol.real_vectors import from_vector, to_vector
from ...tree.dtypes import sum_dtype
from ...tree.types import Hyperparameter, Params, Scalar, Updates
from .._base import AbstractTransform, advise_keywords, chain
from ..linesearch.zoom import ScaleByZoomLinesearch
from ..shaping.descent import ScaleByLearningRate
from ..shaping.scale import Scale
from ._box import Box, Pairs, in_boxes, minimizer


class ScaleByLbfgsState(eqx.Module):
    """The state of `ScaleByLbfgs`.

    The memories have a first axis for the pairs, so they are marked as `per_param` instead of
    `param_like`. ρ and γ, which depend on all parameters, are computed from them in each step, so
    the pairs of the other parameters stay valid when one is reset or reshaped.
    """

    count: Int[Array, ""]
    """The number of pairs stored since the memory was last empty."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    """The number of updates of each parameter."""
    diff_params: PyTree[Inexact[Array, "memory ..."]] = fields.per_param()
    """sₖ of each pair."""
    diff_updates: PyTree[Inexact[Array, "memory ..."]] = fields.per_param()
    """yₖ of each pair."""
    products: PyTree[Float[Array, " memory"]] = fields.per_param()
    """The contribution of each parameter to ⟨sₖ, yₖ⟩ of each pair."""
    params: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The parameters of the last update."""
    updates: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The gradients of the last update."""


class ScaleByLbfgs(AbstractTransform[ScaleByLbfgsState]):
    """L-BFGS: multiplies gradients by an approximation of the inverse Hessian.

    From parameters w and gradients g of the last m + 1 steps,

        sₖ = wₖ − wₖ₋₁,   yₖ = gₖ − gₖ₋₁,   ρₖ = 1 / ⟨sₖ, yₖ⟩
        P ← γ·I,   then for each pair, oldest first:   P ← (I − ρ·s·yᵀ)·P·(I − ρ·y·sᵀ) + ρ·s·sᵀ
        uₖ = P·gₖ

    by the two-loop recursion, with γ = ⟨s, y⟩ / ⟨y, y⟩ of the newest pair. Before there is one, γ
    is such that ‖u‖ = ‖g‖, but at most 1 and at least min(√ε·max(‖w‖, 1), 1), where ε is the
    machine epsilon. Use it with a line search, as in `sl.lbfgs`. Complex parameters count as pairs
    of real ones.

    Differs from Optax: the first step has a minimum length, because a line search that starts at
    g = 1e-10 does not change w at all. In float32 this works for losses whose gradients are at
    least 1e-16. A pair with ⟨s, y⟩ ≤ ε·‖s‖·‖y‖ is not stored, since P would not be positive
    definite and u might ascend. If the parameters did not move, as after a failed line search, the
    memory is cleared, and the next direction is the gradient. The state of half-precision
    parameters is float32.

    Inside `.project` onto a box this is L-BFGS-B. The result is w − x, where x is an approximate
    minimum of the quadratic model in the box: first along the projected gradient (the generalized
    Cauchy point), then over the parameters that are not at their bounds there. The result of the
    second part is projected onto the box, as in version 3.0 of the authors' code.

    **Arguments:**

    - `memory_size`: m, an int ≥ 1. The state takes 2·m + 2 times the parameters' memory.
    - `scale_init_precond`: whether to use γ as above. If `False`, γ = 1.

    ??? cite "Nocedal, [Updating Quasi-Newton Matrices with Limited
        Storage](https://doi.org/10.1090/S0025-5718-1980-0572855-7), 1980; Liu & Nocedal, [On the
        limited memory BFGS method for large scale
        optimization](https://doi.org/10.1007/BF01589116), 1989; Byrd et al., [A Limited Memory
        Algorithm for Bound Constrained Optimization](https://doi.org/10.1137/0916069), 1995;
        Morales & Nocedal, [Remark on "Algorithm 778"](https://doi.org/10.1145/2049662.2049669),
        2011"
    """

    memory_size: int = fields.count_field(10)
    scale_init_precond: bool = eqx.field(default=True, static=True)

    needs: ClassVar[tuple[str, ...]] = ("params",)
    keeps_zeros: ClassVar[bool] = True
    unconstrained: ClassVar[bool] = True
    heeds_bounds: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByLbfgsState:
        size = self.memory_size
        return ScaleByLbfgsState(
            count=tree.fresh_count(),
            age=tree.fresh_count(),
            diff_params=tree.stacked_zeros(params, size),
            diff_updates=tree.stacked_zeros(params, size),
            products=jax.tree.map(lambda p: jnp.zeros(size, sum_dtype(p)), params),
            # In full, since under `.write` they have more digits than their dtype.
            params=tree.zeros_like(params, tree.accumulation_dtype),
            updates=tree.zeros_like(params, tree.accumulation_dtype),
        )

    def update(self, updates, state, params=None, context=None):
        params = self.demand("params", params)
        state = self._remember(updates, state, params)
        if context is None or context.bounds is None:
            return self._precondition(updates, state), state
        return self._inside(updates, state, params, context.bounds), state

    def _remember(
        self, updates: Updates, state: ScaleByLbfgsState, params: Params
    ) -> ScaleByLbfgsState:
        """The state with the newest pair."""
        s, y = last_changes(params, updates, state)
        products = jax.tree.map(tree.inner, s, y)
        sy, ss, yy = _total(products), tree.inner(s, s), tree.inner(y, y)
        least = jnp.finfo(sy.dtype).eps * jnp.sqrt(ss) * jnp.sqrt(yy)
        # A NaN compares false.
        good = (sy > least) & jnp.isfinite(yy)

        count = jnp.where(ss == 0, 0, state.count)
        position = count % self.memory_size

        def store(memory: Array, new: Array) -> Array:
            new = jnp.where(good, jnp.asarray(new, memory.dtype), _at(memory, position))
            return jax.lax.dynamic_update_index_in_dim(memory, new, position, 0)

        return ScaleByLbfgsState(
            count=jnp.where(good, tree.increment(count), count),
            age=tree.increment(state.age),
            diff_params=jax.tree.map(store, state.diff_params, s),
            diff_updates=jax.tree.map(store, state.diff_updates, y),
            products=jax.tree.map(store, state.products, products),
            params=tree.copy(tree.cast_like(params, state.params)),
            updates=tree.copy(tree.cast_like(updates, state.updates)),
        )

    def _inside(
        self,
        updates: Updates,
        state: ScaleByLbfgsState,
        params: Params,
        bounds: tuple[Params, Params],
    ) -> Updates:
        """w − x, where x minimizes the model in the box."""
        if not jax.tree.leaves(params):
            return updates
        dtype = sum_dtype(params)

        def vector(tree: PyTree) -> Array:
            return to_vector(tree, dtype)

        positions, is_pair = self._newest_first(state)
        s = jax.vmap(vector)(state.diff_params)[positions]
        y = jax.vmap(vector)(state.diff_updates)[positions]
        sy = jnp.sum(s * y, axis=1)
        stored = is_pair & (sy > jnp.finfo(dtype).tiny)
        pairs = Pairs(jnp.where(stored[:, None], s, 0), jnp.where(stored[:, None], y, 0), stored)
        theta = jnp.ones((), dtype)
        if self.scale_init_precond:
            scale = jnp.asarray(first_scale(updates, state.params), dtype)
            # Where the box is bounded, it bounds the first step, and the whole gradient is tried.
            ends = jnp.stack([vector(bound) for bound in bounds])
            first = 1 / jnp.where(jnp.all(jnp.isfinite(ends)), jnp.maximum(scale, 1), scale)
            newest = jnp.vdot(y[0], y[0]) / jnp.where(stored[0], sy[0], 1)
            theta = jnp.where(stored[0], newest, first)
        x, (lower, upper) = vector(params), map(vector, bounds)
        box = Box(jnp.clip(x, lower, upper), vector(updates), lower, upper)
        return from_vector(x - minimizer(box, pairs, theta), tree.widened(params))

    def _newest_first(self, state: ScaleByLbfgsState) -> tuple[Array, Array]:
        """The positions of the pairs in the memories, and whether there are such pairs yet."""
        ranks = jnp.arange(self.memory_size, dtype=state.count.dtype)
        return (state.count - 1 - ranks) % self.memory_size, ranks < state.count

    def _precondition(self, updates: Updates, state: ScaleByLbfgsState) -> Updates:
        """P·g by the two-loop recursion; missing pairs have ρ = 0."""
        positions, is_pair = self._newest_first(state)
        sy = _total(state.products, positions.shape)[positions]
        stored = is_pair & (sy > jnp.finfo(sy.dtype).tiny)
        weights = jnp.where(stored, 1 / jnp.where(stored, sy, 1), 0)

        def pair(position: Array) -> PyTree:
            memories = (state.diff_params, state.diff_updates)
            return jax.tree.map(lambda memory: _at(memory, position), memories)

        def product(weight: Array, a: PyTree, b: PyTree) -> Array:
            return weight * jnp.asarray(tree.inner(a, b), weight.dtype)

        def newest_first(q: PyTree, pair_numbers: PyTree) -> PyTree:
            position, weight = pair_numbers
            s, y = pair(position)
            alpha = product(weight, s, q)
            now = SimpleNamespace(alpha=alpha)
            return tree.map_leaves(lambda now, q, y: q - now.alpha * y, (q, y), now), alpha

        def oldest_first(r: PyTree, pair_numbers: PyTree) -> PyTree:
            position, weight, alpha = pair_numbers
            s, y = pair(position)
            beta = alpha - product(weight, y, r)
            now = SimpleNamespace(beta=beta)
            return tree.map_leaves(lambda now, r, s: r + now.beta * s, (r, s), now), None

        q = jax.tree.map(
            lambda u, y: jnp.asarray(u, tree.accumulation_dtype(u.dtype, y.dtype)),
            updates,
            state.updates,
        )
        q, alphas = jax.lax.scan(newest_first, q, (positions, weights))
        if self.scale_init_precond:
            _, y = pair(positions[0])
            first = jnp.asarray(first_scale(updates, state.params), weights.dtype)
            newest = 1 / jnp.where(stored[0], product(weights[0], y, y), 1)
            q = tree.scale(q, jnp.where(stored[0], newest, first))
        return jax.lax.scan(oldest_first, q, (positions, weights, alphas), reverse=True)[0]


def _total(products: PyTree, shape: tuple[int, ...] = ()) -> Array:
    """The sum over the parameters, in the widest of their dtypes."""
    dtype = sum_dtype(products)
    leaves = jax.tree.leaves(products)
    return sum((jnp.asarray(x, dtype) for x in leaves), jnp.zeros(shape, dtype))


def _at(memory: PyTree, position: Array) -> PyTree:
    return jax.lax.dynamic_index_in_dim(memory, position, keepdims=False)


def last_changes(params: Params, updates: Updates, state: PyTree) -> tuple[Params, Updates]:
    """By how much parameters and gradients differ from those in the state; 0 in the first step."""

    def differences(now, p, last_p, u, last_u):
        return jnp.where(now.first, 0, p - last_p), jnp.where(now.first, 0, u - last_u)

    return tree.map_leaves(
        differences,
        (params, state.params, updates, state.updates),
        SimpleNamespace(first=state.age == 0),
    )


def first_scale(updates: Updates, params: Params) -> Scalar:
    """The factor of the first direction, which is the gradient, of a quasi-Newton rule."""
    norm = tree.global_norm(updates)
    size = jnp.asarray(tree.global_norm(params), norm.dtype)
    # A step shorter than a rounding of the parameters would not change them. A longer one than the
    # gradient would be wrong without a line search, so it is only as long as it needs to be.
    least = jnp.finfo(norm.dtype).eps ** 0.5 * jnp.maximum(size, 1)
    length = jnp.clip(norm, jnp.minimum(least, 1), 1)
    return jnp.where(norm == 0, 1, length / jnp.where(norm == 0, 1, norm))


ZOOM = ScaleByZoomLinesearch(20, initial_guess_strategy="one")


@advise_keywords
def lbfgs(
    learning_rate: Hyperparameter | None = None,
    memory_size: int = 10,
    scale_init_precond: bool = True,
    linesearch: AbstractTransform | None = ZOOM,
    *,
    bounds: Any = None,
) -> AbstractTransform:
    """L-BFGS: an approximation of Newton's method, with a line search.

        p ↦ p − η·P·g

    P approximates the inverse Hessian, as in `ScaleByLbfgs`, and a line search finds η.

    For deterministic losses: use the same data in every step. `sl.train_step` passes the loss to
    the line search.

    ```python
    >>> def rosenbrock(p):
    ...     return 100 * (p["y"] - p["x"] ** 2) ** 2 + (1 - p["x"]) ** 2
    >>> params = {"x": jnp.array(0.0), "y": jnp.array(0.0)}
    >>> opt = sl.Optimizer(sl.lbfgs(), params)
    >>> step = sl.train_step(rosenbrock)
    >>> for _ in range(30):
    ...     params, opt, loss = step(params, opt)
    >>> bool(rosenbrock(params) < 1e-8)
    True

    ```

    With `bounds` it is L-BFGS-B, and all parameters stay in a box:

    ```python
    >>> params = {"x": jnp.array(0.0), "y": jnp.array(0.0)}
    >>> opt = sl.Optimizer(sl.lbfgs(bounds={sl.where.path("x"): (None, 0.5)}), params)
    >>> for _ in range(30):
    ...     params, opt, loss = step(params, opt)
    >>> params
    {'x': Array(0.5, dtype=float32), 'y': Array(0.25, dtype=float32)}

    ```

    **Arguments:**

    - `learning_rate`: a factor of the direction; the search finds η relative to it. Defaults to
        1.
    - `memory_size`: the number of past differences of parameters and gradients in P, an int ≥ 1.
    - `scale_init_precond`: as in `ScaleByLbfgs`.
    - `linesearch`: the line search, such as `ScaleByZoomLinesearch` or
        `ScaleByBacktrackingLinesearch`; `None` for no search. Defaults to a zoom line search of at
        most 20 steps with the initial guess 1.
    - `bounds`: a pair `(lower, upper)` as `sl.projections.box` takes it, or a mapping from
        selectors to such pairs: `{sl.where.path("noise"): (1e-6, None)}`. A start outside is
        projected, with a warning. Defaults to no bounds.

    **Returns:** a chain of `ScaleByLbfgs`, `Scale` or `ScaleByLearningRate`, and the line search;
    with `bounds` inside `.project(sl.projections.box(lower, upper))`.

    ??? cite "Liu & Nocedal, [On the limited memory BFGS method for large scale
        optimization](https://doi.org/10.1007/BF01589116), 1989; Byrd et al., [A Limited Memory
        Algorithm for Bound Constrained Optimization](https://doi.org/10.1137/0916069), 1995"
    """
    scale = Scale(-1.0) if learning_rate is None else ScaleByLearningRate(learning_rate)
    links = () if linesearch is None else (linesearch,)
    tx = chain(ScaleByLbfgs(memory_size, scale_init_precond), scale, *links)
    return in_boxes("lbfgs", tx, bounds)
