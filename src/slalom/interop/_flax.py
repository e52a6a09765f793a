"""Registers Slalom with Flax, if Flax is loaded. It is never imported here."""

import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .. import tree
from .._core.state.marks import map_params
from ..tree.dtypes import is_key
from ..tree.types import PyTree

Tree = TypeVar("Tree")


# --- the variables of nnx -------------------------------------------------------------------


def pure(x: Tree) -> Tree:
    """The tree with arrays in place of nnx variables.

    `nnx.Optimizer` passes variables to `init` and arrays to `update`. A path such as
    `layers.0.kernel` must select the same parameters in both.
    """
    nnx = sys.modules.get("flax.nnx")
    return x if nnx is None else nnx.as_pure(x)


def with_variables(state: Any, params: PyTree) -> Any:
    """The state with a variable where the parameter is one, so that it has its sharding."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return state

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    if not any(map(is_variable, jax.tree.leaves(params, is_leaf=is_variable))):
        return state
    return map_params(lambda x, p: p.replace(x) if is_variable(p) else x, state, params)


# --- flax.serialization ---------------------------------------------------------------------


def register(state: type, to_names: Any, from_names: Any) -> None:
    """Makes a state one that `flax.serialization` can save, if it is loaded.

    **Arguments:**

    - `state`: the class.
    - `to_names`: a function from a state to a dict from names to arrays.
    - `from_names`: a function from a state and such a dict to a state.
    """
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or serialization.is_serializable(state):
        return

    def to_dict(value: Any) -> dict[str, Any]:
        # Flax writes no typed PRNG keys, but their numbers.
        return {n: jax.random.key_data(x) if is_key(x) else x for n, x in to_names(value).items()}

    def from_dict(target: Any, saved: dict[str, Any]) -> Any:
        wanted = to_names(target)
        missing = sorted(wanted.keys() - saved.keys())
        unknown = sorted(saved.keys() - wanted.keys())
        if missing or unknown:
            raise ValueError(
                "The saved state belongs to another transform or other parameters "
                f"(missing: {missing[:3]}, unknown: {unknown[:3]}). Restore it into the state of "
                "the transform that it was saved from: `tx.init(params)`."
            )
        return from_names(target, {name: _like(x, saved[name]) for name, x in wanted.items()})

    serialization.register_serialization_state(state, to_dict, from_dict)


def _like(target: Any, saved: Any) -> Any:
    if is_key(target):
        return jax.random.wrap_key_data(jnp.asarray(saved), impl=jax.random.key_impl(target))
    return jnp.asarray(saved) if tree.is_array(saved) else saved
