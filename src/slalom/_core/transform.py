"""The protocol: what a transform is, and what one step knows.

This is the file to read first. A transform is an immutable module: its fields are its
hyperparameters and its parts. Its state is a separate module that `init` makes and `update`
returns anew.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from .. import tree
from .._paths import candidates, has_suffix, snake_case
from .._types import Gradients, Params, Scalar, Step, Updates
from ..tree.dtypes import as_float
from .fields import hyperparameter_fields
from .fluent import FLUENT, AbstractFluent
from .messages import uncalled
from .schedule import AbstractSchedule, call_schedule


class Context(eqx.Module):
    """What one step knows beside the gradients. It lasts for that step only.

    **Arguments:**

    - `step`: how often this transform was asked before: the clock that schedules see.
    - `value`: the loss, a scalar.
    - `grad`: the gradient of the loss, before any transform.
    - `value_fn`: the loss as a function of the parameters.
    - `key`: a PRNG key for this step.
    - `weight`: how much this mini-batch counts in a mean over several, a scalar.
    - `per_param`: parameter-shaped trees by name; masks and partitions cut them along.
    - `extra`: what custom transforms declared under `needs`, by name.
    """

    step: Step | None = None
    value: Any = None
    grad: Updates | None = None
    value_fn: Callable[[Params], Any] | None = None
    key: Any = None
    weight: Any = None
    per_param: Mapping[str, PyTree] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether this step knows `name`."""
        return self.extra.get(name, getattr(self, name, None)) is not None

    def at(self, step: Step, **known: Any) -> "Context":
        """The same step as an inner transform with its own clock sees it."""
        return dataclasses.replace(self, step=step, **known)

    def cut(self, keep: tuple[bool, ...], params: Params) -> "Context":
        """The same step as a transform sees it that acts on some of these parameters only.

        To it the loss is a function of those: the others stand still where they are.
        """
        per_param = self.per_param and {k: tree.cut(v, keep) for k, v in self.per_param.items()}
        grad = None if self.grad is None else tree.cut(self.grad, keep)
        value_fn = None if self.value_fn is None else _with_rest(self.value_fn, keep, params)
        return dataclasses.replace(self, per_param=per_param, grad=grad, value_fn=value_fn)


def _with_rest(
    of_all: Callable[[Params], Any], keep: tuple[bool, ...], params: Params
) -> Callable[[Params], Any]:
    """A function of all parameters as one of those that are kept."""
    rest = tree.cut(params, tuple(not k for k in keep))

    def of_kept(kept: Params) -> Any:
        return of_all(tree.merge(jax.tree.structure(params), keep, kept, rest))

    return of_kept


class Part(NamedTuple):
    """One transform inside another: where it stands and what it sees there.

    `inside` returns the direct parts; `parts` walks all of them. Inspection, hyperparameters,
    validation and state access all go along this one walk.
    """

    path: tuple[str, ...]
    transform: "AbstractTransform"
    state: Any
    context: Context | None
    params: Params | None
    get: Callable[[Any], Any]
    """From the outer transform to this one, for `eqx.tree_at`."""
    group: tuple[str, ...] = ()
    """The labels of the partitions it stands in."""

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)

    def scope(self) -> Any:
        """The part's name in profiles and in the compiled program."""
        return jax.named_scope("/".join(self.path)) if self.path else contextlib.nullcontext()


MIXED = 2
"""The sign of what points along the gradients in some steps and against them in others."""


