"""Projections onto balls, spheres and the simplex, of all leaves together."""

import math
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import fields, tree
from .._core.fields.declare import checked_field
from .._core.text.messages import check_int
from .._core.text.printing import code
from ..tree.paths import dotted
from ..tree.types import PyTree, Scalar
from ._projection import AbstractProjection


class simplex(AbstractProjection):
    """The projection onto the simplex: p ≥ 0 and Σ p = scale, the sum over all leaves.

        p = max(x − τ, 0)

    with the τ for which the sum is right. Newton's method finds it in a few passes over the leaves,
    which are neither sorted nor joined.

    **Arguments:**

    - `scale`: the sum, > 0. Defaults to 1.

    ```python
    >>> sl.projections.simplex()({"a": jnp.array([0.5, 0.9]), "b": jnp.array(-2.0)})
    {'a': Array([0.3, 0.7], dtype=float32), 'b': Array(0., dtype=float32)}

    ```

    ??? cite "Michelot, [A finite algorithm for finding the projection of a point onto the
        canonical simplex of ℝⁿ](https://doi.org/10.1007/BF00938486), 1986"
    """

    compares: ClassVar[bool] = True

    scale: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        return _to_simplex(x, now.scale)


class l1_sphere(AbstractProjection):
    """The projection onto Σ |pᵢ| = scale, the sum over all leaves.

        pᵢ = sign(xᵢ)·qᵢ,   q the projection of |x| onto the simplex

    Zeros count as positive, so the result is on the sphere even for x = 0. Differs from Optax,
    where they stay zero and the sum falls short.

    **Arguments:**

    - `scale`: the radius, > 0. Defaults to 1.
    """

    is_convex: ClassVar[bool] = False

    scale: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        phase, size = _polar_tree(x)
        return _times(phase, _to_simplex(size, now.scale))


class l1_ball(AbstractProjection):
    """The projection onto Σ |pᵢ| ≤ scale, the sum over all leaves.

    A tree inside the ball stays as it is. Any other is projected onto `l1_sphere`.

    **Arguments:**

    - `scale`: the radius, > 0. Defaults to 1.

    ??? cite "Duchi et al., [Efficient projections onto the ℓ₁-ball for learning in high
        dimensions](https://doi.org/10.1145/1390156.1390191), 2008"
    """

    scale: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        phase, size = _polar_tree(x)
        return _times(phase, _to_corner(size, now.scale))


class l2_sphere(AbstractProjection):
    """The projection onto ‖p‖₂ = scale, the norm of all leaves together: p = scale·x/‖x‖.

    All points of the sphere are equally near to x = 0. It is mapped to the one whose entries are
    equal. Differs from Optax, where it becomes NaN.

    **Arguments:**

    - `scale`: the radius, > 0. Defaults to 1.
    """

    is_convex: ClassVar[bool] = False

    scale: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        size = tree.global_norm(x)
        scale = tree.cast(now.scale, size.dtype)
        number = sum(leaf.size for leaf in jax.tree.leaves(x))
        zero = size == 0
        now = SimpleNamespace(
            factor=jnp.where(zero, 0, scale / jnp.where(zero, 1, size)),
            shift=jnp.where(zero, scale / math.sqrt(max(number, 1)), 0),
        )
        return tree.map_leaves(lambda now, x: now.factor * x + now.shift, (x,), now)

    def tangent(self, now: SimpleNamespace, x: PyTree, u: PyTree) -> PyTree:
        unit = self.nearest(SimpleNamespace(scale=jnp.ones(())), x)
        now = SimpleNamespace(share=tree.inner(unit, u))
        return tree.map_leaves(lambda now, u, x: u - now.share * x, (u, unit), now)


class sphere(AbstractProjection):
    """The projection of each leaf onto the unit sphere: p = x/‖x‖.

    With an axis, each vector along it has the norm 1, such as the columns of a matrix with axis −2.
    All points of the sphere are equally near to x = 0: it is mapped to the one whose entries are
    equal.

    **Arguments:**

    - `axis`: the axis of the vectors, an int. Defaults to a whole leaf as one vector.

    ```python
    >>> sl.projections.sphere(axis=-1)({"w": jnp.array([[3.0, 4.0], [0.0, 2.0]])})
    {'w': Array([[0.6, 0.8],
           [0. , 1. ]], dtype=float32)}

    ```
    """

    is_convex: ClassVar[bool] = False

    axis: int | None = checked_field(check_int, None)

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:

        def unit(x: Array) -> Array:
            # Relative to the largest entry, since squares may overflow or underflow.
            largest = jnp.max(jnp.abs(x), axis=self.axis, keepdims=True, initial=0)
            largest = jax.lax.stop_gradient(largest)
            zero = largest == 0
            # Where all numbers are NaN, XLA's maximum may be 0, but they are not.
            x = jnp.where(zero & (x == 0), 1, x / jnp.where(zero, 1, largest).astype(x.dtype))
            square = jnp.sum(tree.abs_squared(x), axis=self.axis, keepdims=True)
            return x * tree.inverse_root(square).astype(x.dtype)

        return jax.tree.map(unit, x)

    def tangent(self, now: SimpleNamespace, x: PyTree, u: PyTree) -> PyTree:
        def part(x: Array, u: Array) -> Array:
            product = jnp.sum((jnp.conj(x) * u).real, axis=self.axis, keepdims=True)
            return u - product.astype(x.dtype) * x

        return jax.tree.map(part, self.nearest(now, x), u)

    def check(self, x: PyTree) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if self.axis is not None and not -leaf.ndim <= self.axis < leaf.ndim:
                raise ValueError(
                    f"{code(self)} needs an axis {self.axis}, and the leaf '{dotted(path)}' has "
                    f"shape {leaf.shape}. Select the others: "
                    "`tx.project(fn, where=sl.where.ndim(2))`."
                )


