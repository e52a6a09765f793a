"""Sophia: a mean of gradients over an estimate of the diagonal of the Hessian."""

from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree, UInt32

from ... import fields, tree
from ..._core.fields.keys import AbstractKeyed, key_field
from ..._core.protocol.inputs import missing
from ...rules._base import AbstractTransform, Context, advise_keywords
from ...rules.momentum.momentum import first_moment
from ...rules.shaping.descent import decayed_descent
from ...tree.paths import check_real
from ...tree.types import Hyperparameter, Params, WhereLike


class ScaleBySophiaState(eqx.Module):
    """The state of `ScaleBySophia`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next estimate."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    # Exact, because a small curvature that is rounded to 0 makes the largest update.
    hessian: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The mean of the estimates of the diagonal of the Hessian, which may be negative."""


class ScaleBySophia(AbstractKeyed, AbstractTransform[ScaleBySophiaState]):
    """Sophia: divides a mean of gradients by the curvature, and clips the result.

        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ,   m̂ₜ = mₜ / (1 − β₁ᵗ)
        h ← β₂·h + (1 − β₂)·ĥ   in every k-th step, from the first one on
        uₜ = clip(m̂ₜ / max(γ·h, ε), ±ρ)

    ĥ is an estimate of the diagonal of the Hessian H of the loss. With `"hutchinson"` it is
    v ⊙ H·v with a vector v of random signs. With `"gauss_newton_bartlett"` it is B·ĝ², where ĝ is
    the gradient of the mean loss of B examples with labels that are drawn from the model. It is
    never negative, and suits losses that are a cross-entropy.

    The first estimate needs the loss as a function of the parameters. `sl.train_step` passes it; by
    hand, write `opt.step(model, grads, value_fn=fn)`. The second one needs another loss, which
    draws its labels: `sl.train_step(loss_fn, sampled_loss_fn=fn)`. Steps between estimates do not
    compute them. Under `.every_k` an estimate uses the last mini-batch of a window.

    m̂ follows Optax. The paper has m in its place, which is smaller in the first few hundred steps.
    The authors' code adds 1e-15 to γ·h instead of taking the maximum with ε. Differs from Optax: a
    step uses the estimate that it makes, as in the paper, and h is stored in at least float32.

    **Arguments:**

    - `b1`: β₁, the decay of the mean, in [0, 1).
    - `b2`: β₂, the decay of the mean of estimates, in [0, 1).
    - `eps`: ε, > 0. Where γ·h is smaller, as where h is not positive, the update is close to
        ρ·sign(m̂).
    - `gamma`: γ, ≥ 0. The paper chooses it so that 10 to 50% of the updates are not clipped: 0.01
        with `"hutchinson"`, 0.05 with `"gauss_newton_bartlett"`.
    - `clip_threshold`: ρ, > 0, or `None` not to clip.
    - `update_interval`: k, an int ≥ 1.
    - `estimator`: `"hutchinson"` or `"gauss_newton_bartlett"`.
    - `key`: for the random signs or labels: an int in [0, 2³¹), or a PRNG key.
    - `mu_dtype`: the dtype in which m is stored. Defaults to the parameter's dtype, but float32 for
        float16 parameters.

    Complex parameters are refused: use `.split_complex()`.

    ??? cite "Liu et al., [Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
        Pre-training](https://arxiv.org/abs/2305.14342), 2023"
    """

    b1: fields.Number = fields.hyperparameter(0.965, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.99, within="[0, 1)")
    eps: fields.Number = fields.hyperparameter(1e-8, within="(0, inf)")
    gamma: fields.Number = fields.hyperparameter(0.01, within="[0, inf)")
    clip_threshold: fields.OptionalNumber = fields.hyperparameter(
        1.0, within="(0, inf)", optional=True
    )
    update_interval: int = fields.count_field(10)
    estimator: str = fields.choice_field("hutchinson", "gauss_newton_bartlett")
    key: Any = key_field(default=0)
    mu_dtype: np.dtype | None = fields.dtype_field()

    @property
    def needs(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        """The entries of the context that the estimate needs."""
        return ("params", "step", _NEEDS[self.estimator])

    def init(self, params: Params) -> ScaleBySophiaState:
        why = "ScaleBySophia estimates the diagonal of a real Hessian"
        check_real(params, why, "Write `tx.split_complex()`, which makes it two real parameters.")
        return ScaleBySophiaState(
            key=self._fresh_key_data(),
            age=tree.fresh_count(),
            mu=first_moment(self, params, "b1"),
            hessian=tree.second_moment(params),
        )

    def update(self, updates, state, params=None, context=None):
        params = self.demand("params", params)
        context = Context() if context is None else context
        step = self.demand("step", context.step)
        need = _NEEDS[self.estimator]
        if not context.has(need):
            raise TypeError(missing(type(self).__name__, need))
        now = self.at(context)
        now.c1, now.c2 = 1 - now.b1, 1 - now.b2
        age = tree.increment(state.age)
        now.mu_scale = tree.bias_correction(now.b1, age)

        def estimate(key_data: Array, hessian: PyTree) -> tuple[Array, PyTree]:
            key, own = jax.random.split(self._typed_key(key_data))
            found = _ESTIMATES[self.estimator](context, params, own)

            def rule(now, h, new):
                return now.b2 * h + now.c2 * new

            mean = tree.map_leaves(rule, (hessian, found), now, like=(hessian,))
            return jax.random.key_data(key), mean

        due = step % self.update_interval == 0
        key, hessian = jax.lax.cond(
            due, estimate, lambda key, hessian: (key, hessian), state.key, state.hessian
        )

        def mean(now, g, mu):
            return now.b1 * mu + now.c1 * g

        mu = tree.map_leaves(mean, (updates, state.mu), now, like=(state.mu,))
        updates = tree.map_leaves(_direction, (mu, hessian), now)
        return updates, ScaleBySophiaState(key, age, mu, hessian)


def _direction(now, mu, h):
    u = now.mu_scale * mu / jnp.maximum(now.gamma * h, now.eps)
    return u if now.clip_threshold is None else jnp.clip(u, -now.clip_threshold, now.clip_threshold)


def _hutchinson(context: Context, params: Params, key: Array) -> PyTree:
    """v ⊙ H·v with random signs v."""
    leaves, structure = jax.tree.flatten(params)
    signs = structure.unflatten(
        [_signs(own, p) for own, p in zip(jax.random.split(key, len(leaves)), leaves, strict=True)]
    )
    product = context.hessian_product(params, signs)
    return tree.map_leaves(lambda _, v, hv: v * hv, (signs, product))


def _signs(key: Array, like: Array) -> Array:
    """Random signs of the shape and dtype of an array.

    Each drawn word gives 32 of them, along the last axis, so that they can be sharded as the array.
    `jax.random.rademacher` draws a word for each sign.
    """
    *rows, length = like.shape or (1,)
    words = jax.random.bits(key, (*rows, -(-length // 32)), jnp.uint32)
    places = jax.lax.broadcasted_iota(jnp.uint32, (*words.shape, 32), words.ndim)
    bits = words[..., None] >> places & jnp.uint32(1)
    bits = bits.reshape(*rows, words.shape[-1] * 32)[..., :length].reshape(like.shape)
    return 1 - 2 * bits.astype(like.dtype)


def _gauss_newton_bartlett(context: Context, params: Params, key: Array) -> PyTree:
    """B·ĝ² with the gradient ĝ of the mean loss for B drawn labels."""
    assert context.sampled_grad_fn is not None
    grad, terms = context.sampled_grad_fn(params, key)
    now = SimpleNamespace(terms=jnp.asarray(terms, jnp.float32))
    return tree.map_leaves(lambda now, g: now.terms * tree.bounded_square(g), (grad,), now)


_NEEDS = {"hutchinson": "grad_fn", "gauss_newton_bartlett": "sampled_grad_fn"}
_ESTIMATES = {"hutchinson": _hutchinson, "gauss_newton_bartlett": _gauss_newton_bartlett}


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
    key: object = 0,
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
    >>> opt = sl.Optimizer(sl.contrib.sophia(1e-3), model)
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
    >>> tx = sl.contrib.sophia(1e-3, gamma=0.05, estimator="gauss_newton_bartlett")
    >>> opt = sl.Optimizer(tx, model)
    >>> model, opt, loss = step(model, opt, jnp.ones((4, 2)), jnp.array([0, 1, 2, 0]))

    ```

    **Arguments:**

    - `learning_rate`: η.
    - `b1`, `b2`, `eps`: as in `ScaleBySophia`.
    - `weight_decay`: λ, ≥ 0. The paper uses 0.2.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `gamma`, `clip_threshold`, `update_interval`, `estimator`, `key`, `mu_dtype`: as in
        `ScaleBySophia`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.

    **Returns:** a chain of `ScaleBySophia`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Liu et al., [Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
        Pre-training](https://arxiv.org/abs/2305.14342), 2023"
    """
    numbers = b1, b2, eps, gamma, clip_threshold
    rule = ScaleBySophia(*numbers, update_interval, estimator, key, mu_dtype)
    return rule | decayed_descent(learning_rate, weight_decay, decay_where, independent_decay)
