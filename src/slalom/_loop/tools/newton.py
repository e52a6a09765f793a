"""Newton's step by conjugate gradients, which shows how far a minimum is."""

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


def newton(
    product: Callable[[Array], Array],
    gradient: Float[Array, " params"],
    sizes: Float[Array, " params"],
    wanted: Bool[Array, ""],
) -> tuple[Scalar, Scalar, Int[Array, ""]]:
    """Newton's step −H⁻¹·g, or the part of it that a few products with H find, in units in which
    the parameters have similar sizes.

    **Arguments:**

    - `product`: from a vector v to H·v.
    - `gradient`: g.
    - `sizes`: what the entries of the step are multiplied by in its length. If all are 0, nothing
        can move, and both numbers are infinite.
    - `wanted`: whether the result is used. If not, there are no products, also under `vmap`.

    **Returns:** ½·gᵀH⁻¹g, by which the loss falls if it is a parabola; the length ‖sizes·H⁻¹g‖;
    and the number of products. The first two grow with each product, so they are lower bounds. At a
    negative curvature they are infinite: there is no minimum near.
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
        residual = s.residual - rate * moved
        new = jnp.vdot(residual, residual)
        products = s.products + 1
        on = (curvature > eps * largest) & (new > eps**2 * squares) & jnp.isfinite(new)
        return _Search(
            products,
            on & (products < min(len(gradient), MOST_PRODUCTS)),
            s.x + rate * s.direction,
            residual,
            residual + new / s.squares * s.direction,
            new,
            largest,
            s.decrease + rate * s.squares / 2,
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
        ),
    )
    # Where nothing can move there is no minimum.
    still = wanted & jnp.all(sizes == 0)
    decrease = jnp.where(still, jnp.inf, end.decrease)
    length = jnp.where(still, jnp.inf, jnp.linalg.norm(sizes * end.x))
    return decrease, length, end.products
