"""The batches that the tools take."""

from collections.abc import Iterable, Iterator
from typing import Any


def take(batches: Iterable[Any], steps: int, who: str) -> Iterator[tuple[Any, ...]]:
    """The arguments of the loss after the model, for each step.

    **Arguments:**

    - `batches`: tuples or lists of arguments, or single arguments. They are repeated if there are
        too few, unless they come from an iterator, which can be read only once.
    - `steps`: the number of steps.
    - `who`: the public function, for messages.
    """
    taken, source = 0, batches_of(batches, who)
    while taken < steps:
        before = taken
        for batch in source:
            yield tuple(batch) if isinstance(batch, tuple | list) else (batch,)
            taken += 1
            if taken == steps:
                return
        source = batches_of(batches, who)
        if taken == before or source is batches:
            raise ValueError(
                f"`{who}` got {taken} batches for {steps} steps. Pass `steps={taken}`, or a list "
                "or a data loader, which can be read several times."
                if taken
                else f"`{who}` got no batches. Pass tuples of the arguments of the loss after the "
                "model, such as `[(x, y)]`."
            )


def batches_of(batches: Any, who: str) -> Iterator[Any]:
    """An iterator over the batches."""
    # The most likely mistake: one batch instead of many. Its rows would be taken for batches.
    is_one = isinstance(batches, tuple) and any(hasattr(x, "shape") for x in batches)
    if is_one or hasattr(batches, "shape") or not isinstance(batches, Iterable):
        raise TypeError(
            f"`{who}` takes an iterable of batches, got {_kind(batches)}. To use one batch in "
            "every step, pass a list with it: `[(x, y)]`."
        )
    return iter(batches)


def _kind(batches: Any) -> str:
    if isinstance(batches, tuple):
        return f"a tuple of {len(batches)}, which looks like a single batch"
    if hasattr(batches, "shape"):
        return "an array"
    return f"an object of type {type(batches).__name__}"
