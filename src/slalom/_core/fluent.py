"""The methods that shape a transform, and the joint by which they reach the wrappers."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

from ..where.resolve import WhereLike
from .declared import AbstractDeclared
from .fields import Hyperparameter
from .printing import constructor_call, method_call

_Class = TypeVar("_Class")
_Transform = TypeVar("_Transform")


class AbstractFluent(AbstractDeclared, Generic[_Transform]):
    """Methods that return a transform around, or after, this one."""

    fluent_method: ClassVar[str | None] = None
    """The method below that makes this transform from its `inner`. It prints as that call."""

    def _code(self) -> Any:
        if self.fluent_method is None:
            return constructor_call(self)
        inner = cast(Any, self).inner
        return method_call(self, inner, getattr(AbstractFluent, self.fluent_method))

    def __or__(self, other: _Transform) -> _Transform:
        """This transform, then the other."""
        return _wrapper("Chain").join(self, other)

    def __ror__(self, other: Any) -> _Transform:
        # Python comes here with what is no transform, which the chain refuses by name.
        return _wrapper("Chain").join(other, self)

    # --- on which leaves --------------------------------------------------------------------

    def mask(self, where: WhereLike) -> _Transform:
        """This transform on the selected leaves; the others pass through unchanged.

        For links of a chain. As a whole optimizer the leaves that pass through would receive
        raw gradients: use `.only` there.

        **Arguments:**

        - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.

        **Returns:** a transform.
        """
        return _wrapper("Masked")(self, where)

    def only(self, where: WhereLike) -> _Transform:
        """This transform on the selected leaves; the others get no update at all.

        **Arguments:**

        - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.

        **Returns:** a transform.
        """
        return _wrapper("Only")(self, where)

    def partition(
        self,
        others: Mapping[WhereLike, _Transform],
        names: tuple[Hashable, ...] | None = None,
    ) -> _Transform:
        """Other transforms for some leaves, and this one for the rest.

        **Arguments:**

        - `others`: a mapping from selectors (or functions of the parameters) to transforms;
            where several match, the first one counts.
        - `names`: a name for each of the `others`, for paths; their positions without it.

        **Returns:** a transform.
        """
        return _wrapper("Partition").by_cases(self, others, names)

    # --- in which form ----------------------------------------------------------------------

    def flatten(self, max_size: int = 8192) -> _Transform:
        """This transform on one buffer per dtype that holds all small leaves, end to end.

        **Arguments:**

        - `max_size`: how many numbers a leaf may have to be joined to others, an int ≥ 1.

        **Returns:** a transform.
        """
        return _wrapper("Flatten")(self, max_size)

    def split_complex(self) -> _Transform:
        """This transform on the real and imaginary parts of complex leaves, as two real ones.

        **Returns:** a transform.
        """
        return _wrapper("SplitRealAndImaginary")(self)

    # --- whether and when -------------------------------------------------------------------

    def every_k(
        self,
        k: Any,
        *,
        mean: bool = True,
        accumulator_dtype: Any | None = None,
        skip: Callable[..., Any] | None = None,
    ) -> _Transform:
        """This transform once in `k` mini-steps, on the mean of their gradients.

        **Arguments:**

        - `k`: how many mini-steps make a window: an int ≥ 1, or a schedule of the number of
            windows before, sampled at the window's start.
        - `mean`: the weighted mean of the window's gradients; `False` for their sum.
        - `accumulator_dtype`: the accumulator's dtype; at least float32 without it.
        - `skip`: which mini-batches are left out, as if they had not been: `sl.SkipNotFinite()`,
            `sl.SkipLargeUpdates(max_squared_norm)`, several joined with `|`, or any function
            `(updates, gradient_step, params) -> (bool scalar, dict of scalars)`, where `gradient_step` counts
            the updates emitted before. The dict appears in `opt.metrics`.

        **Returns:** a transform.
        """
        return _wrapper("EveryK")(
            self, k, mean=mean, accumulator_dtype=accumulator_dtype, skip=skip
        )

    def if_finite(
        self,
        max_consecutive_errors: int = 5,
        on_limit: Literal["accept", "skip", "raise"] = "accept",
        check: Literal["grads", "both"] = "grads",
    ) -> _Transform:
        """This transform where the incoming gradients are finite; no update where they are not.

        **Arguments:**

        - `max_consecutive_errors`: how many steps in a row may be left out, an int ≥ 0.
        - `on_limit`: what happens at one more: `"accept"` applies it as it is, `"skip"` goes on
            leaving out, `"raise"` is an error at the step after.
        - `check`: `"grads"`, or `"both"` to look at the resulting updates too.

        **Returns:** a transform.
        """
        return _wrapper("IfFinite")(self, max_consecutive_errors, on_limit, check)

    def when(
        self, condition: Callable[..., Any], otherwise: Literal["pass", "zero"] = "pass"
    ) -> _Transform:
        """This transform where a condition holds.

        **Arguments:**

        - `condition`: `condition(context, updates)`, which returns a bool scalar.
        - `otherwise`: what becomes of the updates where it does not hold: `"pass"` lets them
            through unchanged, `"zero"` makes no update.

        **Returns:** a transform.
        """
        return _wrapper("When")(self, condition, otherwise)

    # --- which parameters are evaluated -----------------------------------------------------

    def lookahead(
        self, sync_period: int, slow_step_size: Hyperparameter, reset_state: bool = False
    ) -> _Transform:
        """This transform as the fast one of two: slow weights follow every few steps.

        **Arguments:**

        - `sync_period`: how many fast steps are made between two slow ones, an int ≥ 1.
        - `slow_step_size`: how far the slow weights go towards the fast ones, in [0, 1].
        - `reset_state`: whether this transform's state starts anew after each slow step.

        **Returns:** a transform, for the last place of a chain; `opt.eval_params(model)` gives
        the model with the slow weights.
        """
        return _wrapper("Lookahead")(self, sync_period, slow_step_size, reset_state)

    def average(self, decay: Hyperparameter | None = None, debias: bool = True) -> _Transform:
        """This transform, and beside it an average of the parameters it makes.

        **Arguments:**

        - `decay`: the decay of an exponential average, in [0, 1); a uniform one without it.
        - `debias`: whether the exponential average is one of the parameters seen so far, instead
            of one that starts at the first parameters.

        **Returns:** a transform, for the last place of a chain; `opt.eval_params(model)` gives
        the model with the average.
        """
        return _wrapper("Average")(self, decay, debias)

    # --- driven and recorded ----------------------------------------------------------------

    def drive(self, schedules: Mapping[str, Any]) -> _Transform:
        """This transform with hyperparameters that follow schedules with a memory.

        **Arguments:**

        - `schedules`: a mapping from paths of hyperparameters, such as `"learning_rate"`, to
            stateful schedules such as `sl.schedules.ReduceOnPlateau`.

        **Returns:** a transform.
        """
        return _wrapper("Driven")(self, schedules)

    def record(self) -> _Transform:
        """This transform, with norms and hyperparameters as used in `opt.metrics`.

        **Returns:** a transform.
        """
        return _wrapper("Recorded")(self)


FLUENT = frozenset(name for name, value in vars(AbstractFluent).items() if callable(value))
"""The names that no field of a transform may bear."""


# --- the one joint --------------------------------------------------------------------------
# The methods above return wrappers, which are subclasses and so stand in files above this one.
# Importing them here would be a cycle, inside a function as much as at the top. Instead each
# wrapper enters itself below when its file is imported, which `slalom/__init__.py` does.

_wrappers: dict[str, Any] = {}


def fluent(cls: type[_Class]) -> type[_Class]:
    """Class decorator: makes a wrapper known to the method above that builds it."""
    _wrappers[cls.__name__] = cls
    return cls


def _wrapper(name: str) -> Any:
    return _wrappers[name]
