"""Optimizers that estimate the curvature of the loss."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import ScaleByIvon, ScaleByLearningRate, ScaleBySophia
from ...where.resolve import WhereLike
from .._decay import decayed_descent


@advise_keywords
def sophia(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.965,
    b2: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    gamma: Hyperparameter = 0.01,
    clip_threshold: Hyperparameter | None = 1.0,
    update_interval: int = 10,
    *,
    estimator: str = "hutchinson",
    key: Any = 0,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Sophia: divides a mean of gradients by the curvature, and clips the result.

        p ↦ p − η·(clip(m̂ / max(γ·h, ε), ±ρ) + λ·p)

    h estimates the diagonal of the Hessian.

    Use it with `sl.train_step`, which computes the estimate in every k-th step:

    ```python
    >>> @sl.train_step
    ... def step(model, x):
    ...     return jnp.mean((x @ model["w"] - 1) ** 2)
    >>> model = {"w": jnp.ones(2)}
    >>> opt = sl.Optimizer(sl.sophia(1e-3), model)
    >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)))

    ```

    For language models the paper prefers `estimator="gauss_newton_bartlett"` (Sophia-G), which
    needs a loss that draws its labels from the model:

    ```python
    >>> def loss_fn(model, x, labels):
    ...     log_probs = jax.nn.log_softmax(x @ model["w"])
    ...     return -jnp.mean(jnp.take_along_axis(log_probs, labels[:, None], axis=1))
    >>> def sampled_loss_fn(model, key, x, labels):
    ...     drawn = jax.random.categorical(key, x @ model["w"])
    ...     return loss_fn(model, x, drawn), drawn.size
    >>> step = sl.train_step(loss_fn, sampled_loss_fn=sampled_loss_fn)
    >>> model = {"w": jnp.zeros((2, 3))}
    >>> tx = sl.sophia(1e-3, gamma=0.05, estimator="gauss_newton_bartlett")
    >>> opt = sl.Optimizer(tx, model)
    >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)), jnp.array([0, 1, 2, 0]))

    ```

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0. The paper uses 0.2.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleBySophia`.

    **Returns:** a chain of `ScaleBySophia`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Liu et al., [Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
        Pre-training](https://arxiv.org/abs/2305.14342), 2023"
    """
    numbers = b1, b2, eps, gamma, clip_threshold
    return chain(
        ScaleBySophia(*numbers, update_interval, estimator, key, mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def ivon(
    learning_rate: Hyperparameter,
    ess: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99999,
    hessian_init: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 1e-4,
    clip_radius: Hyperparameter | None = None,
    *,
    key: Any = 0,
) -> AbstractTransform:
    """IVON: learns a Gaussian posterior of the parameters, at the cost of Adam.

        p ↦ p − η·(h₀ + δ)·clip((m̂ + δ·p) / (h + δ), ±ρ)

    The posterior has the mean p and the variance 1 / (λ·(h + δ)). h estimates the diagonal of the
    Hessian, from gradients at samples of the posterior. `sl.train_step` takes them, and
    `opt.sample_params` draws others, for predictions:

    ```python
    >>> @sl.train_step
    ... def step(model, x):
    ...     return jnp.mean((x @ model["w"] - 1) ** 2)
    >>> model, x = {"w": jnp.ones(2)}, jnp.ones((4, 2))
    >>> opt = sl.Optimizer(sl.ivon(0.1, ess=4), model)
    >>> model, opt, loss = step(model, opt, x)
    >>> keys = jax.random.split(jax.random.key(0), 10)
    >>> jax.vmap(lambda key: x @ opt.sample_params(model, key)["w"])(keys).shape
    (10, 4)

    ```

    **Arguments:**

    - `learning_rate`: η.
    - `ess`: λ, the effective sample size, > 0: the number of examples, or less for a wider
        posterior.
    - The others: as in `ScaleByIvon`.

    **Returns:** a chain of `ScaleByIvon` and `ScaleByLearningRate`.

    ??? cite "Shen et al., [Variational Learning is Effective for Large Deep
        Networks](https://arxiv.org/abs/2402.17641), 2024"
    """
    numbers = ess, b1, b2, hessian_init, weight_decay, clip_radius
    return chain(ScaleByIvon(*numbers, key), ScaleByLearningRate(learning_rate))
