"""The leaves to save, with their names, and their way to the host and back."""

import collections
import datetime
import enum
import random
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import tree
from .._core.engine.encoded import is_encoded
from .._loop.binding import names
from .._loop.binding.names import free_name
from .._loop.binding.optimizer import Optimizer
from ..tree.paths import dotted
from ..tree.types import PyTree, Tracer
from ._file import Unread

NUMBERS = (bool, int, float, complex, str)
"""The Python types that are saved. A subclass, such as an enum, is not."""


def nodes(root: str, given: PyTree) -> list[tuple[str, Any]]:
    """The optimizers in a tree and all leaves outside them, by path, in order."""
    found = jax.tree_util.tree_leaves_with_path(given, is_leaf=lambda x: isinstance(x, Optimizer))
    return [(".".join(filter(None, (root, dotted(path)))), node) for path, node in found]


def named_leaves(root: str, given: PyTree) -> list[tuple[str, Any]]:
    """Every leaf of a tree with a name of its own, in order."""
    named: dict[str, Any] = {}
    for path, leaf in names.named_leaves(given):
        named[free_name(".".join(filter(None, (root, path))), named)] = leaf
    return [*named.items()]


def saved_leaves(root: str, given: PyTree) -> dict[str, Any]:
    """The leaves of a tree that are saved: arrays, and numbers and strings outside the model.

    Functions are part of the program, as is whatever else a model holds. Raises an error for
    anything else, which would be lost.
    """
    found = {}
    for name, leaf in named_leaves(root, given):
        in_model = root == "model"
        if tree.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            found[name] = leaf
        elif type(leaf) in NUMBERS:
            if not in_model:
                found[name] = leaf
        elif _has_values(leaf) or not (
            in_model or callable(leaf) or type(leaf) in (object, _DTYPE)
        ):
            raise TypeError(_not_savable(name, leaf))
    return found


_DTYPE = type(np.dtype("float32"))
_INSTEAD = (
    (enum.Enum, "its name or value, `{}.name`"),
    ((bytes, bytearray, memoryview), "an array, `np.frombuffer({}, np.uint8)`"),
    ((datetime.date, datetime.time), "text, `{}.isoformat()`"),
    (datetime.timedelta, "a number, `{}.total_seconds()`"),
    (np.random.Generator, "its state, `{}.bit_generator.state`"),
    ((np.random.RandomState, np.random.BitGenerator), "its state, `{}.get_state()` or `{}.state`"),
    (random.Random, "its state, `{}.getstate()`"),
    ((collections.Counter, Mapping), "a dict, `dict({})`"),
    ((Set, collections.deque, Sequence), "a list, `list({})`"),
    (NUMBERS, "a plain Python number or string"),
)
"""Remedies by type. The first type that fits counts."""


def _not_savable(name: str, leaf: Any) -> str:
    """The message for a leaf that no checkpoint can hold."""
    last, owner = name.rpartition(".")[2], type(leaf)
    known = (text for types, text in _INSTEAD if isinstance(leaf, types))
    instead = next(known, "arrays, numbers and strings, or leave it out")
    if hasattr(leaf, "state_dict"):
        instead = "its state, `{}.state_dict()`"
    elif _has_values(leaf):
        instead = "an array, `np.asarray({})`"
    instead = instead.replace("{}", last if last.isidentifier() else "x")
    module = "" if owner.__module__ == "builtins" else f"{owner.__module__}."
    return (
        f"'{name}' is a `{module}{owner.__qualname__}`, which a checkpoint cannot hold. Save and "
        f"load {instead}."
    )


def _has_values(x: Any) -> bool:
    """Whether this is an array, or a module with arrays, of another library."""
    return not isinstance(x, type) and (hasattr(x, "__array__") or hasattr(x, "state_dict"))


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys, or stands for one."""
    return not isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of an array, read or not, or of a stand-in for one; `None` for anything else."""
    return tuple(x.shape) if hasattr(x, "shape") else None


