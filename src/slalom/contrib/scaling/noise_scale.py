"""The gradient noise scale: how large a batch is useful."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Real

from ... import fields, tree
from ..._core.protocol.bases import AbstractPerExampleTransform
from ..._core.protocol.context import Context
from ...rules.rate_free._sums import number
from ...tree.types import Gradients, Params, Updates


class MeasureGradientNoiseState(eqx.Module):
    """The state of `MeasureGradientNoise`."""

    age: Int[Array, ""] = fields.until_reset()
    squared_norm: Float[Array, ""] = fields.until_reset()
    """The mean of the estimates of ‖G‖²."""
    variance: Float[Array, ""] = fields.until_reset()
    """The mean of the estimates of tr Σ."""


class MeasureGradientNoise(AbstractPerExampleTransform[MeasureGradientNoiseState]):
    """The mean of the gradients of the examples; measures the gradient noise scale.

        u = ḡ = (Σᵢ gᵢ) / B
        S = (Σᵢ ‖gᵢ‖² − B·‖ḡ‖²) / (B − 1),   N = ‖ḡ‖² − S / B
        noise scale = mean(S) / mean(N)

    S and N are unbiased estimates of tr Σ, the variance of the gradient of one example, and of
    ‖G‖², the squared norm of the true gradient. Their exponential means are divided, since the
    quotient of one step is biased. The noise scale is about the batch size beyond which larger
    batches help little. It is smaller early in training than later.

    It takes gradients with a leading axis of examples, which `sl.train_step` computes, and must be
    the first link, without a wrapper. It passes the mean of the gradients on to the next links:
    `sl.contrib.MeasureGradientNoise() | sl.adam(1e-3)`. `opt.metrics` has `noise_scale`,
    `gradient_variance` (S) and `squared_gradient_norm` (N). The noise scale is infinite where the
    estimate of ‖G‖² is not positive: average over more steps. Without gradients of examples,
    use `sl.contrib.gradient_noise_scale`.

    **Arguments:**

    - `decay`: the decay of both means, in [0, 1).

    ??? cite "McCandlish et al., [An Empirical Model of Large-Batch
        Training](https://arxiv.org/abs/1812.06162), 2018"
    """

    decay: fields.Number = fields.hyperparameter(0.99, within="[0, 1)")

    def init(self, params: Params) -> MeasureGradientNoiseState:
        tree.check_inexact(params)
        dtype = tree.sum_dtype(params)
        return MeasureGradientNoiseState(
            tree.fresh_count(), jnp.zeros((), dtype), jnp.zeros((), dtype)
        )

    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        if not jax.tree.leaves(grads):
            return grads, grads
        sums = tree.map_leaves(lambda _, g: jnp.sum(g, 0), (grads,))
        return sums, tree.map_leaves(lambda _, g: jnp.sum(tree.abs_squared(g)), (grads,))

    def finish(self, total, counts, size, state, context):
        if size < 2 and jax.tree.leaves(total):
            raise ValueError(
                f"MeasureGradientNoise needs the gradients of at least 2 examples, got {size}."
            )
        now = self.at(context)
        mean = tree.scale(total, jnp.asarray(1 / max(size, 1), now.decay.dtype))
        squares = [number(x, state.variance) for x in jax.tree.leaves(counts)]
        small = sum(squares, jnp.zeros_like(state.variance)) / max(size, 1)
        large = number(tree.squared_norm(mean), state.variance)
        norm, variance = _estimates(small, 1, large, max(size, 2))
        age = tree.increment(state.age)
        weight = number(tree.newest_weight(now.decay, age), norm)
        return mean, MeasureGradientNoiseState(
            age,
            tree.moved(state.squared_norm, norm, weight),
            tree.moved(state.variance, variance, weight),
        )

    def metrics(self, state: MeasureGradientNoiseState) -> dict[str, Array]:
        return {
            "noise_scale": _quotient(state.variance, state.squared_norm),
            "gradient_variance": state.variance,
            "squared_gradient_norm": state.squared_norm,
        }


def gradient_noise_scale(
    small_squared_norm: Real[Array, "..."] | float,
    small_batch: int,
    large_squared_norm: Real[Array, "..."] | float,
    large_batch: int,
) -> Real[Array, "..."]:
    """The gradient noise scale from squared norms of gradients of two batch sizes.

        N = (B·‖g_B‖² − b·‖g_b‖²) / (B − b),   S = (‖g_b‖² − ‖g_B‖²) / (1/b − 1/B)
        noise scale = S / N

    Accumulation has both: the gradients of its mini-batches, and their mean. Measured with an
    exponential mean, they take no memory:

    ```python
    >>> def square(grads):
    ...     return sl.tree.global_norm(grads) ** 2
    >>> def watch(decay):
    ...     return sl.Monitor({"squared_norm": sl.MeasureWithEma(square, decay)})
    >>> tx = watch(0.998) | (watch(0.99) | sl.adam(1e-3)).every_k(4)
    >>> small, large = 2.0, 1.0  # from opt.metrics, after many steps with batches of 16
    >>> sl.contrib.gradient_noise_scale(small, 16, large, 64)
    Array(32., dtype=float32)

    ```

    Average the squared norms over many steps first: a quotient of noisy estimates is biased.

    **Arguments:**

    - `small_squared_norm`: ‖g_b‖², the mean of the squared norm of gradients of `small_batch`
        examples.
    - `small_batch`: b, the number of examples, ≥ 1.
    - `large_squared_norm`: ‖g_B‖², the squared norm of gradients of `large_batch` examples.
    - `large_batch`: B, greater than b.

    **Returns:** the noise scale, in examples; infinite where the estimate N is not positive.

    ??? cite "McCandlish et al., [An Empirical Model of Large-Batch
        Training](https://arxiv.org/abs/1812.06162), 2018 (appendix A.1)"
    """
    if not 1 <= small_batch < large_batch:
        raise ValueError(
            "gradient_noise_scale needs a large batch that is larger than the small one, got "
            f"{large_batch} and {small_batch}."
        )
    small, large = tree.as_float(small_squared_norm), tree.as_float(large_squared_norm)
    dtype = tree.accumulation_dtype(small.dtype, large.dtype)
    norm, variance = _estimates(small.astype(dtype), small_batch, large.astype(dtype), large_batch)
    return _quotient(variance, norm)


def _estimates(
    small: Array, small_batch: int, large: Array, large_batch: int
) -> tuple[Array, Array]:
    """The squared norm of the true gradient, and the variance of one example's gradient."""
    ratio = small_batch / large_batch
    return (large - ratio * small) / (1 - ratio), (small - large) * (small_batch / (1 - ratio))


def _quotient(variance: Array, norm: Array) -> Array:
    positive = norm > 0
    return jnp.where(positive, variance / jnp.where(positive, norm, 1), jnp.inf)
