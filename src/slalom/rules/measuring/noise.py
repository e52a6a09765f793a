"""Gradient noise."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from ... import fields, tree
from ..._core.fields.keys import AbstractKeyed, key_field
from ..._core.protocol.chain import chain
from ..._core.protocol.context import Context
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.messages import advise_keywords
from ...tree.types import Hyperparameter, Params, PyTree, Updates
from ..shaping.scale import ScaleByLearningRate


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

    def update(
        self,
        updates: Updates,
        state: AddNoiseState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, AddNoiseState]:
        del params
        step = self.demand("step", None if context is None else context.step)
        now = self.at(context)
        number = jnp.asarray(step, now.gamma.dtype) + 1
        now.sigma = tree.root(jnp.asarray(now.eta, number.dtype) * number**-now.gamma)

        key = self._typed_key(state.key)
        key, drawn = jax.random.split(key)

        def rule(now, u, xi):
            return u + now.sigma * xi

        updates = tree.map_leaves(rule, (updates, normal_like(updates, drawn)), now)
        return updates, AddNoiseState(jax.random.key_data(key))


def normal_like(like: PyTree, key: Array) -> PyTree:
    """Normal numbers for each entry of each leaf, in at least float32."""
    leaves, structure = jax.tree.flatten(like)
    # On CPUs JAX draws random numbers in a loop over whole arrays, so the bits and the numbers
    # take twice the memory of the parameters.
    normal = [
        jax.random.normal(own, x.shape, tree.accumulation_dtype(x.dtype))
        for own, x in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    return structure.unflatten(normal)


@advise_keywords
def noisy_sgd(
    learning_rate: Hyperparameter,
    eta: Hyperparameter = 0.01,
    gamma: Hyperparameter = 0.55,
    key: Any = 0,
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
    return chain(AddNoise(eta, gamma, key), ScaleByLearningRate(learning_rate))
