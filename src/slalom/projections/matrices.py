"""Projections of matrices, each leaf by itself."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._core.text.printing import code
from ..tree.paths import dotted
from ..tree.types import PyTree
from ._projection import AbstractProjection


class stiefel(AbstractProjection):
    """The projection of each matrix onto those with orthonormal columns: PᴴP = I.

        P = UVᴴ   for the singular value decomposition x = UΣVᴴ

    which is the polar factor. A matrix with more columns than rows gets orthonormal rows. Leading
    axes are those of a stack of matrices. Each matrix is projected by itself.

    With `tx.project` this is a retraction after each step: `sl.sgd` then finds minima on the set.
    Rules with moments, such as Adam, see gradients that point away from the set, and may stop
    elsewhere.

    ```python
    >>> sl.projections.stiefel()({"w": jnp.array([[2.0, 0.0], [0.0, 0.5], [0.0, 0.0]])})
    {'w': Array([[1., 0.],
           [0., 1.],
           [0., 0.]], dtype=float32)}

    ```
    """

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        del now

        def polar(x: Array) -> Array:
            u, _, vh = jnp.linalg.svd(x, full_matrices=False)
            return jnp.matmul(u, vh, precision=jax.lax.Precision.HIGHEST)

        return jax.tree.map(polar, x)

    def check(self, x: PyTree) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if leaf.ndim < 2:
                raise ValueError(
                    f"{code(self)} projects matrices, and the leaf '{dotted(path)}' has shape "
                    f"{leaf.shape}. Select the matrices: `tx.project(fn, where=sl.where.ndim(2))`."
                )


class psd(AbstractProjection):
    """The projection of each matrix onto the positive semidefinite ones: P = Pᴴ, P ⪰ 0.

        P = V·max(Λ, 0)·Vᴴ   for the eigenvalues Λ of (x + xᴴ) / 2

    Leading axes are those of a stack of matrices. Each matrix is projected by itself.

    ```python
    >>> sl.projections.psd()({"w": jnp.array([[4.0, 0.0], [0.0, -1.0]])})
    {'w': Array([[4., 0.],
           [0., 0.]], dtype=float32)}

    ```
    """

    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        del now

        def clipped(x: Array) -> Array:
            values, vectors = jnp.linalg.eigh(x, symmetrize_input=True)
            scaled = vectors * jnp.expand_dims(jnp.maximum(values, 0), -2).astype(vectors.dtype)
            adjoint = jnp.conj(jnp.swapaxes(vectors, -1, -2))
            return jnp.matmul(scaled, adjoint, precision=jax.lax.Precision.HIGHEST)

        return jax.tree.map(clipped, x)

    def check(self, x: PyTree) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if leaf.ndim < 2 or leaf.shape[-1] != leaf.shape[-2]:
                raise ValueError(
                    f"{code(self)} projects square matrices, and the leaf '{dotted(path)}' has "
                    f"shape {leaf.shape}. Select the square ones, for example with "
                    '`tx.project(fn, where=sl.where.path("**.covariance"))`.'
                )
