"""The base classes of schedules, and how a step reads them. The schedules are in `schedules/`."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...tree.dtypes import as_float
from ...tree.types import PyTree, Scalar, Step, Tracer, captured
from ..protocol.context import Context
from ..protocol.parts import CHECK, AbstractDeclared
from ..text.calls import advise_positions, call, check_takes
from ..text.figures import make_figure
from ..text.messages import NEEDS_A_VALUE, as_int, check_int, library, uncalled
from ..text.printing import as_module

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    import slalom

KIND = "slalom.kind"
"""The key of a field's kind in its metadata."""

HYPERPARAMETER, STEPS = "hyperparameter", "steps"
"""The kinds of the fields that users read and replace as hyperparameters."""

_advise_step = advise_positions(
    "A schedule is a function of the step: write `schedule(100)`. An optimizer takes the schedule "
    "itself: `sl.adam(schedule)`.",
    "schedule",
)


class AbstractSchedule(AbstractDeclared):
    """A hyperparameter as a function of the step: update n uses `schedule(n)`, from n = 0.

    A schedule has no state. Its numbers are leaves, so changing them never recompiles.

    Schedules support `+`, `-`, `*` and `/` with each other, with numbers and with functions of
    the step.

    ```python
    >>> s = sl.schedules.linear(1.0, 0.0, transition_steps=4)
    >>> 0.1 * s
    0.1 * sl.schedules.linear(init_value=1.0, end_value=0.0, transition_steps=4)
    >>> (1 - s * s).values(3)
    Array([0.    , 0.4375, 0.75  ], dtype=float32)

    ```
    """

    takes_schedules: ClassVar[bool] = False
    """Whether the numbers of this schedule may themselves be schedules."""

    # NumPy arrays to the left of an operator then defer to the methods below.
    __array_ufunc__ = None

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _advise_step(cls.__call__)

    def __check_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            inner = CHECK in field.metadata and isinstance(value, AbstractSchedule)
            if inner and not self.takes_schedules:
                raise TypeError(
                    f"{type(self).__name__}.{field.name} must be a number, got the schedule "
                    f"{value!r}. To combine schedules, use arithmetic, `s * t`, or "
                    "`s.then(t, at=step)`."
                )

    @abc.abstractmethod
    def __call__(self, step: Step) -> Scalar:
        """The value at `step`.

        **Arguments:**

        - `step`: the number of updates before this one, an int or a 0-d integer array, ≥ 0.

        **Returns:** a 0-d floating array.
        """

    def values(self, n: int) -> Float[Array, " n"]:
        """The first `n` values, exactly as the first `n` updates use them.

        **Arguments:**

        - `n`: the number of values, an int ≥ 0.

        **Returns:** a vector of length `n`.

        ```python
        >>> sl.schedules.linear(init_value=1.0, end_value=0.0, transition_steps=4).values(5)
        Array([1.  , 0.75, 0.5 , 0.25, 0.  ], dtype=float32)

        ```
        """
        check_int("The number of values of a schedule", as_int(n), 0)
        return jax.vmap(lambda step: self(step))(jnp.arange(n, dtype=jnp.int32))

    def plot(self, steps: int) -> "Figure":
        """Plots the first values with matplotlib.

        **Arguments:**

        - `steps`: the number of values, an int ≥ 1.

        **Returns:** a `matplotlib.figure.Figure` with one axes, `.axes[0]`. `.savefig(path)` saves
        it, and a notebook shows it.

        **Raises:** `ImportError` without matplotlib.
        """
        figure, (axes,) = make_figure("schedule.plot", size=(6.4, 3.2))
        axes.plot(np.arange(steps), np.asarray(self.values(steps)))
        axes.set(xlabel="step", ylabel="value")
        return figure

    def then(self, other: object, *, at: Step) -> "AbstractSchedule":
        """This schedule until step `at`, and another one from then on.

        **Arguments:**

        - `other`: a schedule, a function of the step, or a number. Its own steps start from 0.
        - `at`: the first step of `other`, an int larger than the `at` of any earlier `.then`.

        **Returns:** `sl.schedules.join([self, other], [at])`.

        ```python
        >>> warmup = sl.schedules.linear(0.0, 1.0, transition_steps=2)
        >>> warmup.then(sl.schedules.linear(1.0, 0.0, 4), at=2).values(5)
        Array([0.  , 0.5 , 1.  , 0.75, 0.5 ], dtype=float32)

        ```
        """
        return library.schedules.join.after(self, other, at)

    def __add__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("+", self, other)

    def __radd__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("+", other, self)

    def __sub__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("-", self, other)

    def __rsub__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("-", other, self)

    def __mul__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("*", self, other)

    def __rmul__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("*", other, self)

    def __truediv__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("/", self, other)

    def __rtruediv__(self, other: Any) -> "slalom.schedules.CombinedSchedule":
        return library.schedules.CombinedSchedule("/", other, self)

    def __neg__(self) -> "slalom.schedules.NegatedSchedule":
        return library.schedules.NegatedSchedule(self)


