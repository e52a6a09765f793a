"""The uncertainty of fitted parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..binding.model import Split
from ..residual_losses import LeastSquares


def covariance(
    loss_fn: Any,
    model: Split,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    absolute_sigma: bool,
) -> Float[Array, "params params"]:
    """The covariance of the parameters of a fit, as `MinimizeResult.covariance` describes it."""
    if not isinstance(loss_fn, LeastSquares):
        raise TypeError(
            "The covariance of a fit follows from its residuals. Pass the `sl.LeastSquares` that "
            f"was minimized, and its data: `found.covariance(loss_fn, x, y)`, got {loss_fn!r}."
        )
    residuals = loss_fn.on(*args, **kwargs)
    linear = residuals.of(lambda params: model.join(jax.tree.leaves(params))).at(model.params)
    rows, number = linear.jacobian(), linear.num_params
    _, values, vectors = jnp.linalg.svd(rows, full_matrices=False)
    least = jnp.finfo(linear.dtype).eps * max(rows.shape) * values[0]
    determined = jnp.all(values > least) & (len(values) == number)
    half = vectors.T / jnp.where(values > least, values, 1)[None, :]
    if absolute_sigma:
        # What the loss multiplies the squares of residuals of unit variance by.
        weights = loss_fn.weights.values()
        scales = [
            jnp.full(z.size, 2 * w / z.size, linear.dtype)
            for w, z in zip(weights, linear.outputs, strict=True)
        ]
        # half @ half.T @ rowsᵀ is the derivative of the fit by the data.
        by_data = half @ (half.T @ rows.T)
        found = (by_data * jnp.concatenate(scales)[None, :]) @ by_data.T
    else:
        free = max(linear.num_rows - number, 1)
        found = half @ half.T * (2 * linear.value / free)
        determined &= linear.num_rows > number
    return jnp.where(determined, found, jnp.inf)
