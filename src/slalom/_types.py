"""Names for what flows through the library."""

from typing import TypeAlias

import numpy as np
from jax.core import Tracer as Tracer
from jaxtyping import Array, Float, Inexact, Int, PyTree

Scalar: TypeAlias = Float[Array, ""]
"""A 0-d real array."""

Step: TypeAlias = int | Int[Array, ""] | Int[np.ndarray, ""]
"""A position on a clock: a number of steps, counted from 0."""

Params: TypeAlias = PyTree[Inexact[Array | np.ndarray, "..."]]
"""Parameters: a tree of floating or complex arrays. `None` is a hole: not there."""

Updates: TypeAlias = PyTree[Inexact[Array | np.ndarray, "..."]]
"""Gradients on their way to become a step; same structure and shapes as the parameters."""