class AbstractStatefulSchedule(AbstractDeclared):
    """A schedule with state, such as one that lowers the learning rate on a plateau.

    A stateful schedule cannot be passed as a hyperparameter. Use
    `tx.drive({"learning_rate": schedule})`, which keeps its state and sets the hyperparameter to
    its value.

    ```python
    >>> class Warmer(sl.schedules.AbstractStatefulSchedule):
    ...     needs = ("value",)
    ...     def init(self):
    ...         return jnp.zeros(())
    ...     def update(self, state, context):
    ...         return 0.9 * state + 0.1 * context.value
    ...     def value(self, state):
    ...         return 0.1 / (1.0 + state)
    >>> tx = sl.sgd(0.1).drive({"learning_rate": Warmer()})

    ```
    """

    _refuses_calls: ClassVar[bool] = True

    needs: ClassVar[tuple[str, ...]] = ()
    """The entries of the context that `update` requires, such as `"value"`."""

    if not TYPE_CHECKING:  # a type checker would otherwise accept calls

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            name = type(self).__name__
            raise TypeError(
                f"{name} follows the run, so the step alone does not determine its value. Write "
                f'`tx.drive({{"learning_rate": {name}(...)}})`, which updates it at each step.'
            )

    @abc.abstractmethod
    def init(self) -> PyTree:
        """The initial state.

        **Returns:** a tree of arrays.
        """

    @abc.abstractmethod
    def update(self, state: PyTree, context: Context) -> PyTree:
        """Updates the state at the beginning of a step.

        **Arguments:**

        - `state`: the state that `init` or the last `update` returned.
        - `context`: the `sl.Context` of the step.

        **Returns:** the new state, with the same structure, shapes and dtypes.
        """

    @abc.abstractmethod
    def value(self, state: PyTree) -> Scalar:
        """The hyperparameter.

        **Arguments:**

        - `state`: the state that `update` returned.

        **Returns:** a 0-d floating array.
        """


class FunctionSchedule(AbstractSchedule):
    """A function or callable module of the step as a schedule. Hyperparameters wrap functions
    automatically.

    **Arguments:**

    - `function`: from a traced int32 scalar to one number. The arrays of a callable module remain
        leaves.
    """

    function: Callable[[Any], Any] = eqx.field(converter=as_module)

    def __call__(self, step: Step) -> Scalar:
        return as_float(call_schedule(self, self.function, jnp.asarray(step, jnp.int32)))

    def _code(self) -> object:
        return self.function


def as_schedule(function: Callable[..., Any]) -> AbstractSchedule:
    """A schedule from a function or callable module of the step. Schedules are returned as is."""
    if isinstance(function, AbstractSchedule):
        return function
    if isinstance(function, type):
        raise TypeError(f"The class {function!r} is not a schedule.{uncalled(function)}")
    if type(function).__module__.startswith("equinox.nn"):
        raise TypeError(
            f"A {type(function).__name__} is a model, not a schedule. Bind it to the optimizer: "
            "`opt = sl.Optimizer(sl.adam(1e-3), model)`."
        )
    check_takes("A schedule", function, "step")
    is_plain = jax.tree_util.all_leaves([function])
    if is_plain and any(isinstance(x, Tracer) for x in _captured(function)):
        raise TypeError(
            f"The schedule {function!r} closes over a traced value, which would outlive its trace. "
            "Write it as arithmetic, `lr * sl.schedules.constant(1.0)`, or make the value an "
            "argument: `jax.tree_util.Partial(schedule, lr=lr)`, or a field of an `eqx.Module`."
        )
    return FunctionSchedule(function)


