"""Newton's step by conjugate gradients, which shows whether a minimum is near."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ... import tree
from ...tree.types import Scalar

MOST_PRODUCTS = 20
"""The largest number of products with the Hessian, and the steps between two such searches."""


class _Search(NamedTuple):
    products: Array
    on: Array
    x: Array
    residual: Array
    direction: Array
    squares: Scalar  # of the residual
    largest: Scalar  # of the curvatures so far
    decrease: Scalar
    near: Array


def is_minimum(
    product: Callable[[Array], Array],
    gradient: Float[Array, " params"],
    sizes: Float[Array, " params"],
    least: Scalar,
    shortest: Scalar,
    wanted: Bool[Array, ""],
) -> tuple[Bool[Array, ""], Int[Array, ""]]:
    """Whether Newton's step −H⁻¹·g is negligible, or the part of it that a few products with H
    find, in units in which the parameters have similar sizes.

    It is if the loss falls by ½·gᵀH⁻¹g ≤ `least`, if it is a parabola, or if the length
    ‖sizes·H⁻¹g‖ ≤ `shortest`. Both grow with each product, so the search ends where both are
    larger. At a negative curvature there is no minimum near.

    **Arguments:**

    - `product`: from a vector v to H·v.
    - `gradient`: g.
    - `sizes`: what the entries of the step are multiplied by in its length. If all are 0, nothing
        can move, and this is no minimum.
    - `least`, `shortest`: the tolerances.
    - `wanted`: whether to ask. If not, the result is `False` without a product, also under `vmap`.

    **Returns:** the result, and the number of products.
    """
    eps = jnp.finfo(gradient.dtype).eps
    squares = jnp.vdot(gradient, gradient)
    zero = jnp.zeros((), gradient.dtype)

    def body(s: _Search) -> _Search:
        moved = product(s.direction)
        length = jnp.vdot(s.direction, s.direction)
        curvature = jnp.vdot(s.direction, moved) / length
        largest = jnp.maximum(s.largest, jnp.abs(curvature))
        # What is smaller may be rounding, as where the minimum is a whole curve.
        bent = jnp.maximum(jnp.abs(curvature), eps * largest)
        rate = s.squares / jnp.where(bent > 0, bent * length, jnp.inf)
        rate = jnp.where(curvature < -(eps**0.5) * largest, jnp.inf, rate)
        x, residual = s.x + rate * s.direction, s.residual - rate * moved
        new = jnp.vdot(residual, residual)
        decrease = s.decrease + rate * s.squares / 2
        near = (decrease <= least) | (jnp.linalg.norm(sizes * x) <= shortest)
        products = s.products + 1
        on = (curvature > eps * largest) & (new > eps**2 * squares) & jnp.isfinite(new) & near
        return _Search(
            products,
            on & (products < min(len(gradient), MOST_PRODUCTS)),
            x,
            residual,
            residual + new / s.squares * s.direction,
            new,
            largest,
            decrease,
            near,
        )

    end = tree.while_loop(
        "`sl.minimize`",
        lambda s: s.on,
        body,
        _Search(
            jnp.zeros((), jnp.int32),
            wanted & (squares > 0),
            jnp.zeros_like(gradient),
            gradient,
            gradient,
            squares,
            zero,
            zero,
            wanted,
        ),
    )
    return end.near & jnp.any(sizes != 0), end.products
