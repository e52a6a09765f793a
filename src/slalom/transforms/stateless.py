"""Transforms made of a plain function."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import tree
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import Context
from .._types import Params, Updates


class Stateless(AbstractStatelessTransform):
    """Applies a function to the updates as one tree: u ↦ f(u, p).

    The function is part of the program: another function compiles anew, also another lambda
    with the same code.

    **Arguments:**

    - `fn`: called as `fn(updates, params)`; `params` is `None` where none were passed. It
        returns a tree of the updates' structure and shapes.

    ```python
    >>> tx = sl.Stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
    >>> tx.update({"w": jnp.array([2.0, -3.0])}, tx.init({"w": jnp.ones(2)}))[0]
    {'w': Array([ 1., -1.], dtype=float32)}

    ```
    """

    fn: Callable[[Any, Any], Any] = eqx.field(static=True)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del context
        made = self.fn(updates, params)
        tree.check_same_structure((updates, made))

        def wide(x: Any) -> Any:
            return jnp.asarray(x, tree.accumulation_dtype(x.dtype))

        return jax.tree.map(wide, made)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (None,) * len(jax.tree.leaves(params))


class StatelessPerLeaf(AbstractStatelessTransform):
    """Applies a function at each leaf of the updates: u ↦ f(u, p).

    Update and parameter arrive in the accumulation dtype: at least float32. The function is part
    of the program, as in `Stateless`.

    **Arguments:**

    - `fn`: called as `fn(update, param)` with arrays of one shape; `param` is `None` where no
        parameters were passed. It returns an array of that shape.

    ```python
    >>> tx = sl.StatelessPerLeaf(lambda u, p: u / (1 + jnp.abs(p)))
    >>> params = {"w": jnp.ones(2)}
    >>> tx.update({"w": jnp.array([2.0, -3.0])}, tx.init(params), params)[0]
    {'w': Array([ 1. , -1.5], dtype=float32)}

    ```
    """

    fn: Callable[[Any, Any], Any] = eqx.field(static=True)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del context
        if params is None:
            made = tree.map_leaves(lambda u: self.fn(u, None), (updates,))
        else:
            made = tree.map_leaves(self.fn, (updates, params))
        tree.check_same_structure((updates, made))
        return made

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (None,) * len(jax.tree.leaves(params))
