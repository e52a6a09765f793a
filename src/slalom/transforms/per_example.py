"""Transforms that clip the gradient of each example by itself, and sum."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree, Real, UInt32

from .. import tree
from .._core.fields import Hyperparameter, hyperparameter
from .._core.marks import per_param
from .._core.per_example import AbstractPerExampleTransform
from .._core.transform import Context
from .._paths import leaf_paths
from .._types import Gradients, Params, Scalar, Updates
from ._keys import as_words, fresh_words, key_field


class PerExampleClipState(eqx.Module):
    """What `PerExampleGlobalNormClip` remembers."""

    num_clipped: Int[Array, ""]
    """How many examples were clipped in the last step."""


class PerExampleGlobalNormClip(AbstractPerExampleTransform):
    """Scales the gradient of each example so that its norm is at most c, and sums them.

        u = Σᵢ gᵢ·min(1, c / ‖gᵢ‖)

    It takes gradients with an axis of examples in front, which `sl.train_step` makes, and so must
    be the first link, with no wrapper around it. The norm is that of all leaves together, summed
    in at least float32. `opt.metrics` holds `num_clipped`, how many examples were scaled down.
    A gradient that is not finite makes the sum not finite.

    **Arguments:**

    - `l2_norm_clip`: c, ≥ 0.
    - `single_batch_element`: whether gradients are of one example and have no such axis, as in a
        loop that sees one example at a time.

    ??? cite "Abadi et al., [Deep Learning with Differential
        Privacy](https://arxiv.org/abs/1607.00133), 2016"
    """

    l2_norm_clip: Hyperparameter = hyperparameter(within="[0, inf]")
    single_batch_element: bool = eqx.field(default=False, static=True)

    keeps_zeros: ClassVar[bool] = True

    @property
    def per_example(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # A class attribute elsewhere; here it follows from a field.
        return not self.single_batch_element

    def init(self, params: Params) -> PerExampleClipState:
        tree.check_inexact(params)
        return PerExampleClipState(jnp.zeros((), jnp.int32))

    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        if self.single_batch_element:
            grads = jax.tree.map(lambda g: g[None], grads)
        return _clipped_sum(grads, self.at(context).l2_norm_clip)

    def finish(
        self, total: Updates, counts: PyTree, size: int, state: Any, context: Context | None
    ) -> tuple[Updates, PerExampleClipState]:
        del size, state, context
        return total, PerExampleClipState(counts)

    def metrics(self, state: PerExampleClipState) -> dict[str, Array]:
        return {"num_clipped": state.num_clipped}


class PerExampleLayerNormClipState(eqx.Module):
    """What `PerExampleLayerNormClip` remembers."""

    num_clipped: PyTree = per_param()
    """For each parameter leaf, how many examples were clipped there in the last step."""


class PerExampleLayerNormClip(AbstractPerExampleTransform):
    """Scales each leaf of the gradient of each example to its share of a norm c, and sums them.

        uₗ = Σᵢ gᵢₗ·min(1, cₗ / ‖gᵢₗ‖)

    with cₗ = c / √K for each of K leaves, or cₗ = c·√(Dₗ / D) where the leaf has Dₗ of D entries.
    It takes gradients with an axis of examples in front, which `sl.train_step` makes, and so must
    be the first link, with no wrapper around it. Norms are summed in at least float32.
    `opt.metrics` holds, under `num_clipped` and the path of each leaf, how many examples were
    scaled down there. A gradient that is not finite makes the sum of its leaf not finite.

    **Arguments:**

    - `global_l2_norm_clip`: c, ≥ 0.
    - `uniform`: whether all leaves have equal shares, instead of shares by their size.

    ??? cite "McMahan et al., [Learning Differentially Private Recurrent Language
        Models](https://arxiv.org/abs/1710.06963), 2017"
    """

    global_l2_norm_clip: Hyperparameter = hyperparameter(within="[0, inf]")
    uniform: bool = eqx.field(default=True, static=True)

    keeps_zeros: ClassVar[bool] = True

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
        made = [_clipped_sum(u, clip * s**0.5) for u, s in zip(leaves, shares, strict=True)]
        return structure.unflatten([u for u, _ in made]), structure.unflatten([n for _, n in made])

    def finish(
        self, total: Updates, counts: PyTree, size: int, state: Any, context: Context | None
    ) -> tuple[Updates, PerExampleLayerNormClipState]:
        del size, state, context
        return total, PerExampleLayerNormClipState(counts)

    def metrics(self, state: PerExampleLayerNormClipState) -> dict[str, Array]:
        named = zip(leaf_paths(state.num_clipped), jax.tree.leaves(state.num_clipped), strict=True)
        return {".".join(filter(None, ("num_clipped", path))): n for path, n in named}


class DifferentiallyPrivateAggregateState(eqx.Module):
    """What `DifferentiallyPrivateAggregate` remembers."""

    key: UInt32[Array, "*words"]
    """The words of the key that the next noise is drawn from."""
    num_clipped: Int[Array, ""]
    """How many examples were clipped in the last step."""


class DifferentiallyPrivateAggregate(AbstractPerExampleTransform):
    """The mean over examples of clipped gradients, with noise that hides each single one.

        u = (Σᵢ gᵢ·min(1, c / ‖gᵢ‖) + c·σ·ξ) / B

    with B examples and ξ normal. It takes gradients with an axis of examples in front, which
    `sl.train_step` makes, and so must be the first link, with no wrapper around it: what follows
    may be anything, `.every_k` included. Noise is drawn anew in each step, for each leaf from a
    key of its own, in at least float32; the key is kept in the state as its words. `opt.metrics`
    holds `num_clipped`, which is not private.

    Differs from Optax: real and imaginary part of a complex leaf have the whole variance each.
    With half of it each, as Optax draws them, the privacy is less than σ promises.

    **Arguments:**

    - `l2_norm_clip`: c, ≥ 0.
    - `noise_multiplier`: σ, ≥ 0.
    - `key`: an int in [0, 2³¹), or a PRNG key.

    ??? cite "Abadi et al., [Deep Learning with Differential
        Privacy](https://arxiv.org/abs/1607.00133), 2016"
    """

    l2_norm_clip: Hyperparameter = hyperparameter(within="[0, inf)")
    noise_multiplier: Hyperparameter = hyperparameter(within="[0, inf)")
    key: Any = key_field()
    implementation: Any = eqx.field(default=None, static=True)

    def __init__(self, l2_norm_clip: Hyperparameter, noise_multiplier: Hyperparameter, key: Any):
        self.l2_norm_clip = l2_norm_clip
        self.noise_multiplier = noise_multiplier
        self.key, self.implementation = as_words(key)

    def init(self, params: Params) -> DifferentiallyPrivateAggregateState:
        tree.check_inexact(params)
        return DifferentiallyPrivateAggregateState(fresh_words(self.key), jnp.zeros((), jnp.int32))

    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        return _clipped_sum(grads, self.at(context).l2_norm_clip)

    def finish(
        self, total: Updates, counts: PyTree, size: int, state: Any, context: Context | None
    ) -> tuple[Updates, DifferentiallyPrivateAggregateState]:
        now = self.at(context)
        leaves, structure = jax.tree.flatten(total)
        key = jax.random.wrap_key_data(state.key, impl=self.implementation)
        key, *own = jax.random.split(key, len(leaves) + 1)
        noise = [_normal(k, u) for k, u in zip(own, leaves, strict=True)]

        def rule(u: Any, xi: Any, deviation: Any, share: Any) -> Any:
            return (u + deviation * xi) * share

        wide = tree.accumulation_dtype(now.l2_norm_clip.dtype, now.noise_multiplier.dtype)
        deviation = now.l2_norm_clip.astype(wide) * now.noise_multiplier.astype(wide)
        share = jnp.asarray(1 / max(size, 1), wide)
        made = tree.map_leaves(rule, (total, structure.unflatten(noise)), (deviation, share))
        return made, DifferentiallyPrivateAggregateState(jax.random.key_data(key), counts)

    def metrics(self, state: DifferentiallyPrivateAggregateState) -> dict[str, Array]:
        return {"num_clipped": state.num_clipped}


def _clipped_sum(updates: PyTree, clip: Scalar) -> tuple[PyTree, Int[Array, ""]]:
    """The sum over examples of gradients scaled to a norm of at most `clip`; how many were."""
    leaves = jax.tree.leaves(updates)
    if not leaves:
        return updates, jnp.zeros((), jnp.int32)
    factors, clipped = _factors(jax.vmap(tree.global_norm)(updates), clip)

    def rule(u: Any) -> Any:
        # A contraction: the clipped gradients of all examples would be a buffer of their size.
        own = jnp.asarray(factors, tree.real_dtype(u.dtype))
        # Its type on a mesh with explicit axes is that of a plain sum.
        like = jax.eval_shape(lambda u: jnp.sum(u, 0), u)
        return jnp.tensordot(own.astype(u.dtype), u, axes=1, out_sharding=like.sharding)

    return tree.map_leaves(rule, (updates,)), jnp.sum(clipped, dtype=jnp.int32)


def _factors(norms: Real[Array, " examples"], clip: Scalar) -> tuple[Any, Any]:
    """For each example the factor of its gradient, and whether it is below 1."""
    clip = jnp.asarray(clip, norms.dtype)
    within = norms <= clip
    # Infinite norms may have overflowed from finite gradients: 0 would hide that.
    divisor = jnp.where(jnp.isinf(norms), jnp.nan, jnp.where(norms == 0, 1, norms))
    return jnp.where(within, 1, clip / divisor), ~within


def _normal(key: Any, like: Array) -> Array:
    """Noise of variance 1 in each real number."""
    if not jnp.iscomplexobj(like):
        return jax.random.normal(key, like.shape, like.dtype)
    return jax.random.normal(key, like.shape, like.dtype) * jnp.asarray(2**0.5, like.dtype)
