"""Groups of stacks of matrices that are computed at once.

Large matrices are processed one after the other, which needs the scratch memory of one. Small ones
of equal shape are stacked, since one alone does not keep a processor busy.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

_SMALL = 2**16
_SMALL_ON_ACCELERATORS = 2**20
"""The largest number of entries of a matrix that is stacked with others on one device."""

_STACK = 2**22
"""The largest number of entries of a stack, on one device."""


def is_small(size: int) -> bool:
    """Whether a matrix with so many entries is processed together with others on one device."""
    return size <= (_SMALL if jax.default_backend() == "cpu" else _SMALL_ON_ACCELERATORS)


class StackGroup(NamedTuple):
    """Stacks of matrices to compute with at once."""

    members: list[int]
    """The positions of its stacks."""
    numbers: list[int]
    """The number of matrices in each stack."""
    size: int
    """The number of entries of the largest matrix."""

    def divided(self, results: PyTree) -> Iterator[tuple[int, int, PyTree]]:
        """For each stack which one it is, its number of matrices, and its part of the results."""
        begin = 0
        for i, number in zip(self.members, self.numbers, strict=True):
            own = results
            if self.members[1:]:
                own = jax.tree.map(lambda x, a=begin, b=begin + number: x[a:b], results)
            yield i, number, own
            begin += number


def joined(stacks: Sequence[PyTree]) -> PyTree:
    """One stack of all matrices."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs) if xs[1:] else xs[0], *stacks)


def stack_groups(stacks: Sequence[PyTree]) -> Iterator[StackGroup]:
    """All small matrices of equal shapes at once, and stacks of large ones in turn.

    **Arguments:**

    - `stacks`: trees with a leading axis of matrices.
    """
    kinds: dict[Any, list[int]] = {}
    numbers: list[int] = []
    for i, stack in enumerate(stacks):
        arrays = jax.tree.leaves(stack)
        kinds.setdefault(tuple((x.shape[1:], x.dtype) for x in arrays), []).append(i)
        numbers.append(len(arrays[0]))
    for kind, members in kinds.items():
        size = max(math.prod(shape) for shape, _ in kind)
        most = max(1, _STACK // max(1, size)) if is_small(size) else 0
        group = StackGroup([], [], size)
        for i in members:
            if group.members and sum(group.numbers) + numbers[i] > most:
                yield group
                group = StackGroup([], [], size)
            group.members.append(i)
            group.numbers.append(numbers[i])
        yield group
