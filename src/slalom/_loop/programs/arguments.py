"""The arguments of programs: functions as trees and in keys, leaves that get new values, and what
follows from a structure."""

import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ..._core.text.calls import called_with_the_same
from ...tree.sharding import constrain, is_on_host, may_be_at, mesh_sharding, to_device, to_host
from ...tree.types import is_function
from ..binding.model import split


def identity(x: Any) -> Hashable:
    """The entry of a key for a value: the value itself if others can equal it, else its id.

    The id of a function stands for it only while it lives, so the entries of the key must be
    dropped when it dies.
    """
    # A method is a new object each time it is looked up, and equal if it is of the same object.
    if isinstance(x, types.MethodType) and type(x.__self__).__weakrefoffset__ != 0:
        return id(x.__self__), id(x.__func__)
    return id(x) if _has_identity(type(x)) else x


def reference(x: Any, forget: Callable[[Any], object]) -> Callable[[], Any]:
    """A function that returns the value, without keeping it alive where `identity` gives an id.

    **Arguments:**

    - `x`: the value.
    - `forget`: called with the dead reference when the value dies.
    """
    if identity(x) is x:
        return lambda: x
    return (weakref.WeakMethod if isinstance(x, types.MethodType) else weakref.ref)(x, forget)


@functools.lru_cache(1024)
def _has_identity(kind: type) -> bool:
    """Whether objects of a type equal only themselves, and can be referred to weakly."""
    is_equal_to_itself = kind.__eq__ is object.__eq__ and kind.__hash__ is not None
    return is_equal_to_itself and kind.__weakrefoffset__ != 0


