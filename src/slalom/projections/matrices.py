"""Projections of matrices, each leaf by itself."""

from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import tree
from .._core.text.printing import code
from ..tree.paths import dotted
from ..tree.types import PyTree
from ._projection import AbstractProjection


class stiefel(AbstractProjection):
    """The projection of each matrix onto those with orthonormal columns: PᴴP = I.

        P = UVᴴ   for the singular value decomposition x = UΣVᴴ

    which is the polar factor. A matrix with more columns than rows gets orthonormal rows. Leading
    axes stack matrices. Each matrix is projected separately.

    These matrices are the Stiefel manifold. `tx.project` passes on gradients along it only, and
    the projection is a retraction after each step.

    ```python
    >>> sl.projections.stiefel()({"w": jnp.array([[2.0, 0.0], [0.0, 0.5], [0.0, 0.0]])})
    {'w': Array([[1., 0.],
           [0., 1.],
           [0., 0.]], dtype=float32)}

    ```
    """

    is_convex: ClassVar[bool] = False

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:

        def polar(x: Array) -> Array:
            u, _, vh = jnp.linalg.svd(x, full_matrices=False)
            return tree.matmul(u, vh)

        return jax.tree.map(polar, x)

    def tangent(self, now: SimpleNamespace, x: PyTree, u: PyTree) -> PyTree:
        """u − x·(xᴴu + uᴴx)/2, and for orthonormal rows u − (xuᴴ + uxᴴ)/2·x."""

        def part(x: Array, u: Array) -> Array:
            tall = x.shape[-2] >= x.shape[-1]
            gram = tree.matmul(_adjoint(x), u) if tall else tree.matmul(u, _adjoint(x))
            # Singular values of x other than 1, as at the start, do not blow u up.
            square = jnp.mean(jnp.sum(tree.abs_squared(x), axis=-2 if tall else -1), axis=-1)
            scale = jnp.where(square == 0, 1, 2 * square)[..., None, None]
            gram = (gram + _adjoint(gram)) / scale.astype(gram.dtype)
            return u - (tree.matmul(x, gram) if tall else tree.matmul(gram, x))

        return jax.tree.map(part, x, u)

    def check(self, x: PyTree) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if leaf.ndim < 2:
                raise ValueError(
                    f"{code(self)} projects matrices, and the leaf '{dotted(path)}' has shape "
                    f"{leaf.shape}. Select the matrices: `tx.project(fn, where=sl.where.ndim(2))`."
                )


def _adjoint(x: Array) -> Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


class psd(AbstractProjection):
    """The projection of each matrix onto the positive semidefinite ones: P = Pᴴ, P ⪰ 0.

        P = V·max(Λ, 0)·Vᴴ   for the eigenvalues Λ of (x + xᴴ) / 2

    Leading axes stack matrices. Each matrix is projected separately.

    ```python
    >>> sl.projections.psd()({"w": jnp.array([[4.0, 0.0], [0.0, -1.0]])})
    {'w': Array([[4., 0.],
           [0., 0.]], dtype=float32)}

    ```
    """

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:

        def clipped(x: Array) -> Array:
            values, vectors = jnp.linalg.eigh(x, symmetrize_input=True)
            scaled = vectors * jnp.expand_dims(jnp.maximum(values, 0), -2).astype(vectors.dtype)
            return tree.matmul(scaled, _adjoint(vectors))

        return jax.tree.map(clipped, x)

    def check(self, x: PyTree) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if leaf.ndim < 2 or leaf.shape[-1] != leaf.shape[-2]:
                raise ValueError(
                    f"{code(self)} projects square matrices, and the leaf '{dotted(path)}' has "
                    f"shape {leaf.shape}. Select the square ones, for example with "
                    '`tx.project(fn, where=sl.where.path("**.covariance"))`.'
                )
