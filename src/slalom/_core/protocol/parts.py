"""The parts of a composition: what they declare, their traits, and the one walk over them.

Traits are optional, and compositions are checked by them before they run. The defaults are safe:
without a declared trait, Slalom may raise more errors, but never computes anything else.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_origin

import jax
import numpy as np

from ... import tree
from ...tree.paths import first_difference, named, not_one, snake_case
from ...tree.types import Params, PyTree
from ...where.resolve import Where
from ..engine.encoded import blockwise, decoded, encoded_again, has_encoded
from ..engine.manual_axes import refuse_parts
from ..text.calls import check_function, check_keywords
from ..text.messages import check_bool
from ..text.printing import AbstractPrinted
from .context import Context, Merge
from .writer import Writer

CHECK = "slalom.check"
"""The key of a field's check in its metadata: a function of the field's name and value."""


class Part(NamedTuple):
    """A module inside another one: its path, and its view of the step.

    `AbstractWrapper.inner_part` returns the part for the inner transform of a wrapper.

    **Arguments:**

    - `path`: the segments of its path below the outer module, or its own for the outermost one.
    - `module`: a transform, a skip condition or a stateful schedule.
    - `state`: its state.
    - `context`: the `Context` that it sees, with its own clock.
    - `params`: the parameters that it acts on.
    - `get`: a function from the outer module to this one, for `eqx.tree_at`.
    - `group`: the labels of the partition groups around it.
    """

    path: tuple[str, ...]
    module: Any
    state: PyTree
    context: Any
    params: Params | None
    get: Callable[[Any], Any]
    group: tuple[str, ...] = ()

    @classmethod
    def root(
        cls, module: Any, state: PyTree = None, context: Any = None, params: Params | None = None
    ) -> "Part":
        """A module that is inside no other one."""
        return cls(segments(module), module, state, context, params, lambda root: root)

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which operations have the name of this part in profiles."""
        return jax.named_scope("/".join(self.path)) if self.path else contextlib.nullcontext()

    def run(self, write: Writer, updates: PyTree) -> tuple[Any, Any]:
        """Runs this transform, under its name in profiles.

        **Arguments:**

        - `write`: the `Writer` for its updates.
        - `updates`: the incoming updates.

        **Returns:** the result of `write` for the transform's updates, and its new state.
        """
        module = self.module
        context = self.context or Context()
        if context.stored_clock is not None:
            # States with equal names inside of different transforms are rounded independently.
            salt = np.int32(zlib.crc32(self.name.encode()) >> 1)
            context = context.replace(stored_clock=context.stored_clock + salt)
        here = self._replace(context=context)
        self.refuse_parts(updates)
        with self.scope():
            if "updates" not in module.reads_encoded:
                updates = decoded(updates)
            coded = False
            if "state" not in module.reads_encoded:
                elementwise = "elementwise" in module.reads_encoded
                coded = bool(blockwise(self.state)) if elementwise else has_encoded(self.state)
            # The parts of the transform decode their own states when they run.
            of_parts = [child.state for child in here.children()] if coded else []

            def is_of_part(x: object) -> bool:
                return any(x is state for state in of_parts if state is not None)

            if coded:
                here = here._replace(state=decoded(self.state, is_of_part))
            result = module.run(here, write, updates)
            if not isinstance(result, tuple) or len(result) != 2:
                raise no_pair(module, result)
            written, state = result
            if jax.tree.structure(state) != jax.tree.structure(here.state):
                differ = first_difference(state, here.state, ("the new state", "the old one"))
                raise TypeError(
                    f"{type(module).__name__} must return a state with the same structure as "
                    f"`init`, or every step would recompile: {differ}."
                )
            if coded:
                clock = context.stored_clock
                state = encoded_again(self.state, state, clock, self.name, is_of_part)
        return written, state

    def children(self) -> "tuple[Part, ...]":
        """The direct parts of this one, with their contexts."""
        return self.module.children(self)

    def child(
        self, path: tuple[str, ...], module: Any, get: Callable[[Any], Any], state: PyTree = None
    ) -> "Part":
        """A part of this one that sees the same context and parameters.

        **Arguments:**

        - `path`: the segments of its path below this part.
        - `module`: a transform, a skip condition or a stateful schedule.
        - `get`: from this part's module to the module.
        - `state`: its state.
        """
        return Part(path, module, state, self.context, self.params, get)

    def cut(self, keep: tuple[bool, ...]) -> "Part":
        """This part on some of its leaves."""
        context = None if self.context is None else self.context.cut(keep, self.params)
        return self._replace(context=context, params=tree.cut(self.params, keep))

    def refuse_parts(self, updates: PyTree) -> None:
        """Raises an error inside a `jax.shard_map` if this needs more than its device has."""
        if not (self.module.elementwise or self.module.over == "tree"):
            refuse_parts(type(self.module).__name__, updates, self.params)


