"""The arrays of an optimizer, as a tree with a name for each."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from ...tree.types import Tracer
from .binding import Binding


class Arrays(Sequence[Any]):
    """The arrays of a transform, then those of its state, then the count.

    In key paths, each is an attribute whose name is its full path, such as
    `scale_by_adam.mu.layers.0.weight`. JAX's messages and Orbax's checkpoints show these names.
    """

    __slots__ = ("binding", "leaves")

    def __init__(self, leaves: tuple[Any, ...], binding: Binding):
        self.leaves = leaves
        self.binding = binding

    def __getitem__(self, which: Any) -> Any:
        return self.leaves[which]

    def __len__(self) -> int:
        return len(self.leaves)

    def __repr__(self) -> str:
        return f"Arrays({', '.join(self.binding.names)})"


def is_deleted(x: Any) -> bool:
    """Whether this is an array that was donated."""
    return not isinstance(x, Tracer) and getattr(x, "is_deleted", bool)()


def check_not_donated(arrays: Iterable[Any]) -> None:
    """Raises an error for arrays of an optimizer that a step has consumed."""
    for x in arrays:
        if is_deleted(x):
            raise ValueError(
                "This optimizer was donated to a training step, so its state can no longer be "
                "read. Use the optimizer that the step returned, after Ctrl-C `step.last[1]`, or "
                "`sl.train_step(loss_fn, donate=False)`."
            )


def _with_keys(arrays: Arrays) -> tuple[list[tuple[Any, Any]], Binding]:
    keys = map(GetAttrKey, arrays.binding.names)
    return list(zip(keys, arrays.leaves, strict=True)), arrays.binding


jax.tree_util.register_pytree_with_keys(
    Arrays,
    _with_keys,
    lambda binding, leaves: Arrays(tuple(leaves), binding),
    lambda arrays: (arrays.leaves, arrays.binding),
)
