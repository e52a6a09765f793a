"""Gradients with noise: annealed, and for differential privacy."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from ... import fields, tree
from ..._core.fields.keys import AbstractKeyed, key_field
from ..._core.protocol.bases import AbstractPerExampleTransform
from ..._core.protocol.loss import Loss
from ..._core.protocol.parts import Part
from ...tree.types import Gradients, Hyperparameter, Params, PyTree, Scalar, Updates
from .._base import AbstractTransform, Context, advise_keywords, chain
from ..momentum.momentum import momentum_if_any
from ..shaping.clip import clip_factor
from ..shaping.descent import ScaleByLearningRate
from .monitor import by_name


class AddNoiseState(eqx.Module):
    """The state of `AddNoise`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next noise."""


class AddNoise(AbstractKeyed, AbstractTransform[AddNoiseState]):
    """Adds Gaussian noise that fades: u ↦ u + σₙ·ξ with ξ normal and σₙ² = η / (n + 1)^γ.

    n is the step, counted from 0. Each step draws independent noise for each leaf, in at least
    float32. The real and imaginary parts of a complex leaf each have half the variance. Equal keys
    give equal noise. The state stores the raw data of the key, so it is saved and restored like
    any array.

    **Arguments:**

    - `eta`: η, the variance of the noise in the first step, ≥ 0.
    - `gamma`: γ, the exponent of the decay of the variance, ≥ 0; 0.55 in the paper.
    - `key`: an int in [0, 2³¹), or a PRNG key.

    ??? cite "Neelakantan et al., [Adding Gradient Noise Improves Learning for Very Deep
        Networks](https://arxiv.org/abs/1511.06807), 2015"
    """

    eta: fields.Number = fields.hyperparameter(within="[0, inf)")
    gamma: fields.Number = fields.hyperparameter(within="[0, inf)")
    key: Any = key_field(default=0)

    needs: ClassVar[tuple[str, ...]] = ("step",)

    def init(self, params: Params) -> AddNoiseState:
        tree.check_inexact(params)
        return AddNoiseState(self._fresh_key_data())

    def update(self, updates, state, params=None, context=None):
        step = self.demand("step", None if context is None else context.step)
        now = self.at(context)
        number = jnp.asarray(step, now.gamma.dtype) + 1
        now.sigma = tree.root(jnp.asarray(now.eta, number.dtype) * number**-now.gamma)

        key, drawn = jax.random.split(self._typed_key(state.key))
        noise = normal_like(updates, drawn)
        updates = tree.map_leaves(lambda now, u, xi: u + now.sigma * xi, (updates, noise), now)
        return updates, AddNoiseState(jax.random.key_data(key))


def normal_like(like: PyTree, key: Array) -> PyTree:
    """Normal numbers for each entry of each leaf, in at least float32."""
    leaves, structure = jax.tree.flatten(like)
    # On CPUs JAX draws random numbers in a loop over whole arrays, so the bits and the numbers
    # take twice the memory of the parameters.
    normal = [
        jax.random.normal(k, x.shape, tree.accumulation_dtype(x.dtype))
        for k, x in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    return structure.unflatten(normal)


@advise_keywords
def noisy_sgd(
    learning_rate: Hyperparameter,
    eta: Hyperparameter = 0.01,
    gamma: Hyperparameter = 0.55,
    key: object = 0,
) -> AbstractTransform:
    """Gradient descent with decaying noise.

        p ↦ p − η_lr·(g + σₙ·ξ)   with   σₙ² = η / (n + 1)^γ

    ξ is standard normal noise.

    **Arguments:**

    - `learning_rate`: η_lr.
    - `eta`, `gamma`, `key`: as in `AddNoise`.

    **Returns:** a chain of `AddNoise` and `ScaleByLearningRate`.

    ??? cite "Neelakantan et al., [Adding Gradient Noise Improves Learning for Very Deep
        Networks](https://arxiv.org/abs/1511.06807), 2015"
    """
    return AddNoise(eta, gamma, key) | ScaleByLearningRate(learning_rate)


class _AbstractPerExampleClip(AbstractPerExampleTransform):
    """Counts the examples that it clips."""

    keeps_zeros: ClassVar[bool] = True

    def finish(self, total, counts, size, state, context):
        return total, type(state)(counts)

    def metrics(self, state: PyTree) -> dict[str, Array]:
        return by_name("num_clipped", state.num_clipped)


class PerExampleClipState(eqx.Module):
    """The state of `PerExampleGlobalNormClip`."""

    num_clipped: Int[Array, ""]
    """The number of examples that were clipped in the last step."""


class PerExampleGlobalNormClip(_AbstractPerExampleClip):
    """Clips the gradient of each example to norm c, and sums over the examples.

        u = Σᵢ gᵢ·min(1, c / ‖gᵢ‖)

    It takes gradients with a leading axis of examples, which `sl.train_step` computes. It must be
    the first link, without a wrapper. The norm covers all leaves together, summed in at least
    float32. `opt.metrics` has `num_clipped`, the number of examples that were clipped. A gradient
    that is not finite makes the sum not finite.

    **Arguments:**

    - `l2_norm_clip`: c, ≥ 0.
    - `single_batch_element`: whether gradients belong to one example and have no such axis, as in a
        loop over single examples.

    ??? cite "Abadi et al., [Deep Learning with Differential
        Privacy](https://arxiv.org/abs/1607.00133), 2016"
    """

    l2_norm_clip: fields.Number = fields.hyperparameter(within="[0, inf]")
    single_batch_element: bool = eqx.field(default=False, static=True)

    @property
    def per_example(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        return not self.single_batch_element

    def init(self, params: Params) -> PerExampleClipState:
        tree.check_inexact(params)
        return PerExampleClipState(jnp.zeros((), jnp.int32))

    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        if self.single_batch_element:
            grads = jax.tree.map(lambda g: g[None], grads)
        return _clipped_sum(grads, self.at(context).l2_norm_clip)


class PerExampleLayerNormClipState(eqx.Module):
    """The state of `PerExampleLayerNormClip`."""

    num_clipped: PyTree = fields.per_param()
    """For each parameter leaf, the number of examples that were clipped in the last step."""


class PerExampleLayerNormClip(_AbstractPerExampleClip):
    """Clips each leaf of the gradient of each example, and sums over the examples.

        uₗ = Σᵢ gᵢₗ·min(1, cₗ / ‖gᵢₗ‖)

    with cₗ = c / √K for each of K leaves, or cₗ = c·√(Dₗ / D) for a leaf with Dₗ of all D entries.
    It takes gradients with a leading axis of examples, which `sl.train_step` computes. It must be
    the first link, without a wrapper. Norms are summed in at least float32. `opt.metrics` has
    `num_clipped` followed by the path of each leaf, the number of examples that were clipped
    there. A gradient that is not finite makes the sum of its leaf not finite.

    **Arguments:**

    - `global_l2_norm_clip`: c, ≥ 0.
    - `uniform`: whether cₗ = c / √K; otherwise cₗ depends on the size of the leaf.

    ??? cite "McMahan et al., [Learning Differentially Private Recurrent Language
        Models](https://arxiv.org/abs/1710.06963), 2017"
    """

    global_l2_norm_clip: fields.Number = fields.hyperparameter(within="[0, inf]")
    uniform: bool = eqx.field(default=True, static=True)

    def init(self, params: Params) -> PerExampleLayerNormClipState:
        tree.check_inexact(params)
        return PerExampleLayerNormClipState(
            jax.tree.map(lambda _: jnp.zeros((), jnp.int32), params)
        )

    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        leaves, structure = jax.tree.flatten(grads)
        clip = self.at(context).global_l2_norm_clip
        sizes = [u.size // max(u.shape[0], 1) for u in leaves]
        shares = [1 / len(leaves) if self.uniform else n / max(sum(sizes), 1) for n in sizes]
        sums, counts = [], []
        for u, share in zip(leaves, shares, strict=True):
            total, count = _clipped_sum(u, clip * share**0.5)
            sums.append(total)
            counts.append(count)
        return structure.unflatten(sums), structure.unflatten(counts)


class DifferentiallyPrivateAggregateState(eqx.Module):
    """The state of `DifferentiallyPrivateAggregate`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next noise."""
    num_clipped: Int[Array, ""]
    """The number of examples that were clipped in the last step."""


class DifferentiallyPrivateAggregate(
    AbstractKeyed, AbstractPerExampleTransform[DifferentiallyPrivateAggregateState]
):
    """The mean of clipped gradients of examples, plus noise for differential privacy.

        u = (Σᵢ gᵢ·min(1, c / ‖gᵢ‖) + c·σ·ξ) / B

    with B examples and ξ normal. It takes gradients with a leading axis of examples, which
    `sl.train_step` computes. It must be the first link, without a wrapper; the links that follow
    may have wrappers, including `.every_k`, but must not evaluate the loss. Each step draws
    independent noise for each leaf, in at least float32. The state stores the raw data of the key.
    `opt.metrics` has `num_clipped`, which is not private.

    Differs from Optax: the real and imaginary parts of a complex leaf each have the full variance.
    Optax gives each half the variance, which is less privacy than σ promises.

    **Arguments:**

    - `l2_norm_clip`: c, ≥ 0.
    - `noise_multiplier`: σ, ≥ 0.
    - `key`: an int in [0, 2³¹), or a PRNG key.

    ??? cite "Abadi et al., [Deep Learning with Differential
        Privacy](https://arxiv.org/abs/1607.00133), 2016"
    """

    l2_norm_clip: fields.Number = fields.hyperparameter(within="[0, inf)")
    noise_multiplier: fields.Number = fields.hyperparameter(within="[0, inf)")
    key: Any = key_field()

    metric_fields: ClassVar[tuple[str, ...]] = ("num_clipped",)

    def ask(self, here: Part, loss: Loss) -> Loss:
        return super().ask(here, loss.request("private gradients", here))

    def init(self, params: Params) -> DifferentiallyPrivateAggregateState:
        tree.check_inexact(params)
        return DifferentiallyPrivateAggregateState(self._fresh_key_data(), jnp.zeros((), jnp.int32))

    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        return _clipped_sum(grads, self.at(context).l2_norm_clip)

    def finish(self, total, counts, size, state, context):
        now = self.at(context)
        leaves, structure = jax.tree.flatten(total)
        key, *keys = jax.random.split(self._typed_key(state.key), len(leaves) + 1)
        noise = [_normal(k, u) for k, u in zip(keys, leaves, strict=True)]

        def rule(now, u, xi):
            return (u + now.deviation * xi) * now.share

        wide = tree.accumulation_dtype(now.l2_norm_clip.dtype, now.noise_multiplier.dtype)
        now.deviation = now.l2_norm_clip.astype(wide) * now.noise_multiplier.astype(wide)
        now.share = jnp.asarray(1 / max(size, 1), wide)
        updates = tree.map_leaves(rule, (total, structure.unflatten(noise)), now)
        return updates, DifferentiallyPrivateAggregateState(jax.random.key_data(key), counts)


def _clipped_sum(updates: PyTree, clip: Scalar) -> tuple[PyTree, Int[Array, ""]]:
    """The sum of the clipped gradients, and the number of examples that were clipped."""
    leaves = jax.tree.leaves(updates)
    if not leaves:
        return updates, jnp.zeros((), jnp.int32)
    norms = jax.vmap(tree.global_norm)(updates)
    clip = jnp.asarray(clip, norms.dtype)
    factors, within = clip_factor(norms, clip), norms <= clip

    def rule(_, u):
        # A contraction needs no buffer for the clipped gradients of all examples.
        weights = jnp.asarray(factors, tree.real_dtype(u.dtype))
        # On a mesh with explicit axes it must be sharded like a plain sum.
        like = jax.eval_shape(lambda u: jnp.sum(u, 0), u)
        return jnp.tensordot(weights.astype(u.dtype), u, axes=1, out_sharding=like.sharding)

    return tree.map_leaves(rule, (updates,)), jnp.sum(~within, dtype=jnp.int32)


def _normal(key: Array, like: Array) -> Array:
    """Noise with variance 1 in each real number."""
    if not jnp.iscomplexobj(like):
        return jax.random.normal(key, like.shape, like.dtype)
    return jax.random.normal(key, like.shape, like.dtype) * jnp.asarray(2**0.5, like.dtype)


@advise_keywords
def dpsgd(
    learning_rate: Hyperparameter,
    l2_norm_clip: Hyperparameter,
    noise_multiplier: Hyperparameter,
    key: object,
    momentum: Hyperparameter | None = None,
    nesterov: bool = False,
) -> AbstractTransform:
    """Differentially private SGD: clips the gradient of each example, and adds noise to their mean.

        p ↦ p − η·(Σᵢ gᵢ·min(1, c / ‖gᵢ‖) + c·σ·ξ) / B

    for B examples and normal ξ. It takes gradients with a leading axis of examples, which
    `sl.train_step` computes.

    **Arguments:**

    - `learning_rate`: η.
    - `l2_norm_clip`: c, ≥ 0.
    - `noise_multiplier`: σ, ≥ 0.
    - `key`: an int in [0, 2³¹), or a PRNG key.
    - `momentum`: the decay of the momentum, in [0, 1]. Defaults to no momentum.
    - `nesterov`: whether to use Nesterov momentum.

    **Returns:** a chain of `DifferentiallyPrivateAggregate`, `Trace`, if there is momentum, and
    `ScaleByLearningRate`.

    ```python
    >>> tx = sl.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, key=0)

    ```

    ??? cite "Abadi et al., [Deep Learning with Differential
        Privacy](https://arxiv.org/abs/1607.00133), 2016"
    """
    links = momentum_if_any(momentum, nesterov)
    return chain(
        DifferentiallyPrivateAggregate(l2_norm_clip, noise_multiplier, key),
        *links,
        ScaleByLearningRate(learning_rate),
    )
