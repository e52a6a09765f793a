"""Traits of transforms, by which compositions are checked before they run.

They are optional. The defaults are safe: without a declared trait, Slalom may raise more errors,
but never computes anything else.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array

from ...tree.types import Params
from ...where.resolve import Where
from .parts import AbstractDeclared


class Merge(NamedTuple):
    """The arrays that a window of `.every_k` merges for an entry of the context.

    **Arguments:**

    - `start`: a function of the transform and its parameters that returns the array with which a
        window begins.
    - `read`: a function of the entry and of an array like that one that returns the entry as such
        an array.
    - `entry`: a function of such an array that returns the entry.
    """

    start: Callable[[Any, Params], Array]
    read: Callable[[Any, Array], Array]
    entry: Callable[[Array], Any]


MIXED = 2
"""The sign of updates that point along the gradients in some steps and against them in others."""

OVER = ("number", "sums", "tree", "leaf", "matrix", "all")


class AbstractTraits(AbstractDeclared):
    """The traits of a transform."""

    over: ClassVar[str] = "all"
    """The entries that the transform needs at once:

    | `over` | needs | for example |
    |---|---|---|
    | `"number"` | each element separately | Adam, `.every_k` |
    | `"sums"` | each element, and sums over all leaves | a clip by the global norm |
    | `"tree"` | each element, and its leaf | `.mask` |
    | `"leaf"` | whole leaves | the norm of each leaf |
    | `"matrix"` | whole matrices; only for a rule | Shampoo |
    | `"all"` | anything | a transform without a declaration |

    `.flatten()` takes the first two, and refuses the second with a selector. In a `jax.shard_map`
    whose devices have different elements, all but the first and `"tree"` are refused. For a
    wrapper, this does not include the inner transform."""

    @property
    def elementwise(self) -> bool:
        """Whether the transform acts on each element separately."""
        return self.over == "number"

    keeps_zeros: ClassVar[bool] = False
    """Whether zero updates stay zero in any state. Such a link may follow one that
    accumulates."""

    per_example: ClassVar[bool] = False
    """Whether the transform needs per-example gradients, with a leading axis of examples."""

    merges: ClassVar[Mapping[str, Merge]] = {}
    """Entries of the context as arrays that a window of `.every_k` can merge."""

    computes_gradient: ClassVar[bool] = False
    """Whether the transform replaces the incoming updates by a gradient that it computes.

    Nothing may come before it in a chain."""

    follows_loss: ClassVar[bool] = False
    """Whether a wrapper acts by the loss or its gradient. `.maximize()` inside it would make it
    follow the loss where the transform inside ascends, and is refused."""

    unconstrained: ClassVar[bool] = False
    """Whether the transform mixes parameters as if each could move freely. A projection after its
    steps would stop at points that are not minima, so it is refused, except for a box if
    `heeds_bounds`."""

    heeds_bounds: ClassVar[bool] = False
    """Whether the transform looks at the `bounds` of the context: updates inside a projection
    onto a box then take the parameters into the box."""

    descends_partly: ClassVar[bool] = False
    """Whether the transform sets the learning rate of some leaves, and leaves the others to further
    links of a chain."""

    sets_learning_rate: ClassVar[bool] = False
    """Whether the transform flips the sign of the updates. A chain should do so once."""

    update_sign: ClassVar[int | None] = 1
    """The direction of the result when gradients come in.

    1 along the gradients, −1 against them (a descent), 0 for no update at all, `MIXED` for along
    them in some steps and against them in others, and `None` for unknown. Binding refuses an
    optimizer that would ascend."""

    constrains: ClassVar[bool] = False
    """Whether the update is such that the parameter *plus* the update meets a condition, such as a
    norm. Wrappers that add another multiple of the update refuse it."""

    clips: ClassVar[bool] = False
    """Whether the transform bounds gradients. A warning says so if the learning rate comes
    first."""

    passes_gradients: ClassVar[bool] = False
    """Whether a wrapper only passes the gradients on, or linear combinations of them. Only such
    wrappers may contain `.scale_loss()`."""

    reads_encoded: ClassVar[tuple[str, ...]] = ()
    """The inputs that `run` decodes itself: `"updates"`, `"state"`, or, of the state, the leaves in
    `"elementwise"` codecs only. A wrapper that only passes encoded updates on lets each rule inside
    decode one leaf at a time."""

    nameless: ClassVar[bool] = False
    """Whether this adds no segment to a path, as a chain does not."""

    def signs(self, params: Params) -> tuple[int | None, ...]:
        """The `update_sign` at each leaf. Replaced where it differs between leaves or follows from
        fields."""
        return (self.update_sign,) * len(jax.tree.leaves(params))

    def notes(self, params: Params) -> tuple[str | None, ...]:
        """A note for `opt.describe` about each leaf, such as `"768 × 3072"`."""
        return (None,) * len(jax.tree.leaves(params))

    def system(self, params: Params) -> int:
        """The bytes of the largest matrix that a step solves with, as far as the parameters
        determine it. `sl.plan` reports it."""
        del params
        return 0

    def selectors(self) -> tuple[Any, ...]:
        """The selectors that this transform itself holds. Binding checks that they match."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(value for value in values if isinstance(value, Where))

    def warnings(self, params: Params) -> Iterable[str]:
        """Warnings about this transform for these parameters, which are shown at binding."""
        del params
        return ()

    @property
    def guard(self) -> Callable[[str, Any], None] | None:
        """A function of this transform's path and state that raises to forbid the next step.

        It runs on the host, outside every trace, and waits for the previous step; `None`, the
        default, costs nothing. The arrays of the state may have an axis of runs, or of the steps of
        a scan, and its `inner` is then `None`.
        """
        return None