class l2_ball(AbstractProjection):
    """The projection onto ‖p‖₂ ≤ scale, the norm of all leaves together: p = x·min(1, scale/‖x‖).

    A tree inside the ball keeps every bit.

    **Arguments:**

    - `scale`: the radius, > 0. Defaults to 1.

    ```python
    >>> sl.projections.l2_ball(1.0)({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)})
    {'b': Array(0.8, dtype=float32), 'w': Array([0.6, 0. ], dtype=float32)}

    ```
    """

    scale: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        size = tree.global_norm(x)
        scale = tree.cast(now.scale, size.dtype)
        return tree.scale(x, scale / jnp.maximum(size, scale))


class linf_ball(AbstractProjection):
    """The projection onto max |pᵢ| ≤ scale: every entry is clipped to [−scale, scale].

    A complex entry keeps its phase.

    **Arguments:**

    - `scale`: the radius, ≥ 0. Defaults to 1.
    """

    scale: fields.Number = fields.hyperparameter(1.0, within="[0, inf)")

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        def rule(now, x):
            if not jnp.iscomplexobj(x):
                return jnp.clip(x, -now.scale, now.scale)
            phase, size = _polar(x)
            return phase * jnp.minimum(size, now.scale)

        return tree.map_leaves(rule, (x,), now)


# Compiled, since every loop and conditional outside a trace would otherwise compile again.
@jax.jit
def _to_simplex(x: PyTree, scale: Scalar) -> PyTree:
    """max(x − τ, 0) with the τ for which the sum is `scale`."""
    leaves, structure = jax.tree.flatten(x)
    dtype = tree.sum_dtype(leaves)
    scale = tree.cast(scale, dtype)
    top = jnp.array(-jnp.inf, dtype)
    for leaf in leaves:
        top = jnp.maximum(top, tree.cast(jnp.max(leaf, initial=-jnp.inf), dtype))
    top = jax.lax.stop_gradient(top)
    # Relative to the largest entry, no entry that counts is further away than `scale`: nothing is
    # lost to rounding in the sum.
    below = [tree.cast(leaf, dtype) - top for leaf in leaves]

    def threshold(below: list[Array], last: Array) -> tuple[Array, Array]:
        """The τ for the entries above the last one, and how many these are."""
        total, number = jnp.zeros((), dtype), jnp.zeros((), dtype)
        for y in below:
            above = y > last
            total = total + jnp.sum(jnp.where(above, y, 0))
            number = number + jnp.sum(above, dtype=jnp.int32).astype(dtype)
        return (total - scale) / jnp.maximum(number, 1), number

    # Newton's method, from a τ that is too small. The number of entries above it falls, and τ is
    # right when it does not.
    fixed = jax.lax.stop_gradient(below)

    def step(carry: PyTree) -> tuple[Array, ...]:
        last, number, _ = carry
        return (*threshold(fixed, last), number)

    start = step((-jax.lax.stop_gradient(scale), jnp.array(jnp.inf, dtype), None))
    tau, *_ = jax.lax.while_loop(lambda carry: carry[1] < carry[2], step, start)
    # Once more, for the derivative: the loop has none.
    tau, _ = threshold(below, tau)
    return structure.unflatten(
        [tree.cast(jax.nn.relu(y - tau), x.dtype) for y, x in zip(below, leaves, strict=True)]
    )


@jax.jit
def _to_corner(x: PyTree, scale: Scalar) -> PyTree:
    """A tree without negative entries, projected onto the simplex if its sum is larger."""
    total = tree.sum_of([jnp.sum(leaf) for leaf in jax.tree.leaves(x)])
    inside = total <= tree.cast(scale, total.dtype)
    return jax.lax.cond(inside, lambda x: x, lambda x: _to_simplex(x, scale), x)


def _polar(x: Array) -> tuple[Array, Array]:
    """Phase (for real numbers the sign) and modulus. The phase of 0 is 1."""
    if not jnp.iscomplexobj(x):
        sign = jnp.where(x < 0, -1, 1).astype(x.dtype)
        return sign, sign * x
    # Relative to the larger part, since the squares may overflow or underflow.
    unit = jax.lax.stop_gradient(jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)))
    zero = unit == 0
    unit = jnp.where(zero, 1, unit)
    real, imag = x.real / unit, x.imag / unit
    root = tree.root(jnp.square(real) + jnp.square(imag))
    divisor = jnp.where(zero, 1, root)
    return jax.lax.complex(jnp.where(zero, 1, real / divisor), imag / divisor), unit * root


def _polar_tree(x: PyTree) -> tuple[PyTree, PyTree]:
    return tree.map_leaves(lambda _, x: _polar(x), (x,))


def _times(a: PyTree, b: PyTree) -> PyTree:
    return tree.map_leaves(lambda _, a, b: a * b, (a, b))
