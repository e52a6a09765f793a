"""What the line searches share: the loss along a line, and where they stopped."""

import abc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ... import tree
from ..._core.protocol.context import Context
from ..._core.protocol.transform import AbstractTransform
from ...tree.dtypes import as_float, canonical_float
from ...tree.types import Params, Scalar, Updates


class AbstractLinesearch(AbstractTransform):
    """A transform that scales its updates by a learning rate for which it evaluates the loss."""

    @abc.abstractmethod
    def recall(self, state: Any) -> tuple[Scalar, Updates, Bool[Array, ""]] | None:
        """Loss and gradient at the parameters that the last step led to.

        **Arguments:**

        - `state`: this transform's state.

        **Returns:** the loss, the gradient, and whether they are known, which they are not before
        the first step and after a reset. `None` if the state does not keep the gradient.
        """


class Line(NamedTuple):
    """The loss as a function of η at w + η·u, and its values at η = 0, in the canonical float."""

    params: Params
    updates: Updates
    value: Scalar
    grad: Updates
    slope: Scalar
    value_fn: Callable[[Params], Scalar]

    def point(self, rate: Scalar) -> Params:
        """w + η·u, rounded as the step rounds it."""
        return tree.add(self.params, scale_or_zero(self.updates, rate))

    def slope_of(self, grad: Updates) -> Scalar:
        """The derivative with respect to η, given the gradient of the loss."""
        return _scalar(tree.inner(grad, self.updates))


def line(
    transform: AbstractTransform,
    updates: Updates,
    params: Params | None,
    context: Context | None,
) -> Line:
    """The line along these updates."""
    context = Context() if context is None else context
    params = transform.demand("params", params)
    value = transform.demand("value", context.value)
    grad = transform.demand("grad", context.grad)
    value_fn = transform.demand("value_fn", context.value_fn)
    who = type(transform).__name__

    def checked(params: Params) -> Scalar:
        return _checked(who, value_fn(params))

    slope = _scalar(tree.inner(grad, updates))
    grad = tree.cast_like(grad, params)  # as at every other point
    return Line(params, updates, _scalar(as_float(value)), grad, slope, checked)


def numbers(transform: AbstractTransform, context: Context | None) -> SimpleNamespace:
    """The hyperparameters of this step in the dtype of the scalars of the search."""
    now = vars(transform.at(context))
    return SimpleNamespace(**{k: None if x is None else _scalar(x) for k, x in now.items()})


def scale_or_zero(updates: Updates, rate: Scalar) -> Updates:
    """η·u; zero for η = 0 even if u is not finite."""

    def rule(now, u):
        return jnp.where(now.rate == 0, 0, now.rate * u)

    return tree.map_leaves(rule, (updates,), SimpleNamespace(rate=rate))


def steepest(grad: Updates) -> Updates:
    """The direction of steepest ascent: the conjugate of the gradient that JAX returns."""
    return jax.tree.map(jnp.conj, grad)


def next_guess(rate: Scalar) -> Scalar:
    """The learning rate from which the next search starts; never 0, which no search could leave."""
    return jnp.maximum(rate, jnp.finfo(rate.dtype).tiny)


def _scalar(x: Any) -> Scalar:
    return jnp.asarray(x, canonical_float())


def _checked(who: str, value: Any) -> Scalar:
    """The result of `value_fn`, if it is a valid loss."""
    if not tree.is_array(value) and not isinstance(value, int | float | complex):
        raise TypeError(
            f"The `value_fn` passed to {who} must return a real scalar, got {value!r} of "
            f"type {type(value).__name__}."
        )
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"The `value_fn` passed to {who} must return a scalar, got an array of shape "
            f"{value.shape}. Average it over the batch, for example with `jnp.mean`."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"The `value_fn` passed to {who} must return a real floating-point number, got dtype "
            f"{value.dtype}."
        )
    return value
