"""Transforms for some of the leaves."""

from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Bool

from ... import tree
from ..._core.engine.run import Leafwise
from ..._core.protocol.parts import Part
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractComposite
from ..._core.protocol.writer import Writer
from ..._core.state.walk import segments, transforms
from ...tree.types import Gradients, Params
from ...where.masks import mask, selected_from
from ...where.resolve import Where, as_where


class _AbstractCut(AbstractComposite[Any]):
    """The base class of `Mask` and `Only`. The inner transform sees only the selected leaves."""

    over: ClassVar[str] = "tree"

    inner: AbstractTransform
    where: Where = eqx.field(static=True, converter=as_where)

    def init(self, params: Params) -> Any:
        return self.inner.init(tree.cut(params, mask(self.where, params)))

    def children(self, here: Part) -> tuple[Part, ...]:
        part = here.child(segments(self.inner), self.inner, lambda outer: outer.inner, here.state)
        if here.params is None:
            return (part,)
        return (part.cut(mask(self.where, here.params)),)

    def _run_inside(
        self, here: Part, write: Writer, updates: Gradients
    ) -> tuple[Any, tuple[bool, ...], Any]:
        """The result for the selected leaves, which leaves these are, and the new state."""
        keep = mask(self.where, selected_from(self.where, updates, here.params))
        (part,) = self.children(here)
        result, state = part.run(write.cut(keep), tree.cut(updates, keep))
        return result, keep, state


class Mask(_AbstractCut):
    """Applies the inner transform to the selected leaves; the others pass through unchanged.

    Made by `tx.mask`, which describes the arguments.

    Use it for links of a chain. As a whole optimizer it would add raw gradients to the other
    parameters, so `sl.Optimizer` raises an error."""

    @property
    def descends_partly(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        """Whether it has the learning rate of some leaves."""
        return any(part.module.sets_learning_rate for part in transforms(self.inner))

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        inside, keep, state = self._run_inside(here, write, updates)
        others = tuple(not k for k in keep)
        rest = None if here.params is None else tree.cut(here.params, others)
        outside = write.cut(others)(rest, tree.cut(updates, others))
        return tree.merge(jax.tree.structure(updates), keep, inside, outside), state

    def leafwise(self, here: Part, leaves: tuple[int, ...]) -> Leafwise | None:
        if here.params is None:
            return None
        keep = mask(self.where, here.params)
        (inner,) = here.children()
        kept = tuple(i for i, k in zip(leaves, keep, strict=True) if k)
        inner = inner._replace(path=here.path + inner.path)
        return inner.module.leafwise(inner, kept) if kept else None

    def has_updated(self, state: Any) -> Bool[Array, "*runs"] | bool:
        # Before a learning rate for all leaves, the others always change.
        return self.inner.has_updated(state) if self.descends_partly else True

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return _signs(self, params, outside=1)


class Only(_AbstractCut):
    """Applies the inner transform to the selected leaves; the others are not updated.

    Made by `tx.only`, which describes the arguments.

    """

    passes_gradients: ClassVar[bool] = True

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        inside, keep, state = self._run_inside(here, write, updates)
        others = tuple(not k for k in keep)
        rest = None if here.params is None else tree.cut(here.params, others)
        # Only for the shapes of the result.
        write = write.cut(others)
        shapes = jax.eval_shape(lambda: write(rest, tree.cut(updates, others)))
        outside = write.idle(rest, shapes)
        return tree.merge(jax.tree.structure(updates), keep, inside, outside), state

    def has_updated(self, state: Any) -> Bool[Array, "*runs"] | bool:
        return self.inner.has_updated(state)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return _signs(self, params, outside=0)


def _signs(outer: _AbstractCut, params: Params, outside: int) -> tuple[int | None, ...]:
    keep = mask(outer.where, params)
    inner = iter(outer.inner.signs(tree.cut(params, keep)))
    return tuple(next(inner) if k else outside for k in keep)
