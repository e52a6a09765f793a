"""Turns the numbers of transforms into arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ...tree.dtypes import canonical_float, is_array


def bind_numbers(transform: PyTree, dtype: Any | None = None) -> PyTree:
    """A transform with its numbers as strongly typed arrays.

    Floats become float32 (float64 under x64) and ints int32. Arrays are copied, since two
    optimizers must not share a buffer that one of them may donate, and keep their dtype unless
    `dtype` is passed. Anything else is returned unchanged.
    """
    leaves, structure = jax.tree.flatten(transform)
    leaves = [_bind_array(x, dtype) if is_array(x) else x for x in leaves]
    numbers = {
        i: np.asarray(x, _number_dtype(x, dtype))
        for i, x in enumerate(leaves)
        if isinstance(x, bool | int | float)
    }
    # One compiled call for all of them takes less time than one `jnp.array`.
    for i, array in zip(numbers, _as_arrays(list(numbers.values())), strict=True):
        leaves[i] = array
    return structure.unflatten(leaves)


_as_arrays = jax.jit(lambda numbers: numbers, inline=True)


def _number_dtype(value: bool | int | float, dtype: Any | None) -> Any:
    if isinstance(value, bool):
        return np.bool_
    if isinstance(value, int):
        return np.int32
    return canonical_float() if dtype is None else dtype


def _bind_array(value: Any, dtype: Any | None) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jnp.copy(value)
    own = value.dtype
    if jnp.issubdtype(own, jnp.floating):
        weak = getattr(value, "weak_type", False)
        own = dtype if dtype is not None else (canonical_float() if weak else own)
    return jnp.array(value, jax.dtypes.canonicalize_dtype(own))
