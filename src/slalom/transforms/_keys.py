"""A PRNG key as a field of a rule, and as words in its state.

Words, not a typed key: every leaf of an optimizer is saved, sharded and compared as numbers.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .. import tree
from .._core.declared import CHECK


def key_field(**options: Any) -> Any:
    """Declares a field for an int or the words of a key."""
    return eqx.field(metadata={CHECK: _check_key}, **options)


def as_words(key: Any) -> tuple[Any, Any]:
    """What such a field keeps of a key, and the key's implementation where it has one."""
    if tree.is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key), jax.random.key_impl(key)
    return (int(key) if isinstance(key, np.integer) else key), None


def fresh_words(key: Any) -> Array:
    """The words for a state, from what the field keeps."""
    if jnp.shape(key) == ():
        return jax.random.key_data(jax.random.key(key))
    # Copied: the state's buffers may be donated, the rule's not.
    return jnp.array(key, jnp.uint32)


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
