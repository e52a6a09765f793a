"""Names for what flows through the library."""

from typing import Any, TypeAlias

import numpy as np
from jax.core import Tracer as Tracer
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jaxtyping import Array, Float, Inexact, Int, PyTree

Scalar: TypeAlias = Float[Array, ""]
"""A 0-d real array."""

Step: TypeAlias = int | Int[Array, ""] | Int[np.ndarray, ""]
"""A position on a clock: a number of steps, counted from 0."""

Params: TypeAlias = PyTree[Inexact[Array | np.ndarray, "?*shape"], "Params"]
"""Parameters: a tree of floating or complex arrays. `None` is a hole: nothing is there."""

Updates: TypeAlias = PyTree[Inexact[Array | np.ndarray, "?*shape"], "Params"]
"""Gradients on their way to become a step: like the parameters in structure and shapes.

With `SLALOM_TYPECHECK=1` that is checked wherever both stand in one signature: the names bind
the structure and, leaf by leaf, the shape.
"""

Gradients: TypeAlias = PyTree[Inexact[Array | np.ndarray, "..."], "Params"]
"""What comes into an optimizer: updates, or for some first links the gradients of single examples,
with one more axis in front."""


def under_jit(x: Any) -> bool:
    """Whether `x` is being traced by `jax.jit` itself, not by `vmap` or `grad`."""
    return isinstance(x, DynamicJaxprTracer)
