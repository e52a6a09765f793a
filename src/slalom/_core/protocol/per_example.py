"""Transforms that aggregate per-example gradients."""

import abc
from typing import Any, ClassVar

import jax

from ...tree.types import Gradients, Params, PyTree, Updates
from .context import Context
from .transform import AbstractTransform


class AbstractPerExampleTransform(AbstractTransform):
    """A first link whose gradients have a leading axis of examples.

    A subclass implements `init`, `gather` and `finish`. A training step may process the parts of a
    batch in sequence: it adds up the results of `gather` and calls `finish` once.
    """

    per_example: ClassVar[bool] = True

    @abc.abstractmethod
    def gather(self, grads: Gradients, context: Context | None) -> tuple[Updates, PyTree]:
        """Sums over examples.

        **Arguments:**

        - `grads`: gradients with a leading axis of examples.
        - `context`: the `sl.Context` of the step.

        **Returns:** a tree like the parameters, in at least float32, and any tree of other sums,
        such as counts.
        """

    @abc.abstractmethod
    def finish(
        self, total: Updates, counts: PyTree, size: int, state: Any, context: Context | None
    ) -> tuple[Updates, Any]:
        """Computes the updates from the sums over the whole batch.

        **Arguments:**

        - `total`, `counts`: the results of `gather`, summed over the parts of the batch.
        - `size`: the number of examples.
        - `state`, `context`: as for `update`.

        **Returns:** the updates and the new state, as `update` does.
        """

    def update(
        self,
        updates: Gradients,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        del params
        if context is not None and context.gathered is not None:
            return self.finish(updates, *context.gathered, state, context)
        leaves = jax.tree.leaves(updates)
        size = leaves[0].shape[0] if leaves and self.per_example else 1
        total, counts = self.gather(updates, context)
        return self.finish(total, counts, size, state, context)
