"""The dtype in which a loss is computed."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import tree
from ..._core.text.printing import code
from ...tree.types import PyTree

DTYPES = ("bfloat16", "float16", "float32", "float64")


def as_compute_dtype(dtype: Any) -> str | None:
    """The name of the dtype. Raises an error for one that no loss is computed in."""
    if dtype is None:
        return None
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        *most, last = map(repr, DTYPES)
        raise TypeError(
            f"train_step.compute_dtype must be {', '.join(most)} or {last}, got {code(dtype)}."
        )
    return name


def in_compute_dtype(values: PyTree, dtype: str) -> PyTree:
    """The values with all real floating arrays in this dtype.

    `eqx.nn.State` stays as it is: the loss returns it, and the next step would be compiled again
    for another dtype.
    """
    wanted = tree.canonical(dtype)

    def in_dtype(x: Any) -> Any:
        if tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating):
            return tree.cast(x, wanted)
        return x

    return jax.tree.map(in_dtype, values, is_leaf=_is_state)


def _is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State | eqx.nn.StateIndex)
