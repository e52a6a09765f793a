"""What a schedule is: a module that maps a step to a scalar. The families are in `schedules.py`."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._module import AbstractDeclared
from ._types import Scalar, Step


class AbstractSchedule(AbstractDeclared):
    """A hyperparameter as a function of the clock: update n uses `schedule(n)`, n from 0.

    A schedule holds no state. Its numbers are leaves, so changing them never recompiles.
    """

    @abc.abstractmethod
    def __call__(self, step: Step) -> Scalar:
        """The value at `step`.

        **Arguments:**

        - `step`: how many updates were made before, an int or a 0-d integer array, ≥ 0.

        **Returns:** a 0-d floating array.
        """

    def values(self, n: int) -> Float[Array, " n"]:
        """The first `n` values: what the first `n` updates will use, to the last rounding.

        **Arguments:**

        - `n`: how many.

        **Returns:** a vector.

        ```python
        >>> sl.schedules.linear(init_value=1.0, end_value=0.0, transition_steps=4).values(5)
        Array([1.  , 0.75, 0.5 , 0.25, 0.  ], dtype=float32)

        ```
        """
        return jax.vmap(lambda step: self(step))(jnp.arange(n, dtype=jnp.int32))


class FunctionSchedule(AbstractSchedule):
    """A plain function of the step as a schedule; every field that takes one wraps functions.

    **Arguments:**

    - `function`: from a traced int32 scalar to one number.
    """

    function: Callable[[Any], Any] = eqx.field(static=True)

    def __call__(self, step: Step) -> Scalar:
        try:
            value = self.function(jnp.asarray(step, jnp.int32))
        except jax.errors.TracerBoolConversionError:
            raise TypeError(
                f"The schedule {self!r} branches in Python on the step, which is traced. "
                "Instead of `a if step < n else b`, write `jnp.where(step < n, a, b)`."
            ) from None
        value = jnp.asarray(value)
        if value.shape != ():
            raise ValueError(
                f"The schedule {self!r} returned an array of shape {value.shape}; a schedule "
                "returns one number for one step."
            )
        return as_float(value)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


class ModuleSchedule(AbstractSchedule):
    """A callable module of another kind as a schedule; its arrays stay leaves.

    **Arguments:**

    - `module`: from a traced int32 scalar to one number.
    """

    module: Any

    def __call__(self, step: Step) -> Scalar:
        return as_float(self.module(jnp.asarray(step, jnp.int32)))

    def __repr__(self) -> str:
        return repr(self.module)


def as_schedule(function: Callable[..., Any]) -> AbstractSchedule:
    """A function or callable module of the step, wrapped; a schedule stays what it is."""
    if isinstance(function, AbstractSchedule):
        return function
    if isinstance(function, eqx.Module):
        return ModuleSchedule(function)
    return FunctionSchedule(function)


def canonical_float() -> Any:
    """float32, or float64 under x64."""
    return jnp.result_type(float)


def as_canonical(value: Any) -> Scalar:
    """A strongly typed array of the canonical float."""
    return jnp.asarray(value, canonical_float())


def as_float(value: Any) -> Scalar:
    """A strongly typed floating array: a floating dtype is kept, any other made canonical."""
    value = jnp.asarray(value)
    keep = jnp.issubdtype(value.dtype, jnp.floating) and not value.weak_type
    return jnp.asarray(value, value.dtype if keep else canonical_float())
