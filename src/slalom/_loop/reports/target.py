"""Target networks: copies of a model that follow it slowly, or every few steps."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import tree
from ..._core.fields.declare import check_number
from ...tree.paths import dotted, first_difference
from ...tree.types import Step, Tracer, is_state_index

_Target = TypeVar("_Target")


def incremental_update(new: _Target, old: _Target, step_size: Any) -> _Target:
    """Moves a target network a fraction of the way towards a model.

        old + step_size·(new − old)

    The result is exactly `old` for a step size of 0, exactly `new` for 1, and nothing drifts where
    both are equal. A half-precision target stops moving if the step size is small, since each
    result is rounded: keep it in float32.

    **Arguments:**

    - `new`: the model, any tree.
    - `old`: the target network, a tree of the same structure. Its floating and complex arrays may
        have other dtypes.
    - `step_size`: a number in [0, 1].

    **Returns:** the new target network. Floating and complex arrays are computed in at least
    float32 and returned in the dtype of `old`. Everything else, such as functions and integer
    arrays, is taken from `new`. The floating and complex arrays share no memory with `new` or
    `old`.

    ```python
    >>> model = {"w": jnp.array([1.0, 2.0]), "activation": jax.nn.relu}
    >>> target = {"w": jnp.array([0.0, 0.0]), "activation": jax.nn.relu}
    >>> sl.incremental_update(model, target, 0.25)["w"]
    Array([0.25, 0.5 ], dtype=float32)

    ```

    ??? cite "Lillicrap et al., [Continuous control with deep reinforcement
        learning](https://arxiv.org/abs/1509.02971), 2015"
    """
    size = check_number("The `step_size` of incremental_update", step_size, "[0, 1]")
    return _update("incremental_update", new, old, tree.is_inexact, _interpolate, size)


def periodic_update(new: _Target, old: _Target, steps: Step, update_period: Step) -> _Target:
    """Replaces a target network by the model every few steps.

    **Arguments:**

    - `new`: the model, any tree.
    - `old`: the target network, a tree of the same structure.
    - `steps`: the number of steps of the model, such as `opt.count`.
    - `update_period`: the number of steps between two updates, at least 1.

    **Returns:** a copy of `new` if `steps` is 0 or another multiple of `update_period`, and of
    `old` otherwise. Arrays have the dtypes of `old` and share no memory with either. Everything
    else is taken from `new`.

    ```python
    >>> model, target = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    >>> sl.periodic_update(model, target, steps=30, update_period=10)["w"]
    Array([1., 1.], dtype=float32)

    ```

    ??? cite "Mnih et al., [Human-level control through deep reinforcement
        learning](https://doi.org/10.1038/nature14236), 2015"
    """
    for name, count in (("steps", steps), ("update_period", update_period)):
        if not isinstance(count, int | np.integer | jax.Array | np.ndarray):
            raise TypeError(f"The `{name}` of periodic_update must be an int, got {count!r}.")
    if not isinstance(update_period, Tracer) and update_period < 1:
        raise ValueError(
            f"The `update_period` of periodic_update must be at least 1, got {update_period}."
        )
    operands = (steps, update_period)
    return _update("periodic_update", new, old, tree.is_array, _choose, *operands)


def _update(
    name: str,
    new: _Target,
    old: _Target,
    acts_on: Callable[[Any], bool],
    rule: Callable[..., Array],
    *operands: Any,
) -> _Target:
    """Applies a rule to pairs of arrays. All other leaves come from `new`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(new, is_leaf=is_state_index)
    olds, other = jax.tree.flatten(old, is_leaf=is_state_index)
    if structure != other:
        differ = first_difference(new, old, ("the model", "the target"))
        raise ValueError(f"{name} takes two models of one structure: {differ}.")
    leaves = [leaf for _, leaf in paths]
    pairs = {i: (x, y) for i, (x, y) in enumerate(zip(leaves, olds, strict=True)) if acts_on(x)}
    for i, (x, y) in pairs.items():
        if not tree.is_array(y) or np.shape(x) != np.shape(y):
            got = f"shape {np.shape(y)}" if tree.is_array(y) else f"a {type(y).__name__}"
            raise ValueError(
                f"{name} takes two models with equal shapes, but '{dotted(paths[i][0])}' has shape "
                f"{np.shape(x)} in the model and {got} in the target."
            )
    for i, result in _at_pairs(rule, pairs, *operands).items():
        leaves[i] = result
    return structure.unflatten(leaves)


@functools.partial(jax.jit, static_argnums=0)
def _at_pairs(
    rule: Callable[..., Array], pairs: dict[int, tuple[Array, Array]], *operands: Any
) -> dict[int, Array]:
    """Compiled: dispatching the operations of each leaf takes far longer than computing them."""
    return {i: rule(new, old, *operands) for i, (new, old) in pairs.items()}


def _interpolate(new: Array, old: Array, step_size: Any) -> Array:
    dtype = tree.accumulation_dtype(new.dtype, old.dtype)
    size = tree.cast(tree.as_float(step_size), tree.real_dtype(dtype))
    a, b = tree.cast(old, dtype), tree.cast(new, dtype)
    # The ends are selected: 0·NaN is NaN, and old + (new − old) may differ from new.
    between = jnp.where(size == 0, a, a + size.astype(dtype) * (b - a))
    return tree.cast(jnp.where(size == 1, b, between), tree.canonical(old.dtype))


def _choose(new: Array, old: Array, steps: Any, update_period: Any) -> Array:
    due = jnp.asarray(steps, jnp.int32) % jnp.asarray(update_period, jnp.int32) == 0
    same = new.dtype == old.dtype  # PRNG keys cannot be cast
    return jnp.where(due, new if same else new.astype(old.dtype), old)
