"""Transforms that take a gradient for each example and give one for all."""

import abc
from typing import Any, ClassVar

import jax
from jaxtyping import PyTree

from .._types import Gradients, Params, Updates
from .chain import Chain
from .context import Context
from .transform import AbstractTransform


class AbstractPerExampleTransform(AbstractTransform):
    """A first link whose gradients have one more leading axis, of examples.

    A subclass writes `init`, `gather` and `finish`. What it gathers from parts of a batch is added
    up, so that a training step can differentiate one part after another.
    """

    per_example: ClassVar[bool] = True

    @abc.abstractmethod
    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        """Sums over examples: one like the parameters, in at least float32, and any others.

        **Arguments:**

        - `grads`: gradients with an axis of examples in front.
        - `context`: what else this step knows.

        **Returns:** a tree like the parameters, and a tree of counts.
        """

    @abc.abstractmethod
    def finish(
        self, total: Updates, counts: PyTree, size: int, state: Any, context: Context | None
    ) -> tuple[Updates, Any]:
        """Updates and the new state, from what was gathered.

        **Arguments:**

        - `total`, `counts`: what `gather` returned, added up over the parts of a batch.
        - `size`: how many examples there were.
        - `state`, `context`: as for `update`.

        **Returns:** as `update` does.
        """

    def update(
        self,
        updates: Gradients,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        del params
        leaves = jax.tree.leaves(updates)
        size = leaves[0].shape[0] if leaves and self.per_example else 1
        total, counts = self.gather(updates, context)
        return self.finish(total, counts, size, state, context)


class Gathered(AbstractTransform):
    """A per-example transform in the step for which its sums are already gathered.

    It takes their gradient-shaped part for updates.

    **Arguments:**

    - `inner`: the transform.
    - `counts`, `size`: as `finish` takes them.
    """

    inner: AbstractPerExampleTransform
    counts: PyTree
    size: int

    def init(self, params: Params) -> Any:
        return self.inner.init(params)

    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        del params
        return self.inner.finish(updates, self.counts, self.size, state, context)


def with_first_link(transform: AbstractTransform, first: AbstractTransform) -> AbstractTransform:
    """The transform with another one in the place of what gradients reach first."""
    if not isinstance(transform, Chain):
        return first
    before, *rest = transform.links
    return Chain((with_first_link(before, first), *rest), transform.names)
