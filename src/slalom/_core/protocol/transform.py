"""The protocol. Read this file first.

A transform is an immutable module whose fields are its hyperparameters and its parts. Its state is
a separate module: `init` creates it, and `update` returns the next one. The other files of this
folder explain what a step knows besides the gradients (`context.py`), which gradients transforms
ask for (`loss.py`), how updates reach the parameters (`writer.py`), how transforms are made of
others (`wrapper.py`, `chain.py`), and what the checks at binding read (`parts.py`).
"""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, cast, overload

from jaxtyping import Array, Bool, Int

from ... import tree
from ...tree.types import Gradients, Params, PyTree, Updates
from ..fields.schedule import read_number, read_numbers
from ..methods.fluent import FLUENT, AbstractFluent
from ..text.messages import uncalled
from ..text.mistakes import frozen, no_attribute, not_callable, transform_advice
from ..text.notebook import document, transform_tree
from ..text.printing import operand
from .context import Context
from .inputs import check_inputs, missing
from .loss import Loss
from .parts import OVER, AbstractTraits, Part, find, no_pair
from .writer import ADD, Writer

if TYPE_CHECKING:
    # `AbstractTransform` alone then means `AbstractTransform[Any]`, also to a strict checker.
    from typing_extensions import TypeVar

    State = TypeVar("State", default=Any)
else:
    from typing import TypeVar

    State = TypeVar("State")  # `default=` needs Python 3.13

Kind = TypeVar("Kind")
Method = TypeVar("Method", bound=Callable[..., Any])


def advise_inputs(function: Method) -> Method:
    """A decorator for `update` and `step` that refuses an optimizer, and Optax's arguments, with
    advice. The signature stays the same."""
    name, parameters = function.__name__, inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: object, **keywords: object) -> Any:
        passed: dict[str, Any] = dict(zip(parameters, args, strict=False)) | keywords
        unknown = next((keyword for keyword in keywords if keyword not in parameters), None)
        context = passed.get("context")
        if unknown or not isinstance(context, Context | None):
            got = f"the keyword '{unknown}'" if unknown else f"{context!r} as the context"
            raise TypeError(
                f"`tx.{name}` got {got}. Inputs other than these belong to a context: "
                f"`tx.{name}(grads, state, params, sl.Context({unknown or 'step'}=...))`."
            )
        if "state" not in passed or (name == "step" and "params" not in passed):
            returned = "params" if name == "step" else "updates"
            raise TypeError(
                f"A transform does not hold its state: `{returned}, state = tx.{name}(grads, "
                "state, params)`. To step with the model and its gradients, bind it, `opt = "
                "sl.Optimizer(tx, model)`, and write `model, opt = opt.step(model, grads)`."
            )
        try:
            return function(*args, **keywords)
        except TypeError:
            check_inputs(passed["self"], context or Context(), passed.get("params"))
            raise

    return cast(Method, call)


