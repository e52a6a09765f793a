"""IVON: a Gaussian posterior of the parameters at the cost of Adam."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree, UInt32

from ... import fields, tree
from ..._core.fields.keys import AbstractKeyed, key_field
from ..._core.protocol.loss import Loss
from ..._core.protocol.parts import Part
from ...rules._base import AbstractTransform, Context, advise_keywords
from ...rules.measuring.noise import normal_like
from ...rules.shaping.descent import ScaleByLearningRate
from ...tree.paths import check_real
from ...tree.types import Hyperparameter, Params


class ScaleByIvonState(eqx.Module):
    """The state of `ScaleByIvon`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next sample."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    precision: PyTree[Inexact[Array, "..."]] = fields.param_like("nonnegative")
    """h + δ, which is positive; h alone may be slightly negative."""


class ScaleByIvon(AbstractKeyed, AbstractTransform[ScaleByIvonState]):
    """IVON: learns a Gaussian posterior of the parameters, by an estimate of the Hessian.

    The posterior of p is normal with the mean p, the parameters of the model, and the variance
    1 / (λ·(h + δ)). With the gradient gₜ of the mean loss at a sample p + σ·ξ,

        σ² = 1 / (λ·(hₜ₋₁ + δ)),   ξ normal
        mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ,   fₜ = ξ·gₜ / σ
        hₜ = β₂·hₜ₋₁ + (1 − β₂)·fₜ + ½·(1 − β₂)²·(hₜ₋₁ − fₜ)² / (hₜ₋₁ + δ)
        uₜ = (h₀ + δ)·clip((m̂ₜ + δ·p) / (hₜ + δ), ±ρ)   with   m̂ₜ = mₜ / (1 − β₁ᵗ)

    fₜ estimates the diagonal of the Hessian without a second gradient, and the last term of hₜ
    keeps hₜ + δ positive. The factor h₀ + δ gives the first steps the size of SGD steps.

    `sl.train_step` takes the gradient at the sample, so a step costs one gradient, and returns the
    loss there. `opt.sample_params(model, key)` draws further samples, for predictions. Parameters
    in half precision round their samples.

    The batches of `.every_k` and microbatches share the sample of their step, so the step is that
    of the whole batch, as in the paper. Its authors' code may also draw a sample for each of them
    and average the products ξ·g, which makes fₜ less noisy. A `b2` closer to 1 averages fₜ over
    more steps instead. A step that a wrapper skips, such as `.if_finite`, draws another sample.

    **Arguments:**

    - `ess`: λ, the effective sample size, > 0: the number of examples, or less for a wider
        posterior.
    - `b1`: β₁, the decay of the mean of gradients, in [0, 1).
    - `b2`: β₂, the decay of the Hessian, in [0, 1).
    - `hessian_init`: h₀, the first Hessian, > 0.
    - `weight_decay`: δ, the precision of the prior divided by λ, > 0.
    - `clip_radius`: ρ, the largest size of an entry of the step, > 0, or `None`.
    - `key`: the key of the samples, an int in [0, 2³¹), or a PRNG key.

    ??? cite "Shen et al., [Variational Learning is Effective for Large Deep
        Networks](https://arxiv.org/abs/2402.17641), 2024"
    """

    ess: fields.Number = fields.hyperparameter(within="(0, inf)")
    b1: fields.Number = fields.hyperparameter(0.9, within="[0, 1)")
    b2: fields.Number = fields.hyperparameter(0.99999, within="[0, 1)")
    hessian_init: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")
    weight_decay: fields.Number = fields.hyperparameter(1e-4, within="(0, inf)")
    clip_radius: fields.OptionalNumber = fields.hyperparameter(None, within="(0, inf)")
    key: Any = key_field(default=0)

    needs: ClassVar[tuple[str, ...]] = ("params",)

    def init(self, params: Params) -> ScaleByIvonState:
        why = "ScaleByIvon estimates the diagonal of a real Hessian"
        check_real(params, why, "Write `tx.split_complex()`, which makes it two real parameters.")
        now = self.at(Context(step=0))
        return ScaleByIvonState(
            key=self._fresh_key_data(),
            age=tree.fresh_count(),
            mu=tree.first_moment(params),
            precision=tree.second_moment(params, value=now.hessian_init + now.weight_decay),
        )

    def ask(self, here: Part, loss: Loss) -> Loss:
        return super().ask(here, loss.request("sampled parameters", here))

    def noise(
        self,
        state: ScaleByIvonState,
        params: Params,
        context: Context | None,
        key: Array | None = None,
    ) -> Params:
        """The noise to add to the parameters for a sample, a tree like them in at least float32.

        **Arguments:**

        - `state`, `params`, `context`: as for `update`. Only the shapes and dtypes of `params`
            count.
        - `key`: a PRNG key. Defaults to the key of the sample at which the next gradient is taken.
        """
        now = self.at(context)
        normal = normal_like(params, self._key(state)[1] if key is None else key)

        def rule(now, xi, s):
            return xi * (tree.inverse_root(now.ess) * tree.inverse_root(tree.positive(s)))

        return tree.map_leaves(rule, (normal, state.precision), now)

    def update(self, updates, state, params=None, context=None):
        params = self.demand("params", params)
        now = self.at(context)
        now.c1, now.c2 = 1 - now.b1, 1 - now.b2
        age = tree.increment(state.age)
        now.mu_scale = tree.bias_correction(now.b1, age)
        now.first = now.hessian_init + now.weight_decay
        key, drawn = self._key(state)

        def mean(now, g, mu):
            return now.b1 * mu + now.c1 * g

        def precision(now, g, s, xi):
            s = tree.positive(s)
            # Two roots, because the product may overflow after a huge gradient.
            estimate = xi * g * (tree.root(now.ess) * tree.root(s))
            change = now.c2 * (estimate - (s - now.weight_decay))
            return s + change + 0.5 * tree.bounded_square(change) / s

        def direction(now, mu, s, p):
            u = (now.mu_scale * mu + now.weight_decay * p) / tree.positive(s)
            if now.clip_radius is not None:
                u = jnp.clip(u, -now.clip_radius, now.clip_radius)
            return now.first * u

        # They follow from the key, and are drawn again instead of kept.
        normal = normal_like(updates, drawn)
        mu = tree.map_leaves(mean, (updates, state.mu), now, like=(state.mu,))
        new = tree.map_leaves(
            precision, (updates, state.precision, normal), now, like=(state.precision,)
        )
        updates = tree.map_leaves(direction, (mu, new, params), now)
        return updates, ScaleByIvonState(jax.random.key_data(key), age, mu, new)

    def skipped(self, state: ScaleByIvonState) -> ScaleByIvonState:
        return dataclasses.replace(state, key=jax.random.key_data(self._key(state)[0]))

    def _key(self, state: ScaleByIvonState) -> Array:
        """The keys of the next state and of this sample."""
        return jax.random.split(self._typed_key(state.key))


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
    key: object = 0,
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
    >>> opt = sl.Optimizer(sl.contrib.ivon(0.1, ess=4), model)
    >>> model, opt, loss = step(model, opt, x)
    >>> keys = jax.random.split(jax.random.key(0), 10)
    >>> jax.vmap(lambda key: x @ opt.sample_params(model, key)["w"])(keys).shape
    (10, 4)

    ```

    **Arguments:**

    - `learning_rate`: η.
    - `ess`: λ, the effective sample size, > 0: the number of examples, or less for a wider
        posterior.
    - `b1`, `b2`, `hessian_init`, `weight_decay`, `clip_radius`, `key`: as in `ScaleByIvon`.

    **Returns:** a chain of `ScaleByIvon` and `ScaleByLearningRate`.

    ??? cite "Shen et al., [Variational Learning is Effective for Large Deep
        Networks](https://arxiv.org/abs/2402.17641), 2024"
    """
    numbers = ess, b1, b2, hessian_init, weight_decay, clip_radius
    return ScaleByIvon(*numbers, key) | ScaleByLearningRate(learning_rate)
