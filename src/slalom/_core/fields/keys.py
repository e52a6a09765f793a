"""PRNG keys as fields of rules, and as raw data in their states.

A state stores raw data instead of a typed key, so that every leaf of an optimizer can be saved,
sharded and compared as numbers.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import tree
from ...tree.dtypes import is_key
from .declare import checked_field


def key_field(**options: Any) -> Any:
    """Declares a field for an int or the raw data of a key."""
    return checked_field(_check_key, static=False, **options)


class AbstractKeyed(eqx.Module):
    """A module with a field `key`: an int, or raw data and the implementation of the key."""

    implementation: Any = eqx.field(static=True, init=False)

    def __post_init__(self):
        key = vars(self)["key"]
        self.implementation = None
        if is_key(key):
            self.key = jax.random.key_data(key)
            self.implementation = jax.random.key_impl(key)
        elif tree.is_array(key) and key.ndim == 1:
            # Raw data, such as `dataclasses.replace` passes on, has no implementation but its
            # length.
            self.implementation = "rbg" if key.size == 4 else "threefry2x32"
        elif isinstance(key, np.integer):
            self.key = int(key)

    def _fresh_key_data(self) -> Array:
        """The raw data of the key for a state."""
        key = vars(self)["key"]
        if jnp.shape(key) == ():
            return jax.random.key_data(jax.random.key(key))
        # A copy, since the buffers of the state may be donated, unlike those of the rule.
        return jnp.array(key, jnp.uint32)

    def _typed_key(self, data: Array) -> Array:
        """The key with this raw data."""
        return jax.random.wrap_key_data(data, impl=self.implementation)


def _check_key(name: str, key: object) -> None:
    if isinstance(key, int) and not isinstance(key, bool):
        if not 0 <= key < 2**31:
            raise ValueError(
                f"{name} must be in [0, 2**31), got {key}. Pass `jax.random.key({key})` instead."
            )
    elif not tree.is_array(key) or not _is_one_key(key):
        raise TypeError(f"{name} must be an int or one PRNG key, got {key!r}.")


def _is_one_key(key: Any) -> bool:
    if key.shape == ():  # a bound int
        return jnp.issubdtype(key.dtype, jnp.integer)
    return key.ndim == 1 and key.dtype == np.uint32
