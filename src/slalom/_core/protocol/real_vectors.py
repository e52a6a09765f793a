"""Trees as vectors of real numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Inexact, PyTree

from ... import tree


def to_vector(params: PyTree, dtype: np.dtype) -> Float[Array, " params"]:
    """A tree as one vector, with the real parts of a complex leaf before the imaginary ones."""
    return _flat(params, dtype, 1)


def from_vector(vector: Float[Array, " params"], like: PyTree) -> PyTree:
    """Undoes `to_vector`: a tree with the shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    arrays, start = [], 0
    for x in leaves:
        part = vector[start : start + real_size(x)]
        start += real_size(x)
        if jnp.iscomplexobj(x):
            part = jax.lax.complex(part[: x.size], part[x.size :])
        arrays.append(tree.cast(part.reshape(x.shape), tree.canonical(x.dtype)))
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
    flat = [replicated(x).reshape(-1).astype(dtype) for x in parts]
    return jnp.concatenate(flat) if flat else jnp.zeros(0, dtype)


def real_size(x: Inexact[Any, "..."]) -> int:
    """The number of real numbers in an array."""
    return x.size * (2 if jnp.iscomplexobj(x) else 1)


def replicated(x: Any) -> Any:
    """An array, the same on every device where the mesh has explicit axes: the rows of several
    blocks, which are joined, have different sizes, so that none fits a sharding."""
    if not isinstance(x, jax.Array):
        return x
    sharding = jax.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    if not explicit or all(entry is None for entry in sharding.spec):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
