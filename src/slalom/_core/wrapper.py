"""Transforms around one other transform."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Bool

from .._types import Params
from .transform import AbstractTransform, Context, Part, segments


class AbstractWrapper(AbstractTransform):
    """A transform around `inner`, which keeps that one's state as `state.inner`.

    A state that has a `count` is the inner transform's clock; without one it keeps the time of
    the outer.
    """

    inner: eqx.AbstractVar[AbstractTransform]

    def inside(
        self, state: Any = None, context: Context | None = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        if context is not None and hasattr(state, "count"):
            context = context.at(state.count)
        inner_state = None if state is None else state.inner
        path = segments(self.inner)
        return (Part(path, self.inner, inner_state, context, params, lambda outer: outer.inner),)

    def has_updated(self, state: Any) -> Bool[Array, "*runs"] | bool:
        return self.inner.has_updated(state.inner)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return self.inner.signs(params)

    def run(
        self, verb: str, updates: Any, state: Any, params: Params | None, context: Context | None
    ) -> tuple[Any, Any]:
        """The inner `update` or `step`, under its name."""
        (part,) = self.inside(state, context, params)
        with part.scope():
            return getattr(part.transform, verb)(updates, part.state, params, part.context)
