"""Transforms that stop updates, or part of them."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .. import tree
from .._core.marks import per_leaf
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import AbstractTransform, Context
from .._paths import leaf_paths
from .._types import Params, Updates
from ..where.resolve import WhereLike


class SetToZero(AbstractStatelessTransform):
    """Replaces updates by zeros, whatever they are: also NaN and infinity.

    `SetToZero().mask(where)` freezes the selected parameters.
    """

    keeps_zeros: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        del params, context
        return tree.zeros_like(updates)

    def has_updated(self, state: Any) -> bool:
        del state
        return False

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (0,) * len(jax.tree.leaves(params))


def freeze(where: WhereLike) -> AbstractTransform:
    """Stops the updates of the selected parameters; the others pass through unchanged.

    **Arguments:**

    - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.

    **Returns:** `SetToZero().mask(where)`, a link for a chain; also NaN and infinity are stopped.

    ```python
    >>> sl.sgd(0.1) | sl.freeze(sl.where.ndim(1))
    sl.ScaleByLearningRate(0.1) | sl.SetToZero().mask(sl.where.ndim(1))

    ```
    """
    return SetToZero().mask(where)


class KeepParamsNonnegative(AbstractTransform):
    """Stops at zero what would go below: u ↦ u, or −p where p + u < 0.

    A last link: what a link behind it does to the updates it does not see. Parameters that start
    negative are set to zero by the first update.
    """

    needs: ClassVar[tuple[str, ...]] = ("params",)
    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        for path, p in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
            if jnp.iscomplexobj(p):
                raise TypeError(
                    f"KeepParamsNonnegative has no meaning for complex numbers, and '{path}' is "
                    f"an array of dtype {p.dtype}. Use `.mask(where)` to leave it out."
                )
        return tree.no_state(params)

    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, None]:
        del state, context
        params = self.demand("params", params)

        def rule(u: Any, p: Any) -> Any:
            return jnp.where(p + u < 0, -p, u)

        return tree.map_leaves(rule, (updates, params)), None


class ZeroNansState(eqx.Module):
    """What `ZeroNans` remembers."""

    found_nan: Int[Array, " leaves"] = per_leaf()
    """In how many updates each leaf held a NaN."""


class ZeroNans(AbstractTransform):
    """Replaces NaN by zero, and counts for each leaf the updates that held one.

    Infinities pass through. Differs from Optax: `found_nan` counts, where Optax remembers only
    whether the last update held a NaN.
    """

    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ZeroNansState:
        tree.check_inexact(params)
        return ZeroNansState(jnp.zeros(len(jax.tree.leaves(params)), jnp.int32))

    def update(
        self,
        updates: Updates,
        state: ZeroNansState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ZeroNansState]:
        del params, context
        found = [jnp.any(jnp.isnan(u)) for u in jax.tree.leaves(updates)]
        count = state.found_nan
        if found:
            count = jnp.where(jnp.stack(found), tree.increment(count), count)
        made = tree.map_leaves(lambda u: jnp.where(jnp.isnan(u), 0, u), (updates,))
        return made, ZeroNansState(count)
