"""The loss along a line: what the line searches share."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ... import tree
from ..._core.transform import AbstractTransform, Context
from ..._types import Params, Scalar, Updates
from ...tree.dtypes import as_float, canonical_float


class Line(NamedTuple):
    """The loss at w + η·u, and what is known of it at η = 0; scalars in the canonical float."""

    params: Params
    updates: Updates
    value: Scalar
    grad: Updates
    slope: Scalar
    value_fn: Callable[[Params], Scalar]

    def at(self, rate: Scalar) -> Params:
        """w + η·u, rounded as the step will round it."""
        return tree.add(self.params, scaled(self.updates, rate))

    def slope_of(self, grad: Updates) -> Scalar:
        """The derivative by η where the loss has this gradient."""
        return _scalar(tree.inner(grad, self.updates))


def line(
    transform: AbstractTransform,
    updates: Updates,
    params: Params | None,
    context: Context | None,
) -> Line:
    """What a line search begins with."""
    known = Context() if context is None else context
    params = transform.demand("params", params)
    value = transform.demand("value", known.value)
    grad = transform.demand("grad", known.grad)
    value_fn = transform.demand("value_fn", known.value_fn)
    who = type(transform).__name__

    def checked(params: Params) -> Scalar:
        return _checked(who, value_fn(params))

    slope = _scalar(tree.inner(grad, updates))
    grad = tree.cast_like(grad, params)  # as that of every other point will be
    return Line(params, updates, _scalar(as_float(value)), grad, slope, checked)


def numbers(transform: AbstractTransform, context: Context | None) -> SimpleNamespace:
    """The hyperparameters of this step in the dtype of the search's scalars."""
    now = vars(transform.at(context))
    return SimpleNamespace(**{k: None if x is None else _scalar(x) for k, x in now.items()})


def scaled(updates: Updates, rate: Scalar) -> Updates:
    """η·u; nothing at all for η = 0, also of what is not finite."""
    return tree.map_leaves(lambda u, rate: jnp.where(rate == 0, 0, rate * u), (updates,), (rate,))


def steepest(grad: Updates) -> Updates:
    """What JAX returns as a gradient, conjugated: the direction of steepest ascent."""
    return jax.tree.map(jnp.conj, grad)


def next_guess(rate: Scalar) -> Scalar:
    """A learning rate to start the next search from: never 0, from where none would lead away."""
    return jnp.maximum(rate, jnp.finfo(rate.dtype).tiny)


def _scalar(x: Any) -> Scalar:
    return jnp.asarray(x, canonical_float())


def _checked(who: str, value: Any) -> Scalar:
    """What `value_fn` returned, refused where it is no loss."""
    if not tree.is_array(value) and not isinstance(value, int | float | complex):
        raise TypeError(
            f"The `value_fn` that {who} was given must return a real scalar, got {value!r} of "
            f"type {type(value).__name__}."
        )
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"The `value_fn` that {who} was given must return a scalar, got an array of shape "
            f"{value.shape}. Average it over the batch, for example with `jnp.mean`."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"The `value_fn` that {who} was given must return a real floating number, got dtype "
            f"{value.dtype}."
        )
    return value
