"""Transforms from plain functions."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx

from ... import tree
from ..._core.protocol.bases import AbstractStatelessTransform
from ..._core.protocol.context import Context
from ..._core.text.calls import call
from ...tree.types import Params, Updates


class Stateless(AbstractStatelessTransform):
    """Applies a function to the tree of updates: u ↦ f(u, p).

    The function is static: a different function, even a lambda with the same code, recompiles.

    **Arguments:**

    - `fn`: a function `fn(updates, params)` that returns a tree with the structure and shapes of
        the updates. `params` is `None` if none were passed.

    ```python
    >>> tx = sl.Stateless(lambda updates, params: jax.tree.map(jnp.sign, updates))
    >>> tx.update({"w": jnp.array([2.0, -3.0])}, tx.init({"w": jnp.ones(2)}))[0]
    {'w': Array([ 1., -1.], dtype=float32)}

    ```
    """

    over: ClassVar[str] = "tree"
    update_sign: ClassVar[int | None] = None

    fn: Callable[[Any, Any], Any] = eqx.field(static=True)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        return tree.widened(call("Stateless.fn", self.fn, updates=updates, params=params))


class StatelessPerLeaf(AbstractStatelessTransform):
    """Applies a function at each leaf of the updates: u ↦ f(u, p).

    Updates and parameters arrive in the accumulation dtype, at least float32. The function is
    static, as in `Stateless`.

    **Arguments:**

    - `fn`: a function `fn(update, param)` of arrays of one shape that returns an array of that
        shape. `param` is `None` if no parameters were passed.

    ```python
    >>> tx = sl.StatelessPerLeaf(lambda u, p: u / (1 + jnp.abs(p)))
    >>> params = {"w": jnp.ones(2)}
    >>> tx.update({"w": jnp.array([2.0, -3.0])}, tx.init(params), params)[0]
    {'w': Array([ 1. , -1.5], dtype=float32)}

    ```
    """

    over: ClassVar[str] = "tree"
    update_sign: ClassVar[int | None] = None

    fn: Callable[[Any, Any], Any] = eqx.field(static=True)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:

        def rule(_, u, p=None):
            return call("StatelessPerLeaf.fn", self.fn, update=u, param=p)

        trees = (updates,) if params is None else (updates, params)
        return tree.map_leaves(rule, trees)
