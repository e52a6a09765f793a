"""The methods that shape a transform, and the joint by which they reach the wrappers."""

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from ..where.resolve import WhereLike
from .advice import advise_keywords
from .declared import AbstractDeclared
from .fields import Hyperparameter
from .printing import constructor_call, method_call

if TYPE_CHECKING:
    import slalom

# The joint between a transform and its wrappers: each method imports, when it is called, the class
# that it returns. Those classes are subclasses of this one, in files above, so imports at the top
# would be a cycle. Only the arithmetic of schedules, in `schedule.py`, does the same.

# Every `self` here is an `AbstractTransform`, which is the only subclass of this class.
# pyright: reportArgumentType=false


class AbstractFluent(AbstractDeclared):
    """Methods that return a transform around, or after, this one."""

    fluent_method: ClassVar[str | None] = None
    """The method below that makes this transform from its `inner`. It prints as that call."""

    def _code(self) -> Any:
        if self.fluent_method is None:
            return constructor_call(self)
        inner = cast(Any, self).inner
        return method_call(self, inner, getattr(AbstractFluent, self.fluent_method))

    def __or__(self, other: "slalom.AbstractTransform") -> "slalom.AbstractTransform":
        """This transform, then the other."""
        from .chain import Chain

        return Chain.join(self, other)

    def __ror__(self, other: Any) -> "slalom.AbstractTransform":
        # Python comes here with what is no transform, which the chain refuses by name.
        from .chain import Chain

        return Chain.join(other, self)

    # --- on which leaves --------------------------------------------------------------------

    @advise_keywords
    def mask(self, where: WhereLike) -> "slalom.Masked":
        """This transform on the selected leaves; the others pass through unchanged.

        For links of a chain. As a whole optimizer the leaves that pass through would receive
        raw gradients: use `.only` there.

        **Arguments:**

        - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.

        **Returns:** a transform.
        """
        from ..wrappers import Masked

        return Masked(self, where)

    @advise_keywords
    def only(self, where: WhereLike) -> "slalom.Only":
        """This transform on the selected leaves; the others get no update at all.

        **Arguments:**

        - `where`: a selector, a function of the parameters to a tree of bools, or such a tree.

        **Returns:** a transform.
        """
        from ..wrappers import Only

        return Only(self, where)

    @advise_keywords
    def partition(
        self,
        others: Mapping[WhereLike, "slalom.AbstractTransform"],
        names: tuple[Hashable, ...] | None = None,
    ) -> "slalom.Partition":
        """Other transforms for some leaves, and this one for the rest.

        **Arguments:**

        - `others`: a mapping from selectors (or functions of the parameters) to transforms;
            where several match, the first one counts.
        - `names`: a name for each of the `others`, for paths; their positions without it.

        **Returns:** a transform.
        """
        from ..wrappers import Partition

        return Partition.by_cases(self, others, names)

    # --- in which form ----------------------------------------------------------------------

    @advise_keywords
    def flatten(self, max_size: int = 8192) -> "slalom.Flatten":
        """This transform on one buffer per dtype that holds all small leaves, end to end.

        **Arguments:**

        - `max_size`: how many numbers a leaf may have to be joined to others, an int ≥ 1.

        **Returns:** a transform.
        """
        from ..wrappers import Flatten

        return Flatten(self, max_size)

    @advise_keywords
    def split_complex(self) -> "slalom.SplitRealAndImaginary":
        """This transform on the real and imaginary parts of complex leaves, as two real ones.

        **Returns:** a transform.
        """
        from ..wrappers import SplitRealAndImaginary

        return SplitRealAndImaginary(self)

    # --- whether and when -------------------------------------------------------------------

    @advise_keywords
    def every_k(
        self,
        k: Any,
        *,
        mean: bool = True,
        accumulator_dtype: Any | None = None,
        skip: Callable[..., Any] | None = None,
    ) -> "slalom.EveryK":
        """This transform once in `k` mini-steps, on the mean of their gradients.

        **Arguments:**

        - `k`: how many mini-steps make a window: an int ≥ 1, or a schedule of the number of
            windows before, sampled at the window's start.
        - `mean`: the weighted mean of the window's gradients; `False` for their sum.
        - `accumulator_dtype`: the accumulator's dtype; at least float32 without it.
        - `skip`: which mini-batches to skip: `sl.SkipNotFinite()`, `sl.SkipLargeUpdates(c)`,
            several joined with `|`, or any function
            `(updates, gradient_step, params) -> (skip, report)`,
            where `gradient_step` is the number of updates made before, `skip` a bool scalar and
            `report` a dict of scalars for `opt.metrics`. Defaults to none.

        **Returns:** a transform.
        """
        from ..wrappers import EveryK

        return EveryK(self, k, mean=mean, accumulator_dtype=accumulator_dtype, skip=skip)

    @advise_keywords
    def if_finite(
        self,
        max_consecutive_errors: int = 5,
        on_limit: Literal["accept", "skip", "raise"] = "accept",
        check: Literal["grads", "both"] = "grads",
    ) -> "slalom.IfFinite":
        """This transform where the incoming gradients are finite; no update where they are not.

        **Arguments:**

        - `max_consecutive_errors`: how many steps in a row may be left out, an int ≥ 0.
        - `on_limit`: what happens at one more: `"accept"` applies it as it is, `"skip"` goes on
            leaving out, `"raise"` is an error at the step after.
        - `check`: `"grads"`, or `"both"` to look at the resulting updates too.

        **Returns:** a transform.
        """
        from ..wrappers import IfFinite

        return IfFinite(self, max_consecutive_errors, on_limit, check)

    @advise_keywords
    def when(
        self, condition: Callable[..., Any], otherwise: Literal["pass", "zero"] = "pass"
    ) -> "slalom.When":
        """This transform where a condition holds.

        **Arguments:**

        - `condition`: `condition(context, updates)`, which returns a bool scalar.
        - `otherwise`: what becomes of the updates where it does not hold: `"pass"` lets them
            through unchanged, `"zero"` makes no update.

        **Returns:** a transform.
        """
        from ..wrappers import When

        return When(self, condition, otherwise)

    # --- which parameters are evaluated -----------------------------------------------------

    @advise_keywords
    def lookahead(
        self, sync_period: int, slow_step_size: Hyperparameter, reset_state: bool = False
    ) -> "slalom.Lookahead":
        """This transform as the fast one of two: slow weights follow every few steps.

        **Arguments:**

        - `sync_period`: how many fast steps are made between two slow ones, an int ≥ 1.
        - `slow_step_size`: how far the slow weights go towards the fast ones, in [0, 1].
        - `reset_state`: whether this transform's state starts anew after each slow step.

        **Returns:** a transform, for the last place of a chain; `opt.eval_params(model)` gives
        the model with the slow weights.
        """
        from ..wrappers import Lookahead

        return Lookahead(self, sync_period, slow_step_size, reset_state)

    @advise_keywords
    def average(self, decay: Hyperparameter | None = None, debias: bool = True) -> "slalom.Average":
        """This transform, and beside it an average of the parameters it makes.

        **Arguments:**

        - `decay`: the decay of an exponential average, in [0, 1); a uniform one without it.
        - `debias`: whether the exponential average is one of the parameters seen so far, instead
            of one that starts at the first parameters.

        **Returns:** a transform, for the last place of a chain; `opt.eval_params(model)` gives
        the model with the average.
        """
        from ..wrappers import Average

        return Average(self, decay, debias)

    # --- in which set -----------------------------------------------------------------------

    @advise_keywords
    def project(self, fn: Callable[..., Any], where: WhereLike | None = None) -> "slalom.Projected":
        """This transform, and a projection of the parameters after each of its steps.

        **Arguments:**

        - `fn`: a function from a tree of parameters to a tree like it, such as those of
            `sl.projections`. It receives all selected parameters, in at least float32, and `None`
            at the others.
        - `where`: which parameters: a selector, a function or a tree of bools. Defaults to all.

        **Returns:** a transform, for the last place of a chain.
        """
        from ..wrappers import Projected

        return Projected(self, fn, where)

    # --- driven and recorded ----------------------------------------------------------------

    @advise_keywords
    def drive(self, schedules: Mapping[str, Any]) -> "slalom.Driven":
        """This transform with hyperparameters that follow schedules with a memory.

        **Arguments:**

        - `schedules`: a mapping from paths of hyperparameters, such as `"learning_rate"`, to
            stateful schedules such as `sl.schedules.ReduceOnPlateau`.

        **Returns:** a transform.
        """
        from ..wrappers import Driven

        return Driven(self, schedules)

    @advise_keywords
    def record(self) -> "slalom.Recorded":
        """This transform, with norms and hyperparameters as used in `opt.metrics`.

        **Returns:** a transform.
        """
        from ..wrappers import Recorded

        return Recorded(self)


FLUENT = frozenset(name for name, value in vars(AbstractFluent).items() if callable(value))
"""The names that no field of a transform may bear."""
