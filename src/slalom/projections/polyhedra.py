"""Projections onto boxes, planes and halfspaces."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import fields, tree
from .._core.text.printing import shortest
from ..tree.paths import dotted
from ..tree.types import Hyperparameter, PyTree, Tracer
from ._projection import AbstractProjection, leaves_like


class _AbstractBox(AbstractProjection):
    """A projection that clips every number."""

    compares: ClassVar[bool] = True
    is_box: ClassVar[bool] = True


class non_negative(_AbstractBox):
    """The projection onto trees without negative entries: max(x, 0). NaN stays NaN.

    ```python
    >>> sl.projections.non_negative()({"w": jnp.array([-1.0, 2.0])})
    {'w': Array([0., 2.], dtype=float32)}

    ```
    """

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        return jax.tree.map(jax.nn.relu, x)


class box(_AbstractBox):
    """The projection onto lower ≤ p ≤ upper: every entry is clipped.

    In a half-precision leaf a bound holds up to the rounding of that leaf.

    **Arguments:**

    - `lower`, `upper`: the bounds: each a number, a tree like the one to project or the whole model
        (of scalars, or of arrays with the shapes of its leaves), or `None` for no bound.

    ```python
    >>> sl.projections.box(-1.0, 1.0)({"w": jnp.array([-3.0, 0.5])})
    {'w': Array([-1. ,  0.5], dtype=float32)}

    ```
    """

    lower: Any
    upper: Any

    def __check_init__(self):
        low, high = self.lower, self.upper
        if _is_known(low) and _is_known(high) and not float(low) <= float(high):
            raise ValueError(
                f"box.lower must be at most box.upper, got {shortest(low)} and {shortest(high)}."
            )

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        lower = _bounds("box.lower", self.lower, x)
        upper = _bounds("box.upper", self.upper, x)
        leaves, structure = jax.tree.flatten(x)
        clipped = [jnp.clip(*each) for each in zip(leaves, lower, upper, strict=True)]
        return structure.unflatten(clipped)


class hypercube(_AbstractBox):
    """The projection onto 0 ≤ p ≤ scale. For a bound on each entry, write `box(0.0, bounds)`.

    **Arguments:**

    - `scale`: the length of an edge, ≥ 0. Defaults to 1.
    """

    scale: fields.Number = fields.hyperparameter(1.0, within="[0, inf)")

    def __init__(self, scale: Hyperparameter = 1.0):
        shape = getattr(scale, "shape", ())
        if isinstance(scale, dict | list | tuple) or shape:
            got = f"an array of shape {shape}" if shape else f"a {type(scale).__name__}"
            raise ValueError(
                f"hypercube.scale must be a number, got {got}. For a bound on each entry, write "
                "`sl.projections.box(0.0, bounds)`."
            )
        self.scale = scale

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        return tree.map_leaves(lambda now, x: jnp.clip(x, 0, now.scale), (x,), now)


def _is_known(bound: Any) -> bool:
    """Whether the value of a bound can be read now."""
    if tree.is_array(bound):
        return bound.shape == () and not isinstance(bound, Tracer)
    return isinstance(bound, int | float)


def _bounds(name: str, bound: Any, x: PyTree) -> list[Any]:
    """A bound for each leaf, in the dtype of that leaf."""
    leaves = jax.tree.leaves(x)
    if bound is None or eqx.is_array_like(bound):
        bounds = [bound] * len(leaves)
    else:
        bounds = leaves_like(name, bound, x)
    for (path, leaf), b in zip(jax.tree_util.tree_leaves_with_path(x), bounds, strict=True):
        if b is not None and jnp.shape(b) not in ((), leaf.shape):
            raise ValueError(
                f"{name} has shape {jnp.shape(b)} at '{dotted(path)}', but the leaf to project "
                f"has shape {leaf.shape}. Nothing is broadcast but scalars."
            )
    return [
        None if b is None else jnp.asarray(b, leaf.dtype)
        for b, leaf in zip(bounds, leaves, strict=True)
    ]


class vector(AbstractProjection):
    """The projection onto the multiples of a vector: p = (⟨a, x⟩ / ⟨a, a⟩)·a.

    The only multiple of a = 0 is 0.

    **Arguments:**

    - `a`: a tree like the one to project.
    """

    a: PyTree

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        a, _ = _normal("vector.a", self.a, x)
        now = SimpleNamespace(factor=_quotient(tree.inner(a, x), tree.inner(a, a)))
        return tree.map_leaves(lambda now, a: now.factor * a, (a,), now)

    def tangent(self, now: SimpleNamespace, x: PyTree, u: PyTree) -> PyTree:
        return self.nearest(now, u)


class hyperplane(AbstractProjection):
    """The projection onto ⟨a, p⟩ = b: p = x + ((b − ⟨a, x⟩) / ⟨a, a⟩)·a.

    With a = 0 it returns x.

    **Arguments:**

    - `a`: a tree like the one to project.
    - `b`: a number.
    """

    a: PyTree
    b: fields.Number = fields.hyperparameter()

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        a, factor = _normal("hyperplane.a", self.a, x)
        return _shifted(x, a, _distance(now.b, factor, a, x))

    def tangent(self, now: SimpleNamespace, x: PyTree, u: PyTree) -> PyTree:
        a, factor = _normal("hyperplane.a", self.a, u)
        return _shifted(u, a, _distance(jnp.zeros(()), factor, a, u))


class halfspace(AbstractProjection):
    """The projection onto ⟨a, p⟩ ≤ b: that onto the hyperplane, or x itself if it is inside.

    **Arguments:**

    - `a`: a tree like the one to project.
    - `b`: a number.
    """

    a: PyTree
    b: fields.Number = fields.hyperparameter()

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        a, factor = _normal("halfspace.a", self.a, x)
        return _shifted(x, a, jnp.minimum(_distance(now.b, factor, a, x), 0))


def _quotient(a: Array, b: Array) -> Array:
    """a / b, and 0 if b is 0."""
    return jnp.where(b == 0, 0, a / jnp.where(b == 0, 1, b))


def _distance(b: Array, factor: Array, a: PyTree, x: PyTree) -> Array:
    """The factor t for which ⟨a, p(x + t·a)⟩ = factor·b."""
    product = tree.inner(a, x)
    goal = tree.cast(b, product.dtype) * tree.cast(factor, product.dtype)
    return _quotient(goal - product, tree.inner(a, a))


def _shifted(x: PyTree, a: PyTree, factor: Array) -> PyTree:
    now = SimpleNamespace(factor=factor)
    return tree.map_leaves(lambda now, x, a: x + now.factor * a, (x, a), now)


def _normal(name: str, a: PyTree, x: PyTree) -> tuple[PyTree, Array]:
    """The tree `a` in the dtypes of x, times a number with which its squares are in range, and this
    number. It is refused if it is not like x."""
    leaves = leaves_like(name, a, x)
    paths = jax.tree_util.tree_leaves_with_path(x)
    for (path, leaf), y in zip(paths, leaves, strict=True):
        if jnp.shape(y) != leaf.shape or (jnp.iscomplexobj(y) and not jnp.iscomplexobj(leaf)):
            raise ValueError(
                f"{name} has shape {jnp.shape(y)} and dtype {jnp.result_type(y)} at "
                f"'{dotted(path)}', but the leaf to project has shape {leaf.shape} and dtype "
                f"{leaf.dtype}."
            )
    like = [jnp.asarray(y, leaf.dtype) for y, (_, leaf) in zip(leaves, paths, strict=True)]
    return tree.squarable(jax.tree.structure(x).unflatten(like))
