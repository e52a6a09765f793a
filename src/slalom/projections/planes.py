"""Projections onto lines, planes and halfspaces."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import fields, tree
from ..tree.paths import dotted
from ..tree.types import PyTree
from ._projection import AbstractProjection, leaves_like


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
        del x
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
        del now, x
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
    own = leaves_like(name, a, x)
    paths = jax.tree_util.tree_leaves_with_path(x)
    for (path, leaf), y in zip(paths, own, strict=True):
        if jnp.shape(y) != leaf.shape or (jnp.iscomplexobj(y) and not jnp.iscomplexobj(leaf)):
            raise ValueError(
                f"{name} has shape {jnp.shape(y)} and dtype {jnp.result_type(y)} at "
                f"'{dotted(path)}', but the leaf to project has shape {leaf.shape} and dtype "
                f"{leaf.dtype}."
            )
    like = [jnp.asarray(y, leaf.dtype) for y, (_, leaf) in zip(own, paths, strict=True)]
    return tree.squarable(jax.tree.structure(x).unflatten(like))
