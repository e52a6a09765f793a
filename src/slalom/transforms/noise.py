"""Transforms that add randomness."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from .. import tree
from .._fields import Hyperparameter, hyperparameter
from .._module import CHECK, code
from .._transform import AbstractTransform, Context
from .._types import Params, Updates


class AddNoiseState(eqx.Module):
    """What `AddNoise` remembers."""

    key: UInt32[Array, "*words"]
    """The words of the key that the next noise is drawn from."""


def _is_typed(key: Any) -> bool:
    return tree.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _check_key(name: str, key: Any) -> None:
    if isinstance(key, int) and not isinstance(key, bool):
        if not 0 <= key < 2**31:
            raise ValueError(
                f"{name} must be in [0, 2**31), got {key}. Pass `jax.random.key({key})` instead."
            )
    elif not tree.is_array(key) or not _is_one_key(key):
        raise TypeError(f"{name} must be an int or one PRNG key, got {key!r}.")


def _is_one_key(key: Any) -> bool:
    if key.shape == ():  # an int, once it is bound
        return jnp.issubdtype(key.dtype, jnp.integer)
    return key.ndim == 1 and key.dtype == np.uint32


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
    # Words, not a typed key: every leaf of an optimizer is saved, sharded and compared as numbers.
    key: Any = eqx.field(default=0, metadata={CHECK: _check_key})
    implementation: Any = eqx.field(default=None, static=True)

    needs: ClassVar[tuple[str, ...]] = ("step",)

    def __init__(self, eta: Hyperparameter, gamma: Hyperparameter, key: Any = 0):
        self.eta = eta
        self.gamma = gamma
        self.implementation = None
        self.key = int(key) if isinstance(key, np.integer) else key
        if _is_typed(key):
            self.key = jax.random.key_data(key)
            self.implementation = jax.random.key_impl(key)

    def init(self, params: Params) -> AddNoiseState:
        tree.check_inexact(params)
        if jnp.shape(self.key) == ():
            return AddNoiseState(jax.random.key_data(jax.random.key(self.key)))
        # Copied: the state's buffers may be donated, the rule's not.
        return AddNoiseState(jnp.array(self.key, jnp.uint32))

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

    def __repr__(self) -> str:
        key = "" if code(self.key) == "0" else f", key={code(self.key)}"
        return f"sl.AddNoise(eta={code(self.eta)}, gamma={code(self.gamma)}{key})"
