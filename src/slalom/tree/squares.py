"""Squares, roots and quotients that stay in range, and whose derivatives are finite."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Real


def abs_squared(x: Inexact[Array, "*shape"]) -> Real[Array, "*shape"]:
    """|x|², which is real even for complex x.

    **Arguments:**

    - `x`: a floating or complex array.

    **Returns:** a real array.
    """
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


@jax.custom_jvp
def root(x: Real[Array, "..."]) -> Real[Array, "..."]:
    """√x with derivative 0 at 0, for x that are squares, whose own derivative is 0 there.

    The derivative ∞ would make a gradient through an optimizer NaN if any gradient is zero.
    """
    return jnp.sqrt(x)


@root.defjvp
def _root_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = root(x)
    return y, jnp.where(y == 0, 0, t / jnp.where(y == 0, 1, 2 * y))


@jax.custom_jvp
def inverse_root(x: Real[Array, "..."]) -> Real[Array, "..."]:
    """1/√x; its derivative stays finite times zero even if x^(−3/2) overflows."""
    return jax.lax.rsqrt(x)


@inverse_root.defjvp
def _inverse_root_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = inverse_root(x)
    return y, t * y * y * y / -2


@jax.custom_jvp
def quotient(a: Inexact[Array, "..."], b: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """a/b; its derivative stays finite where b² underflows."""
    return a / b


@quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> Any:
    y = quotient(*primals)
    (_, b), (ta, tb) = primals, tangents
    return y, (ta - y * tb) / b


@jax.custom_jvp
def sign(x: Inexact[Array, "..."]) -> Inexact[Array, "..."]:
    """`jnp.sign`, with the derivative of x / |x| where x is complex."""
    return jnp.sign(x)


@sign.defjvp
def _sign_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = sign(x)
    if not jnp.iscomplexobj(x):
        return y, jnp.zeros_like(y)
    along = jnp.real(jnp.conj(y) * t).astype(x.dtype)
    size = jnp.where(x == 0, 1, jnp.abs(x)).astype(x.dtype)
    return y, jnp.where(x == 0, 0, quotient(t - y * along, size))


def bounded_square(x: Inexact[Array, "*shape"]) -> Real[Array, "*shape"]:
    """|x|², but at most a quarter of the largest finite number; NaN stays NaN.

    Otherwise a single gradient of 1e20 would make a running mean infinite, and all later updates
    that are divided by its root 0. The quarter leaves room for rounding in the mean and in the
    correction of its bias.

    **Arguments:**

    - `x`: a floating or complex array.

    **Returns:** a real array.
    """
    return bounded(abs_squared(x))


def bounded(square: Real[Array, "..."]) -> Real[Array, "..."]:
    """A square, or a sum of squares, with the bound of `bounded_square`."""
    return jnp.minimum(square, float(jnp.finfo(square.dtype).max) / 4)


def bounded_entries(x: Inexact[Array, "*shape"], size: int) -> Inexact[Array, "*shape"]:
    """The entries so bounded that no sum of as many of their products as `size` overflows.

    Infinities and NaN become NaN, which does not hide the error.
    """
    limit = math.sqrt(float(jnp.finfo(x.dtype).max) / (8 * max(size, 1)))

    def bounded_part(part: Array) -> Array:
        return jnp.where(jnp.isinf(part), jnp.nan, jnp.clip(part, -limit, limit))

    if jnp.iscomplexobj(x):
        return jax.lax.complex(bounded_part(x.real), bounded_part(x.imag))
    return bounded_part(x)


def divided(x: Inexact[Array, "..."], largest: Real[Array, "..."]) -> Inexact[Array, "..."]:
    """x / largest for |x| ≤ largest, which broadcasts; 0 / 0 = 0.

    The inverse of the largest numbers is subnormal, which processors treat as 0, so the divisor is
    brought closer to 1 first. The quotient of subnormal numbers is 0.
    """
    power = jnp.where(largest > 1, 0.25, 4.0).astype(largest.dtype)
    divisor = largest * power
    small = divisor < float(jnp.finfo(divisor.dtype).tiny)
    return (x * power) * jnp.where(small, 0, 1 / jnp.where(small, 1, divisor))


def positive(square: Real[Array, "..."]) -> Real[Array, "..."]:
    """A mean of squares as a divisor: at least the smallest normal number.

    With ε = 0 a zero gradient is divided by a positive number, so its update is 0 and not NaN.
    Where the squares of tiny gradients have underflowed, the updates stay small.

    **Arguments:**

    - `square`: a real array, ≥ 0.

    **Returns:** the array.
    """
    # A maximum costs nothing. Two selections around the quotient would make XLA keep the updates
    # in a buffer wherever something else reads them too.
    return jnp.maximum(square, float(jnp.finfo(square.dtype).tiny))
