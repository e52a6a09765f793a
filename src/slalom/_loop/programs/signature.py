"""Facts about a program that follow from the structure of its arguments."""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ...tree.sharding import constrain, is_on_host, may_be_at, to_device, to_host
from .references import reference

Leaves: TypeAlias = list[Any]
"""Leaves of the arguments: arrays, tracers and static values."""

Structure: TypeAlias = Any
"""A `jax.tree_util.PyTreeDef`, which type checkers see as a variable."""

Positions: TypeAlias = tuple[int, ...]

Homes: TypeAlias = tuple[NamedSharding | None, ...]

Arguments = TypeVar("Arguments")
"""The type of all arguments of a program together, such as a named tuple: one tree."""

Other = TypeVar("Other")

Body: TypeAlias = Callable[[Arguments], tuple[Leaves, Other]]
"""Maps the arguments to the new values of the carried leaves, in order, and to any other tree."""


class Signature:
    """Everything that follows from the structure of the arguments.

    **Arguments:**

    - `structure`: the structure of the arguments.
    - `statics`: the static leaves, by position.
    - `carried`: the positions of the leaves that get new values.
    - `donated`: those of them that are donated.
    - `shardings`: for each carried leaf its sharding on a mesh, or `None`; empty without a mesh.
    - `forget`: called when one of the static leaves dies, with its dead reference.
    """

    compiled: Any
    """The compiled function of the arrays to donate and of the other arrays."""
    nested: Any
    """The same without donation, for calls under another transformation."""
    checked: Any
    """The same, compiled by `eqx.filter_jit`, for a program with runtime checks."""

    def __init__(
        self,
        structure: Structure,
        statics: dict[int, Any],
        carried: Positions,
        donated: Positions,
        shardings: Homes,
        forget: Callable[[Any], None],
    ):
        self.structure = structure
        self._statics = {i: reference(x, forget) for i, x in statics.items()}
        self.carried = carried
        self.donated = donated
        self.shardings = shardings
        self.has_runtime_checks = False
        self.calls: list[int] | None = None
        """The number of calls, if it is counted."""
        others = {*donated, *statics}
        self.kept = tuple(i for i in range(structure.num_leaves) if i not in others)
        # JAX gives a donated buffer to the first result of its type. Results for donated leaves
        # come first, or new parameters would be written where a moment is still to be read.
        donated_set = set(donated)
        self._order = sorted(range(len(carried)), key=lambda k: carried[k] not in donated_set)
        self.results = tuple(carried[k] for k in self._order)
        """The carried positions in the order of the compiled program's results."""

    @property
    def statics(self) -> dict[int, Any]:
        """The static leaves, by position. They live as long as the arguments of a call."""
        return {i: get() for i, get in self._statics.items()}

    def separate(self, leaves: Leaves) -> tuple[Leaves, Leaves]:
        """The arrays to donate among the leaves, and the other arrays."""
        return [leaves[i] for i in self.donated], [leaves[i] for i in self.kept]

    def arguments(self, donated: Leaves, kept: Leaves) -> PyTree:
        """Undoes `separate`: the arguments as the caller passed them."""
        statics = self.statics
        leaves = [statics.get(i) for i in range(self.structure.num_leaves)]
        for positions, arrays in ((self.donated, donated), (self.kept, kept)):
            for i, array in zip(positions, arrays, strict=True):
                leaves[i] = array
        return self.structure.unflatten(leaves)

    def run(self, body: Body, arguments: PyTree, homes: Homes = ()) -> tuple[Leaves, PyTree]:
        """Calls the body, and returns its results where the carried leaves were.

        Carried leaves in the memory of the host are copied to the device, where all is computed.
        New values have the shardings and memories of the old ones. Otherwise the partitioner may
        choose other shardings, and the next call would recompile.
        """
        leaves, structure = jax.tree.flatten(arguments)
        on_host = [is_on_host(leaves[i]) for i in self.carried]
        # Arrays that were moved to another mesh since then are not moved back.
        pairs = zip(self.carried, homes, strict=True) if homes else ()
        homes = tuple(home if may_be_at(leaves[i], home) else None for i, home in pairs)
        for i in self.carried:
            leaves[i] = to_device(leaves[i])
        new, other = body(structure.unflatten(leaves))
        if shardings := self.shardings or homes:
            pairs = zip(new, shardings, strict=True)
            new = [x if sharding is None else constrain(x, sharding) for x, sharding in pairs]
        new = [to_host(x) if host else x for x, host in zip(new, on_host, strict=True)]
        return new, other

    def ordered(self, new: Leaves) -> Leaves:
        """New values of the carried leaves in the order of `results`."""
        return [new[k] for k in self._order]
