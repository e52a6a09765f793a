"""Transforms that stop updates."""

from typing import Any, ClassVar

import jax

from .. import tree
from .._transform import AbstractTransform, Context
from .._types import Params, Updates


class SetToZero(AbstractTransform):
    """Replaces updates by zeros, whatever they are: also NaN and infinity.

    `SetToZero().mask(where)` freezes the selected parameters.
    """

    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> None:
        return tree.no_state(params)

    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, None]:
        del state, params, context
        return tree.zeros_like(updates), None

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return (0,) * len(jax.tree.leaves(params))