class AbstractDeclared(AbstractPrinted):
    """The base of transforms, skip conditions and schedules: fields and parts are declared."""

    if not TYPE_CHECKING:  # a type checker reads `__init__`

        def __new__(cls, *args: object, **kwargs: object) -> Any:
            if kwargs:
                check_keywords(cls.__init__, cls.__name__, kwargs)
            return super().__new__(cls)

    def children(self, here: Part) -> tuple[Part, ...]:
        """The parts of this module that have hyperparameters, state or a clock.

        Everything that inspects or edits a composition goes through this method: hyperparameters,
        `state_of`, `describe`, `reset`, `rebind`. A part that is not returned here does not exist
        for them.

        **Arguments:**

        - `here`: this module with its state, context and parameters, each `None` if it is not
            known.

        **Returns:** the direct parts by name, each with its own state, context and parameters.
        """
        return ()

    def __check_init__(self):
        for field in dataclasses.fields(self):
            check = field.metadata.get(CHECK)
            value = getattr(self, field.name)
            optional = field.default is None and value is None
            if check is not None and not optional:
                check(f"{type(self).__name__}.{field.name}", value)
            if check is None and not optional and get_origin(field.type) is Callable:
                check_function(f"{type(self).__name__}.{field.name}", value)
            if field.type is bool and field.metadata.get("static", False):
                check_bool(f"{type(self).__name__}.{field.name}", value)


def no_pair(transform: object, result: object) -> TypeError:
    """The error for a result of a transform that is not a pair."""
    return TypeError(
        f"{type(transform).__name__} must return a pair, the updates (from `step`, the "
        f"parameters) and the new state, got something of type {type(result).__name__}."
    )


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

    elementwise: ClassVar[bool] = False
    """Whether the transform acts on each element separately. This follows from `over`, and for a
    rule from its phases."""

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

    in_sequence: ClassVar[bool] = False
    """Whether the parts are links that follow one another. Such a chain adds no segment to a
    path."""

    guard: ClassVar[Callable[..., None] | None] = None
    """A function of this transform's path and state that raises to forbid the next step.

    It runs on the host, outside every trace, and waits for the previous step; `None`, the default,
    costs nothing. The arrays of the state may have an axis of runs, or of the steps of a scan, and
    its `inner` is then `None`."""

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
        return 0

    def selectors(self) -> tuple[Any, ...]:
        """The selectors that this transform itself holds. Binding checks that they match."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(value for value in values if isinstance(value, Where))

    def warnings(self, params: Params) -> Iterable[str]:
        """Warnings about this transform for these parameters, which are shown at binding."""
        return ()


def parts(
    root: AbstractDeclared,
    state: PyTree = None,
    context: Context | None = None,
    params: Params | None = None,
) -> Iterator[Part]:
    """The root and everything inside it, depth first, with full paths.

    Transforms, and what they hold that has hyperparameters or state of its own: skip conditions and
    stateful schedules.
    """
    return walk(Part.root(root, state, context, params))


def transforms(
    root: AbstractDeclared,
    state: PyTree = None,
    context: Context | None = None,
    params: Params | None = None,
) -> Iterator[Part]:
    """The parts that are transforms."""
    every = walk(Part.root(root, state, context, params))
    return (part for part in every if isinstance(part.module, AbstractTraits))


def instances(root: AbstractDeclared, kind: Any) -> Iterator[Part]:
    """The parts that are of this class, or of one of several."""
    return (part for part in parts(root) if isinstance(part.module, kind))


def walk(outer: Part) -> Iterator[Part]:
    """A part and everything inside it, depth first, with full paths."""
    yield outer
    for part in outer.children():
        yield from walk(
            part._replace(
                path=outer.path + part.path,
                group=outer.group + part.group,
                get=lambda root, part=part: part.get(outer.get(root)),
            )
        )


def segments(module: AbstractDeclared) -> tuple[str, ...]:
    """The segments that a part without a given name adds to a path. A chain adds none."""
    is_chain = isinstance(module, AbstractTraits) and module.in_sequence
    return () if is_chain else (snake_case(type(module).__name__),)


def inner_transforms(module: AbstractDeclared) -> list[Any]:
    """The transforms directly inside another one."""
    children = (part.module for part in Part.root(module).children())
    return [child for child in children if isinstance(child, AbstractTraits)]


def keeps_zeros(transform: AbstractTraits) -> bool:
    """Whether zeros stay zeros, through wrappers and chains too."""
    inside = inner_transforms(transform)
    return transform.keeps_zeros or (bool(inside) and all(map(keeps_zeros, inside)))


def find(root: AbstractDeclared, which: object, state: PyTree = None) -> Part:
    """The one part with this path, path suffix or class. An error lists the candidates."""
    if not isinstance(which, str | type):
        raise TypeError(
            "A part is named by its path or its class, in a chain also by its position, got "
            f"{which!r} of type {type(which).__name__}."
        )
    by_name: dict[str, Part] = {}
    for part in parts(root, state):
        # A chain inside a wrapper has the wrapper's path: the outermost counts.
        if part.path:
            by_name.setdefault(part.name, part)
    if isinstance(which, str):
        matches = named(which, by_name)
    else:
        matches = [name for name, part in by_name.items() if type(part.module) is which]
    if len(matches) != 1:
        raise not_one(which, matches, by_name, "is not in this transform")
    return by_name[matches[0]]
