"""Arrays that live in the memory of the host, and visit the device for a step."""

from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

T = TypeVar("T")

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(x: Any) -> bool:
    """Whether an array, traced or not, is in the pinned memory of the host."""
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == _HOST


def to_device(tree: PyTree) -> PyTree:
    """The tree with copies on the device of all arrays that are in the memory of the host."""
    return jax.tree.map(lambda x: jax.device_put(x, _DEVICE) if is_on_host(x) else x, tree)


def to_host(x: T) -> T:
    """An array in the pinned memory of the host."""
    return jax.device_put(x, _HOST)


def to_memory_of(before: PyTree, after: PyTree) -> PyTree:
    """New values in the memories of the old ones."""
    return jax.tree.map(lambda x, y: to_host(y) if is_on_host(x) else y, before, after)
