"""Boxes, and the minimizer of a quasi-Newton model in one, as L-BFGS-B finds it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ... import tree
from ..._core.protocol.transform import AbstractTransform
from ...projections import box
from ...tree.types import Scalar


class Pairs(NamedTuple):
    """Differences of parameters and gradients, newest first; those that are not stored are zero."""

    s: Float[Array, "memory params"]
    y: Float[Array, "memory params"]
    stored: Bool[Array, " memory"]


class _Model(NamedTuple):
    """B = θ·I − W·M·Wᵀ, with the inverse of M."""

    theta: Scalar
    w: Float[Array, "params columns"]
    inverse: Float[Array, "columns columns"]


class Box(NamedTuple):
    """The box, and a point of it with its gradient."""

    x: Float[Array, " params"]
    gradient: Float[Array, " params"]
    lower: Float[Array, " params"]
    upper: Float[Array, " params"]

    def clip(self, x: Array) -> Array:
        return jnp.clip(x, self.lower, self.upper)

    @property
    def held(self) -> Bool[Array, " params"]:
        """Which parameters are at a bound that the gradient leads out of."""
        below = (self.x <= self.lower) & (self.gradient > 0)
        return below | ((self.x >= self.upper) & (self.gradient < 0))


def in_boxes(name: str, tx: AbstractTransform, bounds: Any) -> AbstractTransform:
    """A transform inside `.project` onto the boxes of the argument `bounds` of a recipe.

    **Arguments:**

    - `name`: the recipe, for messages.
    - `tx`: the transform.
    - `bounds`: a pair, a mapping from selectors to pairs, or `None`.
    """
    groups = bounds if isinstance(bounds, Mapping) else {None: bounds}
    for where, pair in groups.items():
        if pair is None:
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"{name}.bounds must be a pair `(lower, upper)` or a mapping from selectors to "
                f"such pairs, got {pair!r}."
            )
        tx = tx.project(box(*pair), where=where)
    return tx


def minimizer(box: Box, pairs: Pairs, theta: Scalar) -> Float[Array, " params"]:
    """An approximate minimizer of the model of the loss among the points of the box.

    First the least value along the projected gradient, then over the parameters that are inside
    their bounds there.

    **Arguments:**

    - `box`: the box, and where the model is exact.
    - `pairs`: the memory of the model.
    - `theta`: θ, the curvature that the model has without its pairs.
    """

    def descends(end: Array) -> Array:
        slope = jnp.vdot(box.gradient, end - box.x)
        return (slope < 0) & jnp.all(jnp.isfinite(end))

    end = _over_the_free(box, model_of(pairs, theta))
    empty = Pairs(pairs.s, pairs.y, jnp.zeros_like(pairs.stored))
    # Where rounding has spoiled the model, the gradient alone is left.
    return jax.lax.cond(
        descends(end), lambda: end, lambda: cauchy_point(box, model_of(empty, theta))
    )


def model_of(pairs: Pairs, theta: Scalar) -> _Model:
    """The compact form (Byrd et al., 1994), with pairs scaled such that ⟨s, y⟩ = 1."""
    sy = jnp.sum(pairs.s * pairs.y, axis=1)
    root = jnp.where(pairs.stored, 1 / jnp.sqrt(jnp.where(pairs.stored, sy, 1)), 0)
    s, y = pairs.s * root[:, None], pairs.y * root[:, None]
    # Row i and column j with pair i newer than pair j, which comes first here.
    lower = jnp.triu(tree.matmul(s, y.T), 1)
    one = jnp.eye(sy.shape[0], dtype=sy.dtype)
    # A pair that is not stored has no columns in W, and must not make the matrix singular.
    missing = jnp.where(pairs.stored, 0, 1)
    inverse = jnp.block([[-one, lower.T], [lower, theta * tree.matmul(s, s.T) + jnp.diag(missing)]])
    return _Model(theta, jnp.concatenate([y, theta * s]).T, inverse)


def cauchy_point(box: Box, model: _Model) -> Float[Array, " params"]:
    """The first minimum of the model along x(t), the projection of x − t·g.

    Between two times at which parameters reach their bounds, the model is a parabola in t. All are
    computed at once: sums over the parameters that still move are cumulative sums in the order of
    these times.
    """
    x, g, theta = box.x, box.gradient, model.theta
    ahead = jnp.where(g < 0, box.upper, box.lower)
    times = jnp.where(g == 0, jnp.inf, (x - ahead) / jnp.where(g == 0, 1, g))
    order = jnp.argsort(times)
    ends = times[order]
    moving = jnp.where(ends > 0, g[order], 0)
    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    begins = jnp.where(jnp.isfinite(begins), begins, 0)  # what comes after is not reached
    lasts = jnp.where(jnp.isfinite(ends), ends - begins, 0)

    def remaining(terms: Array) -> Array:
        return jnp.flip(jnp.cumsum(jnp.flip(terms, 0), 0), 0)

    squares = remaining(moving**2)
    p = remaining(-moving[:, None] * model.w[order])
    steps = jnp.cumsum(lasts[:, None] * p, 0) - lasts[:, None] * p
    mp = jnp.linalg.solve(model.inverse, p.T).T
    slopes = squares * (theta * begins - 1) - jnp.sum(mp * steps, 1)
    curvatures = theta * squares - jnp.sum(mp * p, 1)
    least = jnp.finfo(ends.dtype).eps * theta * squares[0]
    ahead_by = -slopes / jnp.maximum(curvatures, jnp.where(least > 0, least, 1))
    stops = ahead_by < ends - begins
    at = jnp.argmax(stops)
    time = jnp.where(jnp.any(stops), begins[at] + jnp.maximum(ahead_by[at], 0), jnp.inf)
    there = box.clip(x - jnp.where(times > time, time, 0) * jnp.where(times > 0, g, 0))
    return jnp.where(times <= time, jnp.where(g == 0, x, ahead), there)


def _over_the_free(box: Box, model: _Model) -> Array:
    """The minimum of the model over the parameters that are free at the Cauchy point, taken back
    into the box."""
    x, g, theta = box.x, box.gradient, model.theta
    start = cauchy_point(box, model)
    free = (start > box.lower) & (start < box.upper)
    w = jnp.where(free[:, None], model.w, 0)
    moved = jnp.linalg.solve(model.inverse, model.w.T @ (start - x))
    residual = jnp.where(free, g + theta * (start - x), 0) - w @ moved
    inner = jnp.linalg.solve(model.inverse - tree.matmul(w.T, w) / theta, w.T @ residual)
    step = -residual / theta - w @ inner / theta**2

    projected = box.clip(start + step)
    # The projection may ascend. Then the step is cut where it leaves the box, as in version 2.
    ahead = jnp.where(step < 0, box.lower, box.upper)
    room = jnp.where(step == 0, jnp.inf, (ahead - start) / jnp.where(step == 0, 1, step))
    cut = box.clip(start + jnp.minimum(jnp.min(room), 1) * step)
    return jnp.where(jnp.vdot(g, projected - x) > 0, cut, projected)
