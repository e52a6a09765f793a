"""Transforms that decide whether another one runs."""

import abc
from collections.abc import Callable
from typing import Any

from .. import tree
from .._types import Params, Updates
from .transform import Context
from .wrapper import AbstractWrapper


class AbstractPacedTransform(AbstractWrapper):
    """A wrapper that decides *whether* its inner transform runs.

    A subclass declares the field `inner`, and writes `init` and `pace`. Its state has the inner
    one's as `inner`, and as `count` how often that one ran: its clock. What is held back costs
    nothing: the inner transform stands in one branch of a `lax.cond`, and the other branch is the
    identity.
    """

    @abc.abstractmethod
    def pace(
        self,
        grads: Updates,
        state: Any,
        params: Params | None,
        context: Context | None,
        inner: Callable[..., tuple[Any, Any]],
        hold: Callable[[Any], Any],
    ) -> tuple[Any, Any]:
        """Runs `inner(grads, inner_state, params, context)`, or returns what holds still.

        **Arguments:**

        - `grads`, `state`, `params`, `context`: as for `update`.
        - `inner`: the inner transform's `update` or `step`.
        - `hold`: from the shapes of what `inner` would return to what stands still: zeros for
            `update`, the parameters themselves for `step`.

        **Returns:** updates or parameters, and the new state.
        """

    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        return self.pace(updates, state, params, context, self._inner("update"), tree.zeros_of)

    def step(
        self, grads: Updates, state: Any, params: Params, context: Context | None = None
    ) -> tuple[Params, Any]:
        return self.pace(grads, state, params, context, self._inner("step"), lambda _: params)

    def _inner(self, verb: str) -> Callable[..., tuple[Any, Any]]:
        """The inner transform's `update` or `step`, under its name."""
        (part,) = self.inside()

        def run(*arguments: Any) -> tuple[Any, Any]:
            with part.scope():
                return getattr(part.transform, verb)(*arguments)

        return run