class AbstractTransform(AbstractFluent):
    """A gradient transformation: updates in, updates out, to be *added* to the parameters.

    To write one, subclass this, declare the fields, and write `init` and `update`:

    ```python
    >>> class ScaleBySign(sl.AbstractTransform):
    ...     def init(self, params):
    ...         return None
    ...     def update(self, updates, state, params=None, context=None):
    ...         return jax.tree.map(jnp.sign, updates), state
    >>> ScaleBySign() | sl.ScaleByLearningRate(0.1)
    ScaleBySign() | sl.ScaleByLearningRate(0.1)

    ```
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """What `update` cannot do without: names of the context's entries, or `"params"`."""

    keeps_zeros: ClassVar[bool] = False
    """Whether zero updates stay zero whatever the state is."""

    stands_last: ClassVar[bool] = False
    """Whether this writes parameters itself, so that no link may follow it."""

    elementwise: ClassVar[bool] = False
    """Whether every entry is treated alike and by itself, whatever leaf it stands in.

    Of a transform around others: whether it is, where they are."""

    per_example: ClassVar[bool] = False
    """Whether incoming gradients have one more leading axis, of examples, which this sums away."""

    nameless: ClassVar[bool] = False
    """Whether this adds nothing to a path, as a chain does."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        clashes = sorted(set(cls.__annotations__) & _METHODS)
        if clashes:
            raise TypeError(
                f"{cls.__name__} has a field '{clashes[0]}', which is the name of a method of "
                f"every transform. Rename the field."
            )
        if isinstance(cls.needs, str):
            raise TypeError(f"{cls.__name__}.needs must be a tuple of names: ({cls.needs!r},).")

    # --- the protocol -----------------------------------------------------------------------

    @abc.abstractmethod
    def init(self, params: Params) -> Any:
        """Fresh state for these parameters.

        **Arguments:**

        - `params`: a tree of floating or complex arrays; `None` is a hole.

        **Returns:** the state, or `None` where there is nothing to remember.
        """

    @abc.abstractmethod
    def update(
        self,
        updates: Updates,
        state: Any,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, Any]:
        """Transforms updates.

        **Arguments:**

        - `updates`: the gradients, or what the link before made of them; shaped as the
            parameters. Complex gradients are expected conjugated: `jax.grad` gives the
            conjugate of the direction of steepest ascent.
        - `state`: what `init` or the last `update` returned.
        - `params`: the parameters, for transforms that need them.
        - `context`: what else this step knows, above all its position on the clock.

        **Returns:** the new updates, in the accumulation dtype (float32 for half-precision
        leaves), and the new state, which has the structure, shapes and dtypes of the old one.
        """

    def step(
        self,
        grads: Gradients,
        state: Any,
        params: Params,
        context: Context | None = None,
    ) -> tuple[Params, Any]:
        """Gradients in, parameters out: `update` and one addition in the accumulation dtype.

        Transforms that decide *whether* something is written replace this, so that nothing is
        computed, and nothing subtracted, when nothing is.

        **Arguments:**

        - `grads`: the gradients, as `update` takes them.
        - `state`, `context`: as for `update`.
        - `params`: the parameters.

        **Returns:** the new parameters and the new state.
        """
        updates, state = pair(self, self.update(grads, state, params, context))
        return tree.add(params, updates), state

    # --- for authors of transforms ----------------------------------------------------------

    def at(self, context: Context | None) -> SimpleNamespace:
        """The hyperparameters as this step uses them, as strongly typed 0-d arrays.

        Schedules are asked at `context.step`. Unbound numbers take the same path as bound ones,
        so that both give the same bits.
        """
        values = {f.name: self.read(f.name, context) for f in hyperparameter_fields(self)}
        return SimpleNamespace(
            **{
                # Half-precision numbers are exact in float32, and 1 − β₂ is not in bfloat16.
                name: None if x is None else x.astype(tree.accumulation_dtype(x.dtype))
                for name, x in values.items()
            }
        )

    def read(self, name: str, context: Context | None) -> Scalar | None:
        """One hyperparameter as this step uses it, in the dtype it has."""
        value = getattr(self, name)
        if isinstance(value, AbstractSchedule):
            step = None if context is None else context.step
            if step is None:
                raise TypeError(
                    f"{type(self).__name__}.{name} is a schedule and must be told the time: pass "
                    "`context=sl.Context(step=n)` with the number of updates made before."
                )
            value = call_schedule(value, value, step)
        return None if value is None else as_float(value)

    def demand(self, name: str, value: Any) -> Any:
        """`value`, or an error that says what this transform misses and how to pass it."""
        if value is None:
            raise TypeError(missing(type(self).__name__, name))
        return value

    # --- the walk ---------------------------------------------------------------------------

    def inside(
        self, state: Any = None, context: Context | None = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        """The direct parts, each with its state, the context and the leaves that it sees."""
        del state, context, params
        return ()

    def has_updated(self, state: Any) -> Bool[Array, "*runs"] | bool:
        """Whether the last call of `step` wrote any parameter."""
        del state
        return True

    def refuse(self, name: str, state: Any) -> None:
        """Raises where this state says that no further step may be made.

        Asked on the host, outside of every trace, before a step of an optimizer with a transform
        that replaces this method; that step waits for the one before.

        **Arguments:**

        - `name`: the path of this transform, for the message.
        - `state`: its state, concrete arrays.
        """
        del name, state

    @property
    def refuses(self) -> bool:
        """Whether `refuse` must be asked before each step."""
        return False

    def metrics(self, state: Any) -> dict[str, Array]:
        """What this transform itself, not its parts, reports of its last update: scalars by name.

        The names are the same from `init` on; `""` stands for this transform's own path.
        """
        del state
        return {}

    def signs(self, params: Params) -> tuple[int | None, ...]:
        """For each leaf, which way the result points when gradients go in.

        1: along them; −1: against them, as a descent must; 0: nothing comes out; `MIXED`: in some
        steps along and in others against them; `None`: unknown.
        """
        return (1,) * len(jax.tree.leaves(params))

    def selectors(self) -> tuple[Any, ...]:
        """The selectors this transform itself holds, for validation at binding."""
        return ()

    def __getitem__(self, which: int | str | type) -> "AbstractTransform":
        """A part by its path or a suffix of it, by class, or (in a chain) by position."""
        if isinstance(which, int):
            raise TypeError(f"{type(self).__name__} has no positions; use a name or a class.")
        return find(self, which).transform


_METHODS = FLUENT | {
    name for name, value in vars(AbstractTransform).items() if callable(value) and name[0] != "_"
}


# --- walking --------------------------------------------------------------------------------


def segments(transform: AbstractTransform) -> tuple[str, ...]:
    """What a transform without a given name adds to a path; a chain adds nothing."""
    return () if transform.nameless else (snake_case(type(transform).__name__),)


def parts(
    transform: AbstractTransform,
    state: Any = None,
    context: Context | None = None,
    params: Params | None = None,
) -> Iterator[Part]:
    """The transform itself and everything inside it, depth first, with full paths."""
    root = Part(segments(transform), transform, state, context, params, lambda outer: outer)
    yield from _walk(root)


def _walk(outer: Part) -> Iterator[Part]:
    yield outer
    for part in outer.transform.inside(outer.state, outer.context, outer.params):
        yield from _walk(
            part._replace(
                path=outer.path + part.path,
                group=outer.group + part.group,
                get=lambda root, part=part: part.get(outer.get(root)),
            )
        )


def keeps_zeros(transform: AbstractTransform) -> bool:
    """Whether zeros stay zeros, through wrappers and chains too."""
    inside = transform.inside()
    return transform.keeps_zeros or (
        bool(inside) and all(keeps_zeros(part.transform) for part in inside)
    )


def find(transform: AbstractTransform, which: Any, state: Any = None) -> Part:
    """The one part with this path (or suffix of it) or class; an error lists the candidates."""
    if not isinstance(which, str | type):
        named = "A part is named by its path or its class, in a chain also by its position"
        raise TypeError(f"{named}, got {which!r} of type {type(which).__name__}.")
    known: dict[str, Part] = {}
    for part in parts(transform, state):
        # A chain inside a wrapper has the wrapper's path: the outermost counts.
        if part.path:
            known.setdefault(part.name, part)
    if isinstance(which, str):
        found = [known[which]] if which in known else []
        found = found or [part for name, part in known.items() if has_suffix(name, which)]
        wanted = f"'{which}'"
    else:
        found = [part for part in known.values() if type(part.transform) is which]
        wanted = getattr(which, "__name__", repr(which))
    if len(found) != 1:
        many = "is ambiguous" if found else "is not in this transform"
        among = [part.name for part in found] or list(known)
        raise KeyError(f"{wanted} {many}. Candidates: {candidates(str(which), among)}.")
    return found[0]


_HOW = {
    "params": "pass the parameters: `tx.update(grads, state, params)`",
    "step": "pass `context=sl.Context(step=n)` with the number of updates made before",
    "value": "pass the loss: `opt.step(model, grads, value=loss)`, or `sl.Context(value=loss)`",
    "grad": "pass the gradient of the loss: `opt.step(model, grads, grad=grads)`",
    "value_fn": "pass the loss as a function of the model: `opt.step(..., value_fn=fn)`",
    "key": "pass a PRNG key: `opt.step(model, grads, key=key)`",
}


def missing(who: str, name: str) -> str:
    """The message for something a transform needs and was not given."""
    how = _HOW.get(name, f"pass it: `opt.step(model, grads, {name}=...)`")
    itself = " `sl.train_step` passes value, grad and value_fn itself."
    return f"{who} needs '{name}': {how}." + itself * (name in ("value", "grad", "value_fn"))


def count_from_zero() -> Any:
    """A fresh clock."""
    return jnp.zeros((), jnp.int32)


def pair(transform: AbstractTransform, made: Any) -> tuple[Any, Any]:
    """What a transform's `update` or `step` returned, refused where it is no pair."""
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(
            f"{type(transform).__name__} must return a pair, the updates (from `step`, the "
            f"parameters) and the new state, got something of type {type(made).__name__}."
        )
    return made


def check_transform(what: str, given: Any) -> None:
    """Refuses something in a transform's place, with what to write where that is clear."""
    if not isinstance(given, AbstractTransform):
        kind = type(given).__name__
        raise TypeError(f"{what} is no transform: got {given!r} of type {kind}.{uncalled(given)}")