def _captured(function: object, depth: int = 4) -> Iterator[Any]:
    """The values that a function holds: its closure, defaults and bound arguments."""
    held = list(captured(function).values())
    held += getattr(function, "__defaults__", None) or ()
    held += (getattr(function, "__kwdefaults__", None) or {}).values()
    if isinstance(function, functools.partial):
        held += [function.func, *function.args, *function.keywords.values()]
    held.append(getattr(function, "__self__", None))
    for value in held:
        for leaf in jax.tree.leaves(value):
            yield leaf
            if depth and callable(leaf):
                yield from _captured(leaf, depth - 1)


def call_schedule(schedule: object, function: Callable[..., Any], step: Any, **others: Any) -> Any:
    """The value of a schedule at a step. Anything but a real number is refused.

    **Arguments:**

    - `schedule`: for messages, the schedule, or the name of another function of the step.
    - `function`: the function to call.
    - `step`, `others`: its arguments.
    """
    try:
        name = schedule if isinstance(schedule, str) else "A schedule"
        value = call(name, function, step=step, **others)
    except jax.errors.TracerBoolConversionError as error:
        raise TypeError(
            f"{_named(schedule)} branches in Python on the step, which is traced. "
            "Instead of `a if step < n else b`, write `jnp.where(step < n, a, b)`."
        ) from error
    except NEEDS_A_VALUE as error:
        raise TypeError(
            f"{_named(schedule)} needs the value of the step, which is traced. Instead of "
            "`math` and `numpy`, use `jax.numpy`. Instead of `values[step]`, write "
            "`jnp.array(values)[step]`. Do not call `int` or `float` on the step."
        ) from error
    return check_schedule_value(schedule, value, step)


def count_at(count: object, step: Any) -> Any:
    """A count at a step: an int, or a schedule, which is rounded to the nearest integer ≥ 1."""
    if not isinstance(count, AbstractSchedule):
        return count
    return jnp.maximum(jnp.round(call_schedule(count, count, step)).astype(jnp.int32), 1)


def check_schedule_value(schedule: object, value: Any, step: Any) -> Any:
    """Raises an error unless the value is one real number, or one for each of several runs."""
    kind = jnp.result_type(value) if isinstance(value, _NUMBERS) else type(value).__name__
    must = "it returns" if isinstance(schedule, str) else "a schedule returns"
    if not isinstance(value, _NUMBERS):
        raise TypeError(
            f"{_named(schedule)} returned {value!r} of type {kind}; {must} one number for one step."
        )
    if jnp.iscomplexobj(value):
        raise TypeError(f"{_named(schedule)} returned a {kind} number; {must} a real one.")
    if np.shape(value) not in ((), np.shape(step)):
        raise ValueError(
            f"{_named(schedule)} returned an array of shape {np.shape(value)}; {must} one number "
            "for one step."
        )
    return value


_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float)


def _named(schedule: object) -> str:
    return schedule if isinstance(schedule, str) else f"The schedule {schedule!r}"


# --- the hyperparameters of a step ----------------------------------------------------------


def hyperparameter_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The real-valued fields of a class or instance, in order."""
    return [f for f in dataclasses.fields(cls) if f.metadata.get(KIND) in (HYPERPARAMETER, STEPS)]


def read_numbers(module: AbstractDeclared, context: Context | None) -> dict[str, Scalar | None]:
    """All hyperparameters of a module, as `read_number` reads them."""
    return {f.name: read_number(module, f.name, context) for f in hyperparameter_fields(module)}


def read_number(module: AbstractDeclared, name: str, context: Context | None) -> Scalar | None:
    """A field of a transform or skip condition as this step uses it, in the dtype it has."""
    value = getattr(module, name)
    if isinstance(value, AbstractSchedule):
        step = None if context is None else context.step
        if step is None:
            raise TypeError(
                f"{type(module).__name__}.{name} is a schedule and needs the step count: pass "
                "`context=sl.Context(step=n)` with the number of updates so far. In code for "
                "Optax, `sl.interop.to_optax(tx)` counts them."
            )
        value = call_schedule(value, value, step)
    return None if value is None else as_float(value)
