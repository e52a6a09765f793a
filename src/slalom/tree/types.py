"""Types used throughout the library."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx
import numpy as np
from jax.core import Tracer as Tracer
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jaxtyping import Array, Float, Inexact, Int, Real

if TYPE_CHECKING:
    # What jaxtyping shows to a type checker is unknown to it, and so would be every signature with
    # it, in the strict mode of a user.
    PyTree: TypeAlias = Any
else:
    from jaxtyping import PyTree as PyTree

Scalar: TypeAlias = Float[Array, ""]
"""A 0-d real array."""

Hyperparameter: TypeAlias = (
    float | int | np.number | Real[Array, ""] | Real[np.ndarray, ""] | Callable[..., Any]
)
"""The type of a real-valued field: a number, a 0-d array, or a schedule, which is a module of
`sl.schedules` or any function of the step."""

Step: TypeAlias = int | Int[Array, ""] | Int[np.ndarray, ""]
"""A number of steps, counted from 0."""

Params: TypeAlias = PyTree[Inexact[Array | np.ndarray, "?*shape"], "Params"]
"""Parameters: a tree of floating or complex arrays. `None` marks a missing parameter."""

Updates: TypeAlias = PyTree[Inexact[Array | np.ndarray, "?*shape"], "Params"]
"""Updates: gradients as they pass through a chain, with the parameters' structure and shapes.

`SLALOM_TYPECHECK=1` checks this in every signature that has both: the names bind the structure
and the shape of each leaf.
"""

Gradients: TypeAlias = PyTree[Inexact[Array | np.ndarray, "..."], "Params"]
"""The input of an optimizer: updates, or per-example gradients with one more leading axis."""

WhereLike: TypeAlias = Any
"""A selector, a function of the parameter tree to a tree of bools, or a tree of bools."""


if TYPE_CHECKING:
    from typing_extensions import TypeIs

    def is_function(x: Any) -> TypeIs[Callable[..., Any]]: ...

else:

    def is_function(x: Any) -> bool:
        """Whether `x` is meant to be called. The `__call__` of a transform or an optimizer only
        raises an error with advice."""
        return callable(x) and not getattr(type(x), "_refuses_calls", False)


def captured(function: Any) -> dict[str, Any]:
    """The variables of a closure by name. In a recursive function, some may have no value yet."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    variables = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        with contextlib.suppress(ValueError):
            variables[name] = cell.cell_contents
    return variables


def is_state_index(x: Any) -> bool:
    """Whether this is the index of an `eqx.nn.State`."""
    return isinstance(x, eqx.nn.StateIndex)


def is_state(x: Any) -> bool:
    """Whether this is an `eqx.nn.State` or its index, whose arrays are never trained."""
    return isinstance(x, eqx.nn.State | eqx.nn.StateIndex)


def is_deleted(x: Any) -> bool:
    """Whether this is an array that was donated."""
    return not isinstance(x, Tracer) and getattr(x, "is_deleted", bool)()


def under_jit(x: Any) -> bool:
    """Whether `x` is being traced by `jax.jit` itself, not by `vmap` or `grad`."""
    return isinstance(x, DynamicJaxprTracer)