class Bound(eqx.Module):
    """A function with its first arguments and some keywords, all of them visible to JAX.

    **Arguments:**

    - `func`: a function, or a tree that can be called.
    - `args`, `keywords`: the arguments.
    """

    func: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.func(*self.args, *args, **{**self.keywords, **keywords})

    @property
    def innermost(self) -> Any:
        """The function that gets all the arguments."""
        return self.func.innermost if isinstance(self.func, Bound) else self.func

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of `functools.partial`, for checks of calls."""
        function = functools.partial(called_with_the_same(self.func), *self.args, **self.keywords)
        return inspect.signature(function, follow_wrapped=False)


def as_tree(function: Any) -> Any:
    """A function as a tree that shows the arrays it carries. A plain function is a leaf.

    Equinox modules, their bound methods and `eqx.Partial` are trees already. `functools.partial`
    hides its arrays from JAX. `jax.tree_util.Partial` shows its arguments, but not the arrays of
    its function. Another object that is a leaf becomes its method, which is compared by identity
    even if the object has no hash.
    """
    if isinstance(function, functools.partial):
        return Bound(as_tree(function.func), function.args, dict(function.keywords))
    if isinstance(function, types.MethodType):
        is_whole = _is_leaf(function.__self__)
        return function if is_whole else Bound(function.__func__, (function.__self__,), {})
    is_plain = not is_function(function) or _has_identity(type(function))
    return function if is_plain or not _is_leaf(function) else function.__call__


def _is_leaf(x: Any) -> bool:
    return jax.tree_util.all_leaves([x])


Homes: TypeAlias = tuple[NamedSharding | None, ...]

Carried: TypeAlias = dict[int, NamedSharding | None]
"""The leaves that get new values, in order: their positions among all leaves, with their sharding
at binding. That is `None` where it is not known."""

Arguments = TypeVar("Arguments")
"""The type of all arguments of a program together, such as a named tuple: one tree."""

Other = TypeVar("Other")

Body: TypeAlias = Callable[[Arguments], tuple[list[Any], Other]]
"""Maps the arguments to the new values of the carried leaves, in order, and to any other tree."""


def carried(inputs: Any, at: Any, *, params: bool = True, state: bool = True) -> Carried:
    """The leaves that a step changes.

    **Arguments:**

    - `inputs`: any named tuple with an `opt` and a `model`.
    - `at`: the same with the position of each leaf in its place.
    - `params`: whether to include the trainable parameters.
    - `state`: whether to include the state and the count.
    """
    binding = inputs.opt.binding
    positions: list[int] = []
    if params:
        model = split(inputs.model, binding.trainable)
        positions += itertools.compress(model.structure.flatten_up_to(at.model), model.trainable)
    if state:
        positions += jax.tree.leaves(at.opt.arrays[1:])
    if binding.sharding is None:
        return dict.fromkeys(positions)
    homes = (*binding.sharding.params * params, *binding.sharding.state * state)
    return dict(zip(positions, homes, strict=True))


class Signature:
    """Everything that follows from the structure of the arguments.

    **Arguments:**

    - `structure`: the structure of the arguments.
    - `statics`: the static leaves, by position.
    - `carried`: the leaves that get new values.
    - `donated`: the positions of those of them that are donated.
    - `forget`: called when one of the static leaves dies, with its dead reference.
    """

    compiled: Any
    """The compiled function of the arrays to donate, of the other arrays, and of `shardings`, which
    are static."""
    nested: Any
    """The same without donation, for calls under another transformation."""
    checked: Any
    """The same, compiled by `eqx.filter_jit`, for a program with runtime checks."""

    def __init__(
        self,
        structure: Any,
        statics: dict[int, Any],
        carried: Carried,
        donated: tuple[int, ...],
        forget: Callable[[Any], object] = lambda dead: None,
    ):
        self.structure = structure
        self._statics = {i: reference(x, forget) for i, x in statics.items()}
        self.carried = tuple(carried)
        self.homes = tuple(carried.values())
        self.donated = donated
        self.calls: list[int] | None = None
        """The number of calls, if it is counted."""
        others = {*donated, *statics}
        self.kept = tuple(i for i in range(structure.num_leaves) if i not in others)
        # JAX gives a donated buffer to the first result of its type. Results for donated leaves
        # come first, or new parameters would be written where a moment is still to be read.
        donated_set = set(donated)
        self.results = tuple(sorted(carried, key=lambda i: i not in donated_set))
        """The carried positions in the order of the program's results."""

    @property
    def statics(self) -> dict[int, Any]:
        """The static leaves, by position. They live as long as the arguments of a call."""
        return {i: get() for i, get in self._statics.items()}

    def separate(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """The arrays to donate among the leaves, and the other arrays."""
        return [leaves[i] for i in self.donated], [leaves[i] for i in self.kept]

    def shardings(self, leaves: list[Any]) -> Homes:
        """The sharding on a mesh of each carried leaf, or `None`; empty without a mesh."""
        if not self.carried or mesh_sharding(leaves[self.carried[0]]) is None:
            return ()
        return tuple(mesh_sharding(leaves[i]) for i in self.carried)

    def run(
        self, body: Body, donated: list[Any], kept: list[Any], homes: Homes
    ) -> tuple[list[Any], PyTree]:
        """Calls the body with arrays that `separate` has separated, and returns new values of
        `results` and its other result.

        Carried leaves in the memory of the host are copied to the device, where all is computed.
        New values have the shardings and memories of the old ones. Otherwise the partitioner may
        choose other shardings, and the next call would recompile.
        """
        arrays = dict(zip((*self.donated, *self.kept), (*donated, *kept), strict=True))
        old = {i: arrays[i] for i in self.carried}
        inputs = self.statics | arrays | to_device(old)
        values, other = body(self.structure.unflatten(inputs[i] for i in range(len(inputs))))
        new = {}
        places = homes or [None] * len(old)
        for (i, before), x, home in zip(old.items(), values, places, strict=True):
            # Arrays that were moved to another mesh since then are not moved back.
            if home is not None and may_be_at(before, home):
                x = constrain(x, home)
            new[i] = to_host(x) if is_on_host(before) else x
        return [new[i] for i in self.results], other
