"""The methods that wrap a transform, such as `.mask` and `.every_k`."""

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
    """Methods that wrap a transform or chain it with another one."""

    fluent_method: ClassVar[str | None] = None
    """The method below that makes this transform from its `inner`. It prints as that call."""

    def _code(self) -> Any:
        if self.fluent_method is None:
            return constructor_call(self)
        inner = cast(Any, self).inner
        return method_call(self, inner, getattr(AbstractFluent, self.fluent_method))

    def __or__(self, other: "slalom.AbstractTransform") -> "slalom.AbstractTransform":
        """This transform, followed by another one."""
        from .chain import Chain

        return Chain.join(self, other)

    def __ror__(self, other: Any) -> "slalom.AbstractTransform":
        # `other` is not a transform. The chain raises an error that names it.
        from .chain import Chain

        return Chain.join(other, self)

    # --- selected leaves --------------------------------------------------------------------

    @advise_keywords
    def mask(self, where: WhereLike) -> "slalom.Masked":
        """Applies this transform to the selected leaves; the others pass through unchanged.

        Use it for links of a chain. For a whole optimizer, use `.only`: leaves that pass through
        would receive raw gradients as updates.

        **Arguments:**

        - `where`: a selector, a function of the parameters that returns a tree of bools, or such a
            tree.

        **Returns:** a transform.
        """
        from ..wrappers import Masked

        return Masked(self, where)

    @advise_keywords
    def only(self, where: WhereLike) -> "slalom.Only":
        """Applies this transform to the selected leaves; the others are not updated.

        **Arguments:**

        - `where`: a selector, a function of the parameters that returns a tree of bools, or such a
            tree.

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
        """Applies other transforms to some leaves, and this one to the rest.

        **Arguments:**

        - `others`: a mapping from selectors (or functions of the parameters) to transforms. If
            several selectors match a leaf, the first one is used.
        - `names`: a name for each of the `others`, which appears in paths. Defaults to their
            positions.

        **Returns:** a transform.
        """
        from ..wrappers import Partition

        return Partition.by_cases(self, others, names)

    # --- the objective ----------------------------------------------------------------------

    @advise_keywords
    def maximize(self) -> "slalom.Maximized":
        """Maximizes the loss with this transform, which descends by itself.

        **Returns:** a transform, for a whole model or for some of its parameters.
        """
        from ..wrappers import Maximized

        return Maximized(self)

    # --- layout -----------------------------------------------------------------------------

    @advise_keywords
    def flatten(self, max_size: int = 8192) -> "slalom.Flatten":
        """Applies this transform to all small leaves at once, concatenated into a buffer per dtype.

        **Arguments:**

        - `max_size`: the size of the largest leaves that are concatenated, an int ≥ 1.

        **Returns:** a transform.
        """
        from ..wrappers import Flatten

        return Flatten(self, max_size)

    @advise_keywords
    def split_complex(self) -> "slalom.SplitRealAndImaginary":
        """Applies this transform to the real and imaginary parts of complex leaves.

        **Returns:** a transform.
        """
        from ..wrappers import SplitRealAndImaginary

        return SplitRealAndImaginary(self)

    # --- precision --------------------------------------------------------------------------

    @advise_keywords
    def store(
        self, codec: Any, where: WhereLike | None = None, *, min_size: int = 4096
    ) -> "slalom.Stored":
        """Stores the state of this transform in fewer bits.

        **Arguments:**

        - `codec`: `"bfloat16"`, `"float16"`, `"float8_e4m3fn"`, `"int8"`, `"dynamic8"`, `"int4"`,
            or a codec of `sl.codecs`; or a mapping from fields of the state, such as `"mu"`, to
            them.
        - `where`: the parameters whose state is encoded: a selector, a function or a tree of
            bools. Defaults to all.
        - `min_size`: the number of entries from which a leaf is encoded, an int ≥ 1.

        **Returns:** a transform.
        """
        from ..wrappers import Stored

        return Stored(self, codec, where, min_size)

    # --- conditional updates ----------------------------------------------------------------

    @advise_keywords
    def every_k(
        self,
        k: Any,
        *,
        mean: bool = True,
        accumulator_dtype: Any | None = None,
        skip: Callable[..., Any] | None = None,
    ) -> "slalom.EveryK":
        """Applies this transform every `k` mini-steps, to the mean of their gradients.

        **Arguments:**

        - `k`: the number of mini-steps in a window: an int ≥ 1, or a schedule, which is called
            with the number of earlier windows at the start of each window.
        - `mean`: whether to use the weighted mean of the window's gradients, or their sum.
        - `accumulator_dtype`: the dtype of the accumulator. Defaults to float32 for
            half-precision leaves, and to the leaf's own dtype for wider ones.
        - `skip`: a condition for mini-batches to be skipped: `sl.SkipNotFinite()`,
            `sl.SkipLargeUpdates(max_squared_norm)`, several joined with `|`, or any function
            `(updates, gradient_step, params) -> (bool scalar, dict of scalars)`, where
            `gradient_step` is the number of updates so far. The dict appears in `opt.metrics`.

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
        """Applies this transform only in steps whose gradients are finite.

        **Arguments:**

        - `max_consecutive_errors`: the number of consecutive steps that may be skipped, an
            int ≥ 0.
        - `on_limit`: what happens in the next step that is not finite: `"accept"` applies it,
            `"skip"` continues to skip, `"raise"` raises an error at the following step.
        - `check`: `"grads"`, or `"both"` to check the resulting updates too.

        **Returns:** a transform.
        """
        from ..wrappers import IfFinite

        return IfFinite(self, max_consecutive_errors, on_limit, check)

    @advise_keywords
    def skip_spikes(
        self,
        sigma: Hyperparameter = 6.0,
        window: int = 128,
        by: Literal["both", "loss", "grad_norm"] = "both",
        max_consecutive: int = 20,
    ) -> "slalom.SkipSpikes":
        """Applies this transform only in steps whose loss and gradient norm are not far above
        their recent values.

        **Arguments:**

        - `sigma`: how many standard deviations above the mean are too far, > 0.
        - `window`: the number of recent values, an int ≥ 2.
        - `by`: what is compared: `"both"`, `"loss"` or `"grad_norm"`.
        - `max_consecutive`: the number of consecutive spikes that may be skipped, an int ≥ 1. The
            next one is accepted, as a new level.

        **Returns:** a transform.
        """
        from ..wrappers import SkipSpikes

        return SkipSpikes(self, sigma, window, by, max_consecutive)

    @advise_keywords
    def when(
        self, condition: Callable[..., Any], otherwise: Literal["pass", "zero"] = "pass"
    ) -> "slalom.When":
        """Applies this transform only in steps in which a condition holds.

        **Arguments:**

        - `condition`: a function `condition(context, updates)` that returns a bool scalar.
        - `otherwise`: the updates in other steps: `"pass"` leaves them unchanged, `"zero"` makes
            them zero.

        **Returns:** a transform.
        """
        from ..wrappers import When

        return When(self, condition, otherwise)

    @advise_keywords
    def scale_loss(
        self, initial: float | int = 2.0**15, growth_interval: int = 2000
    ) -> "slalom.ScaleLoss":
        """Scales the loss for gradients in float16, and skips steps that overflow.

        **Arguments:**

        - `initial`: the first scale, in [2⁻¹²⁶, 2¹²⁶].
        - `growth_interval`: the number of finite steps before the scale doubles, an int ≥ 1.

        **Returns:** a transform. `sl.train_step` scales the loss itself; in other loops, multiply
        it by `opt.loss_scale`.
        """
        from ..wrappers import ScaleLoss

        return ScaleLoss(self, initial, growth_interval)

    # --- another gradient -------------------------------------------------------------------

    @advise_keywords
    def sam(
        self, rho: Hyperparameter = 0.05, adaptive: bool = False, every: int = 1
    ) -> "slalom.Sam":
        """Gives this transform the gradient at the worst point nearby (SAM).

        **Arguments:**

        - `rho`: the size of the neighborhood, ≥ 0.
        - `adaptive`: whether the neighborhood scales with the parameters (ASAM).
        - `every`: the number of steps from one perturbation to the next, an int ≥ 1.

        **Returns:** a transform. `sl.train_step` computes the second gradient. By hand, pass the
        loss as a function of the model, as `value_fn`, to `opt.step`.
        """
        from ..wrappers import Sam

        return Sam(self, rho, adaptive, every)

    # --- parameters for evaluation ----------------------------------------------------------

    @advise_keywords
    def outer(
        self, optimizer: "slalom.AbstractTransform", every: int, reset_state: bool = False
    ) -> "slalom.Outer":
        """Keeps slow weights, which another optimizer steps towards this transform's parameters.

        **Arguments:**

        - `optimizer`: the transform that makes the slow steps, such as
            `sl.sgd(0.7, momentum=0.9, nesterov=True)`.
        - `every`: the number of fast steps between two slow ones, an int ≥ 1.
        - `reset_state`: whether to reset this transform's state after each slow step.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the slow weights.
        """
        from ..wrappers import Outer

        return Outer(self, optimizer, every, reset_state)

    @advise_keywords
    def lookahead(
        self, sync_period: int, slow_step_size: Hyperparameter, reset_state: bool = False
    ) -> "slalom.Outer":
        """Keeps slow weights that move towards this transform's parameters every few steps.

        This is `tx.outer(sl.sgd(slow_step_size), sync_period)`.

        **Arguments:**

        - `sync_period`: the number of fast steps between two slow ones, an int ≥ 1.
        - `slow_step_size`: the fraction of the way to the fast weights that the slow weights
            move, in [0, 1].
        - `reset_state`: whether to reset this transform's state after each slow step.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the slow weights.
        """
        from ..wrappers.outer import lookahead

        return lookahead(self, sync_period, slow_step_size, reset_state)

    @advise_keywords
    def average(self, decay: Hyperparameter | None = None, debias: bool = True) -> "slalom.Average":
        """Keeps an average of the parameters that this transform produces.

        **Arguments:**

        - `decay`: the decay of an exponential average, in [0, 1). Defaults to a uniform average.
        - `debias`: whether the exponential average is corrected for its start at zero. If not, it
            starts at the first parameters.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the average.
        """
        from ..wrappers import Average

        return Average(self, decay, debias)

    @advise_keywords
    def schedule_free(
        self,
        b1: Hyperparameter = 0.9,
        weight_lr_power: Hyperparameter = 2.0,
        r: Hyperparameter = 0.0,
        state_dtype: Any | None = None,
    ) -> "slalom.ScheduleFree":
        """Averages the iterates of this transform, in place of a decaying learning rate.

        **Arguments:**

        - `b1`: the weight of the average in the parameters at which gradients are taken, in (0, 1].
        - `weight_lr_power`: the power of the learning rate that weighs the steps in the average,
            ≥ 0.
        - `r`: the power of the step that weighs them, ≥ 0.
        - `state_dtype`: the dtype of the iterates. Defaults to the parameter's dtype, but at least
            float32.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the average.
        """
        from ..wrappers import ScheduleFree

        return ScheduleFree(self, b1, weight_lr_power, r, state_dtype)

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

    # --- half precision ---------------------------------------------------------------------

    @advise_keywords
    def write(
        self,
        policy: Literal["master", "kahan", "ecc", "stochastic", "nearest"],
        key: Any = 0,
    ) -> "slalom.Written":
        """This transform, with a policy for writing half-precision parameters.

        **Arguments:**

        - `policy`: what keeps small updates from being rounded away: `"master"`, a float32 copy;
            `"kahan"`, a compensation in the parameter's dtype; `"ecc"`, eight more bits;
            `"stochastic"`, rounding at random; or `"nearest"`, nothing.
        - `key`: the key of the random rounding, an int in [0, 2³¹) or a PRNG key.

        **Returns:** a transform, which must be the last link of a chain.
        """
        from ..wrappers import Written

        return Written(self, policy, key)

    # --- a learned scale --------------------------------------------------------------------

    @advise_keywords
    def mechanize(
        self,
        weight_decay: Hyperparameter = 1e-2,
        eps: Hyperparameter = 1e-8,
        s_init: Hyperparameter = 1e-6,
        num_betas: int = 6,
    ) -> "slalom.Mechanized":
        """Learns a scale of this transform's updates while training (Mechanic).

        **Arguments:**

        - `weight_decay`: the coefficient of a weight decay that only Mechanic sees, ≥ 0.
        - `eps`: a small number that keeps divisors positive, > 0.
        - `s_init`: the first scale, > 0.
        - `num_betas`: the number of decays that it chooses from, an int ≥ 1.

        **Returns:** a transform.
        """
        from ..wrappers import Mechanized

        return Mechanized(self, weight_decay, eps, s_init, num_betas)

    # --- stateful schedules and metrics -----------------------------------------------------

    @advise_keywords
    def drive(self, schedules: Mapping[str, Any]) -> "slalom.Driven":
        """Sets hyperparameters of this transform by stateful schedules.

        **Arguments:**

        - `schedules`: a mapping from paths of hyperparameters, such as `"learning_rate"`, to
            stateful schedules such as `sl.schedules.ReduceOnPlateau`.

        **Returns:** a transform.
        """
        from ..wrappers import Driven

        return Driven(self, schedules)

    @advise_keywords
    def record(self) -> "slalom.Recorded":
        """Reports norms and the hyperparameters in use in `opt.metrics`.

        **Returns:** a transform.
        """
        from ..wrappers import Recorded

        return Recorded(self)


FLUENT = frozenset(name for name, value in vars(AbstractFluent).items() if callable(value))
"""The names that fields of transforms must not have."""
