"""Transforms that add randomness."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from .. import tree
from .._core.fields import Hyperparameter, hyperparameter
from .._core.transform import AbstractTransform, Context
from .._types import Params, Updates
from ._keys import as_words, fresh_words, key_field


class AddNoiseState(eqx.Module):
    """What `AddNoise` remembers."""

    key: UInt32[Array, "*words"]
    """The words of the key that the next noise is drawn from."""


class AddNoise(AbstractTransform):
    """Adds Gaussian noise that fades: u ↦ u + σₙ·ξ with ξ normal and σₙ² = η / (n + 1)^γ.

    n is the step on the clock, from 0. Noise is drawn anew in each step, for each leaf from a key
    of its own, in at least float32; for a complex leaf real and imaginary part have half the
    variance each. Equal keys give equal noise. The key is kept in the state as its words, so it
    is saved and resumed as any array.

    **Arguments:**

    - `eta`: η, the variance in the first step, ≥ 0.
    - `gamma`: γ, how fast the variance fades, ≥ 0; 0.55 in the paper.
    - `key`: an int in [0, 2³¹), or a PRNG key.

    ??? cite "Neelakantan et al., [Adding Gradient Noise Improves Learning for Very Deep
        Networks](https://arxiv.org/abs/1511.06807), 2015"
    """

    eta: Hyperparameter = hyperparameter(within="[0, inf)")
    gamma: Hyperparameter = hyperparameter(within="[0, inf)")
    key: Any = key_field(default=0)
    implementation: Any = eqx.field(default=None, static=True)

    needs: ClassVar[tuple[str, ...]] = ("step",)

    def __init__(self, eta: Hyperparameter, gamma: Hyperparameter, key: Any = 0):
        self.eta = eta
        self.gamma = gamma
        self.key, self.implementation = as_words(key)

    def init(self, params: Params) -> AddNoiseState:
        tree.check_inexact(params)
        return AddNoiseState(fresh_words(self.key))

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
        deviation = jnp.sqrt(jnp.asarray(now.eta, number.dtype) * number**-now.gamma)

        key = jax.random.wrap_key_data(state.key, impl=self.implementation)
        key, drawn = jax.random.split(key)
        leaves, structure = jax.tree.flatten(updates)
        # On a CPU, JAX draws in a loop over whole arrays: bits and numbers are written to memory,
        # twice the size of the parameters.
        noise = [
            jax.random.normal(own, u.shape, tree.accumulation_dtype(u.dtype))
            for own, u in zip(jax.random.split(drawn, len(leaves)), leaves, strict=True)
        ]
        updates = tree.map_leaves(
            lambda u, xi, deviation: u + deviation * xi,
            (updates, structure.unflatten(noise)),
            (deviation,),
        )
        return updates, AddNoiseState(jax.random.key_data(key))