def kind(x: Any) -> str:
    """The type of a leaf: the dtype of an array, which names the implementation of keys, or the
    codec of an encoded one."""
    if isinstance(x, Unread):
        return x.kind
    if is_encoded(x):
        return x.codec if isinstance(x.codec, str) else repr(x.codec)
    if shape_of(x) is None:
        return f"a Python {type(x).__name__}"
    if not is_key(x):
        return x.dtype.name
    if isinstance(x, jax.ShapeDtypeStruct):
        # `jax.random.key_impl` takes no abstract keys.
        return f"key<{x.dtype._impl.name}>"  # pyright: ignore[reportAttributeAccessIssue]  # JAX names it nowhere else
    return f"key<{jax.random.key_impl(x)}>"


def difference(theirs: Any, own: Any) -> tuple[str, tuple[str, str]] | None:
    """The field of a report that a difference between two leaves belongs to, and both in words.

    `None` if one can take the place of the other.
    """
    shapes, kinds = (shape_of(theirs), shape_of(own)), (kind(theirs), kind(own))
    if None not in shapes and shapes[0] != shapes[1]:
        return "reshaped", (str(shapes[0]), str(shapes[1]))
    return None if kinds[0] == kinds[1] else ("retyped", kinds)


# --- to the host ----------------------------------------------------------------------------


def check_savable(leaves: Mapping[str, Any]) -> None:
    """Raises an error for arrays whose values this process cannot read."""
    for name, x in leaves.items():
        if isinstance(x, Tracer):
            raise TypeError(
                f"'{name}' is being traced: a checkpoint cannot be saved inside a function that "
                "JAX transforms. Save what the compiled function returns."
            )
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"'{name}' is abstract: it has a shape, but no values to save.")
        if not isinstance(x, jax.Array):
            continue
        if x.is_deleted():
            raise ValueError(
                f"'{name}' was donated to a training step, so it can no longer be saved. Save the "
                "model and the optimizer that the step returned."
            )
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(
                f"'{name}' is spread over several processes, and this process has only a part of "
                "it. Save `sl.checkpoint.to_dict(model=model, opt=opt)` with Orbax."
            )


def to_host(leaves: Mapping[str, Any], copy: bool) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """NumPy arrays, and the dtypes of arrays that stand for another one.

    **Arguments:**

    - `leaves`: arrays by name.
    - `copy`: whether the result must stay valid when the arrays are donated or changed.
    """
    kinds = {name: kind(x) for name, x in leaves.items() if is_key(x)}
    arrays = {name: words(x) for name, x in leaves.items()}
    for x in arrays.values():
        if isinstance(x, jax.Array):
            x.copy_to_host_async()
    # On the CPU, `np.asarray` shows the memory of the array itself.
    return {name: np.array(x, copy=copy or None) for name, x in arrays.items()}, kinds


def words(x: Any) -> Any:
    """An array, or the words of keys."""
    return jax.random.key_data(x) if shape_of(x) is not None and is_key(x) else x


# --- and back -------------------------------------------------------------------------------


def placed(value: Any, like: Any) -> Any:
    """An array as the type of array that it replaces, on the devices where that is."""
    is_fresh = isinstance(value, Unread)
    if isinstance(value, Unread):
        key = re.fullmatch("key<(.*)>", value.kind)
        value = value.read()
        if key:
            value = jax.random.wrap_key_data(jnp.asarray(value), impl=key[1])
    if isinstance(like, np.generic):
        return np.asarray(value)[()]
    if isinstance(like, np.ndarray):
        return value if is_fresh else np.array(value)
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return value
    if getattr(like, "weak_type", False) and value.shape == ():
        value = value.item()  # a Python number becomes an array with a weak type
    # On the CPU, JAX takes what was just read as it is, without a copy.
    return jax.device_put(value, like.sharding if _has_devices(like) else None, may_alias=is_fresh)


def _has_devices(like: Any) -> bool:
    """Whether an array was put on its devices, or stands for an array that was."""
    if isinstance(like, jax.Array):
        return like.committed
    mesh = getattr(like.sharding, "mesh", None)
    return like.sharding is not None and not isinstance(mesh, jax.sharding.AbstractMesh)
