"""Transforms that zero or restrict updates."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .. import tree
from .._core.context import Context
from .._core.marks import per_leaf
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import AbstractTransform
from .._paths import leaf_paths
from .._types import Params, Updates
from ..where.resolve import WhereLike


class SetToZero(AbstractStatelessTransform):
    """Replaces updates, including NaN and infinity, by zeros.

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
    """Replaces the updates of the selected parameters, including NaN and infinity, by zeros.

    **Arguments:**

    - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.

    **Returns:** `SetToZero().mask(where)`, a link for a chain.

    ```python
    >>> sl.sgd(0.1) | sl.freeze(sl.where.ndim(1))
    sl.ScaleByLearningRate(0.1) | sl.SetToZero().mask(sl.where.ndim(1))

    ```
    """
    return SetToZero().mask(where)


class KeepParamsNonnegative(AbstractTransform[None]):
    """Stops parameters at zero that would become negative: u ↦ u, or −p where p + u < 0.

    Use it as the last link, since it does not see what later links do to the updates. Parameters
    that start negative become zero in the first update.
    """

    needs: ClassVar[tuple[str, ...]] = ("params",)
    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        for path, p in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
            if jnp.iscomplexobj(p):
                raise TypeError(
                    f"KeepParamsNonnegative cannot be used with complex numbers, but '{path}' is "
                    f"an array of dtype {p.dtype}. Use `.mask(where)` to exclude it."
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

        def rule(_, u, p):
            return jnp.where(p + u < 0, -p, u)

        return tree.map_leaves(rule, (updates, params)), None


class ZeroNansState(eqx.Module):
    """The state of `ZeroNans`."""

    found_nan: Int[Array, " leaves"] = per_leaf()
    """The number of updates of each leaf that contained a NaN."""


class ZeroNans(AbstractTransform[ZeroNansState]):
    """Replaces NaN by zero, and counts for each leaf the updates that contained one.

    Infinities pass through. Differs from Optax: `found_nan` is a count, where Optax stores only
    whether the last update contained a NaN.
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
        updates = tree.map_leaves(lambda _, u: jnp.where(jnp.isnan(u), 0, u), (updates,))
        return updates, ZeroNansState(count)