class AbstractTransform(AbstractFluent, AbstractTraits, Generic[State]):
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

    # --- the protocol -----------------------------------------------------------------------

    @abc.abstractmethod
    def init(self, params: Params) -> State:
        """Fresh state for these parameters.

        **Arguments:**

        - `params`: a tree of floating or complex arrays. `None` marks a hole.

        **Returns:** the state, or `None` for a transform without one.
        """

    @abc.abstractmethod
    def update(
        self,
        updates: Updates,
        state: State,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, State]:
        """Transforms updates.

        **Arguments:**

        - `updates`: the gradients, or the updates of the previous link; shaped like the parameters.
            Complex gradients are expected conjugated: `jax.grad` returns the conjugate of the
            direction of steepest ascent.
        - `state`: what `init` or the last `update` returned.
        - `params`: the parameters, for transforms that need them.
        - `context`: the other inputs of this step, especially its position on the clock.

        **Returns:** the new updates, in the accumulation dtype (float32 for half-precision
        leaves), and the new state, with the structure, shapes and dtypes of the old one.
        """

    @advise_inputs
    def step(
        self,
        grads: Gradients,
        state: State,
        params: Params,
        context: Context | None = None,
    ) -> tuple[Params, State]:
        """Gradients in, parameters out: `update`, and one addition in the accumulation dtype.

        **Arguments:**

        - `grads`: the gradients, as for `update`.
        - `state`, `context`: as for `update`.
        - `params`: the parameters.

        **Returns:** the new parameters and the new state.
        """
        updates, state = pair(self, self.update(grads, state, params, context), grads)
        return ADD(params, updates), state

    # --- what a subclass may add ------------------------------------------------------------

    needs: ClassVar[tuple[str, ...]] = ()
    """The entries of the context that `update` cannot do without, or `"params"`. They are checked
    before anything is computed."""

    metric_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of the state that are metrics. They hold scalars."""

    def has_updated(self, state: State) -> Bool[Array, "*runs"] | bool:
        """Whether the last step changed any parameter. Transforms that skip steps replace this."""
        return True

    def ask(self, here: Part, loss: Loss) -> Loss:
        """Asks something of the loss of a training step, for itself and the transforms inside.

        It is called once in a step, outside all conditionals. It reads the state and writes none.

        **Arguments:**

        - `here`: this transform with its state, the context and the parameters, each `None` when an
            optimizer is created.
        - `loss`: the loss as those before it ask for it.

        **Returns:** a loss that also provides what this transform asks for: by default its
        `needs`, and the gradients of single examples if it is `per_example`.
        """
        for name in self.needs:
            loss = loss.request(name, here)
        if self.per_example:
            if not loss.first:
                raise ValueError(
                    f"'{here.name}' aggregates per-example gradients, so it must be the first link "
                    f"of the chain, and must not be wrapped. Write `{operand(self)} | rest`, and "
                    "wrap only the rest."
                )
            loss = loss.request("single examples", here)
        return loss.inside(here)

    def num_evaluations(self, state: State) -> Int[Array, "*runs"] | int:
        """The number of evaluations of the loss at other parameters in the last step, for
        `sl.minimize`."""
        return 0

    def skipped(self, state: State) -> State:
        """The state after a step that a wrapper such as `.if_finite` has skipped.

        A transform whose gradients are taken at a sample draws another one, since the old one may
        be why the step was skipped. The parts of a transform are asked on their own.
        """
        return state

    def metrics(self, state: State) -> dict[str, Array]:
        """Scalars by name that describe the last update, for `opt.metrics`.

        By default they are the fields of the state in `metric_fields`. The names are the same from
        `init` on. The name `""` is replaced by this transform's path.
        """
        return {name: getattr(state, name) for name in self.metric_fields}

    def reading(self, name: str, state: State, context: Context | None) -> Any:
        """The value of a hyperparameter that the next step uses, for `opt.hyperparams`."""
        return read_number(self, name, context)

    # A transform made of others also replaces `run` below and `children` in `parts.py`, from which
    # everything that inspects or edits a composition finds the parts. The traits in that file are
    # read by checks when an optimizer is created.

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, State]:
        """Runs this transform inside another one. It serves both `update` and `step`.

        **Arguments:**

        - `here`: this transform with its state, the context (an empty one if none was passed) and
            the parameters.
        - `write`: returns the updates, or adds them to the parameters. A policy of `.write` also
            knows the parameters in full precision, `write.full(params)`.
        - `updates`: as for `update`.

        **Returns:** the result of `write`, and the new state.
        """
        if write is ADD and here.params is not None:
            return pair(self, self.step(updates, here.state, here.params, here.context))
        seen = write.full(here.params)
        result = self.update(updates, here.state, seen, here.context)
        updates, state = pair(self, result, updates)
        return write(here.params, updates), state

    def leafwise(self, here: Part, leaves: tuple[int, ...]) -> PyTree | None:
        """The rules of this transform, if they can run leaf by leaf together with others.

        **Arguments:**

        - `here`: this transform with its state, the context and the parameters.
        - `leaves`: the positions of its leaves among all updates.

        **Returns:** a `RuleAt`, or a tree of them like the state of this transform, or `None`.
        """
        return None

    # --- helpers for authors ----------------------------------------------------------------

    def at(self, context: Context | None) -> SimpleNamespace:
        """The hyperparameters at this step, as strongly typed 0-d arrays.

        Schedules are evaluated at `context.step`. Unbound numbers take the same path as bound
        ones, so both give the same bits.
        """
        return SimpleNamespace(
            **{
                # Half-precision numbers are exact in float32, but 1 − β₂ is not in bfloat16.
                name: None if x is None else x.astype(tree.accumulation_dtype(x.dtype))
                for name, x in read_numbers(self, context).items()
            }
        )

    def demand(self, name: str, value: Kind | None) -> Kind:
        """Returns `value`, or raises an error that says how to pass it."""
        if value is None:
            raise TypeError(missing(type(self).__name__, name))
        return value

    def _repr_html_(self) -> str:
        return document(transform_tree(self))

    _refuses_calls: ClassVar[bool] = True

    if not TYPE_CHECKING:  # a type checker would otherwise accept every name, and calls

        def __getattr__(self, name: str) -> Any:
            return no_attribute(self, name, transform_advice)

        def __setattr__(self, name: str, value: object) -> None:
            try:
                super().__setattr__(name, value)
            except dataclasses.FrozenInstanceError:
                raise frozen(self, name) from None

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            not_callable(self)

    @overload
    def __getitem__(self, which: type[Kind]) -> Kind: ...
    @overload
    def __getitem__(self, which: int | str) -> "AbstractTransform[Any]": ...
    def __getitem__(self, which: int | str | type) -> Any:
        """A part by its path or a suffix of it, by class, or (in a chain) by position."""
        return self._at_position(which) if isinstance(which, int) else find(self, which).module

    def _at_position(self, which: int) -> "AbstractTransform[Any]":
        raise TypeError(f"{type(self).__name__} has no positions; use a name or a class.")

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
        if isinstance(cls.over, str) and cls.over not in OVER:
            choices = ", ".join(map(repr, OVER))
            raise ValueError(f"{cls.__name__}.over must be one of {choices}, got {cls.over!r}.")
        cls.elementwise = cls.over == "number"


_METHODS = FLUENT | {
    name
    for cls in (AbstractTraits, AbstractTransform)
    for name, value in vars(cls).items()
    if callable(value) and name[0] != "_"
}


def pair(
    transform: AbstractTransform[Any], result: Any, updates: Updates = None
) -> tuple[Any, Any]:
    """The result of `update`, with the incoming updates, or of `step`. Raises an error if it is not
    a pair, or if its updates are unlike the incoming ones."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise no_pair(transform, result)
    if updates is not None and not transform.per_example:
        of = f" of {type(transform).__name__}"
        tree.check_same_shapes(result[0], updates, "incoming update", of=of)
    return result


def require_transform(what: str, x: object) -> None:
    """Raises an error for anything that is not a transform."""
    if not isinstance(x, AbstractTransform):
        message = f"{what} is not a transform: got {x!r} of type {type(x).__name__}."
        if inspect.isfunction(x) and x.__name__ == "<lambda>":
            raise TypeError(f"{message} Write `sl.Stateless(fn)`, with `fn(updates, params)`.")
        raise TypeError(f"{message}{uncalled(x)}")
