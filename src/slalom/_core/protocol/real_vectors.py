"""Trees as vectors of real numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ... import tree
from ...tree.sharding import placed_like, replicated


def to_vector(params: PyTree, dtype: np.dtype) -> Float[Array, " params"]:
    """A tree as one vector, with the real parts of a complex leaf before the imaginary ones."""
    return _flat(params, dtype, 1)


def from_vector(vector: Float[Array, " params"], like: PyTree) -> PyTree:
    """Undoes `to_vector`: a tree with the shapes, dtypes and explicit shardings of `like`."""
    leaves, structure = jax.tree.flatten(like)
    arrays, start = [], 0
    for x in leaves:
        part = vector[start : start + real_size(x)]
        start += real_size(x)
        if jnp.iscomplexobj(x):
            part = jax.lax.complex(part[: x.size], part[x.size :])
        part = placed_like(part.reshape(x.shape), x)
        arrays.append(tree.cast(part, tree.canonical(x.dtype)))
    return structure.unflatten(arrays)


def as_real(outputs: Any) -> Float[Array, " outputs"]:
    """An array as a vector of real numbers: the real parts before the imaginary ones."""
    flat = jnp.asarray(outputs).reshape(-1)
    if jnp.iscomplexobj(flat):
        return jnp.concatenate([flat.real, flat.imag])
    return flat


def as_covector(cotangent: PyTree, dtype: np.dtype) -> Array:
    """The cotangent of a tree as a reverse pass returns it: for z = x + iy it is ∂f/∂x −
    i·∂f/∂y."""
    return _flat(cotangent, dtype, -1)


def _flat(params: PyTree, dtype: np.dtype, sign: int) -> Array:
    parts = []
    for x in jax.tree.leaves(params):
        x = jnp.asarray(x)
        if jnp.iscomplexobj(x):
            parts += [x.real, sign * x.imag]
        else:
            parts.append(x)
    # Parts of different sizes are joined, so that none fits a sharding.
    flat = [replicated(x).reshape(-1).astype(dtype) for x in parts]
    return jnp.concatenate(flat) if flat else jnp.zeros(0, dtype)


def real_size(x: Inexact[Any, "..."]) -> int:
    """The number of real numbers in an array."""
    return x.size * (2 if jnp.iscomplexobj(x) else 1)
