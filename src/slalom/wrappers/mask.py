"""A transform on some leaves: the others pass through (`Masked`) or get no update (`Only`)."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Bool

from .. import tree
from .._core.transform import AbstractTransform, Context, Part, segments
from .._types import Params, Updates
from ..where.resolve import Where, as_where, mask, selected_from


class _AbstractCut(AbstractTransform):
    """What `Masked` and `Only` share: the inner transform sees the selected leaves only."""

    inner: AbstractTransform
    where: Where = eqx.field(static=True, converter=as_where)

    def init(self, params: Params) -> Any:
        return self.inner.init(tree.cut(params, mask(self.where, params)))

    def inside(
        self, state: Any = None, context: Context | None = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        if params is not None:
            keep = mask(self.where, params)
            context = None if context is None else context.cut(keep, params)
            params = tree.cut(params, keep)
        path = segments(self.inner)
        return (Part(path, self.inner, state, context, params, lambda outer: outer.inner),)

    def selectors(self) -> tuple[Where, ...]:
        return (self.where,)

    def _run(
        self,
        verb: str,
        updates: Updates,
        state: Any,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, tuple[bool, ...], Any]:
        """The inner `update` or `step` on the selected leaves."""
        keep = mask(self.where, selected_from(self.where, updates, params))
        (part,) = self.inside(state, context, params)
        with part.scope():
            result, state = getattr(self.inner, verb)(
                tree.cut(updates, keep), state, part.params, part.context
            )
        return result, keep, state


class Masked(_AbstractCut):
    """The inner transform on the selected leaves; the others pass through unchanged.

    Made with `tx.mask(where)`. For links of a chain: as a whole optimizer it would add raw
    gradients to the leaves that pass through, which binding refuses.

    **Arguments:**

    - `inner`: the transform.
    - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.
    """

    fluent_method: ClassVar[str | None] = "mask"

    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        inside, keep, state = self._run("update", updates, state, params, context)
        outside = tree.cut(updates, tuple(not k for k in keep))
        return tree.merge(jax.tree.structure(updates), keep, inside, outside), state

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return _signs(self, params, outside=1)


class Only(_AbstractCut):
    """The inner transform on the selected leaves; the others get no update at all.

    Made with `tx.only(where)`.

    **Arguments:**

    - `inner`: the transform.
    - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.
    """

    fluent_method: ClassVar[str | None] = "only"

    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        inside, keep, state = self._run("update", updates, state, params, context)
        outside = tree.zeros_like(tree.cut(updates, tuple(not k for k in keep)))
        return tree.merge(jax.tree.structure(updates), keep, inside, outside), state

    def step(
        self, grads: Updates, state: Any, params: Params, context: Context | None = None
    ) -> tuple[Params, Any]:
        inside, keep, state = self._run("step", grads, state, params, context)
        outside = tree.cut(params, tuple(not k for k in keep))
        return tree.merge(jax.tree.structure(params), keep, inside, outside), state

    def has_updated(self, state: Any) -> Bool[Array, "*runs"] | bool:
        return self.inner.has_updated(state)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return _signs(self, params, outside=0)


def _signs(outer: _AbstractCut, params: Params, outside: int) -> tuple[int | None, ...]:
    keep = mask(outer.where, params)
    inner = iter(outer.inner.signs(tree.cut(params, keep)))
    return tuple(next(inner) if k else outside for k in keep)
