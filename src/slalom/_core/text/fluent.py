"""The methods that wrap a transform, such as `.mask` and `.every_k`.

A method and the class that it returns share a name: `.every_k` returns a `wrappers.EveryK`. The
method has the signature and describes the arguments, for editors and type checkers; the class
describes what it computes. A test compares the two signatures.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from ...tree.paths import snake_case
from ...where.resolve import WhereLike
from ..fields.declare import Hyperparameter
from ..protocol.parts import AbstractDeclared
from .advice import advise_keywords
from .printing import constructor_call, method_call

if TYPE_CHECKING:
    import slalom

_PACKAGE = __name__.partition(".")[0]

# The one circle of the library closes here, when a method is called, and not when it is imported.
# Every transform has these methods, and each method needs the class that it returns, which is a
# transform. So the methods import their classes when they are called. (The arithmetic of schedules
# in `schedule.py` does the same.) `tests/core/test_import_graph.py` allows it in no other file.

# Every `self` here is an `AbstractTransform`, which is the only subclass of this class.
# pyright: reportArgumentType=false


class AbstractFluent(AbstractDeclared):
    """The methods of every transform that make a chain or a wrapper of it. They are a class of
    their own only to keep `transform.py` short."""

    def _code(self) -> Any:
        # The wrappers of the library print as calls of the methods that make them.
        cls = type(self)
        own = cls.__module__.startswith(f"{_PACKAGE}.wrappers.")
        method = getattr(AbstractFluent, snake_case(cls.__name__), None) if own else None
        if method is None:
            return constructor_call(self)
        return method_call(self, cast(Any, self).inner, method)

    def __or__(self, other: "slalom.AbstractTransform") -> "slalom.AbstractTransform":
        """This transform, followed by another one."""
        from ..protocol.chain import Chain

        return Chain.join(self, other)

    def __ror__(self, other: Any) -> "slalom.AbstractTransform":
        # `other` is not a transform. The chain raises an error that names it.
        from ..protocol.chain import Chain

        return Chain.join(other, self)

    # --- selected leaves --------------------------------------------------------------------

    @advise_keywords
    def mask(self, where: WhereLike) -> "slalom.wrappers.Mask":
        """Applies this transform to the selected leaves; the others pass through unchanged.

        Use it for links of a chain. For a whole optimizer, use `.only`: leaves that pass through
        would receive raw gradients as updates.

        **Arguments:**

        - `where`: a selector, a function of the parameters that returns a tree of bools, or such a
            tree.

        **Returns:** a transform.
        """
        from ...wrappers import Mask

        return Mask(self, where)

    @advise_keywords
    def only(self, where: WhereLike) -> "slalom.wrappers.Only":
        """Applies this transform to the selected leaves; the others are not updated.

        **Arguments:**

        - `where`: as for `mask`.

        **Returns:** a transform.
        """
        from ...wrappers import Only

        return Only(self, where)

    @advise_keywords
    def partition(
        self,
        others: Mapping[WhereLike, "slalom.AbstractTransform"],
        names: tuple[Hashable, ...] | None = None,
    ) -> "slalom.wrappers.Partition":
        """Applies other transforms to some leaves, and this one to the rest.

        **Arguments:**

        - `others`: a mapping from selectors (or functions of the parameters) to transforms. If
            several selectors match a leaf, the first one is used.
        - `names`: a name for each of the `others`, which appears in paths. Defaults to their
            positions.

        **Returns:** a transform.
        """
        from ...wrappers import Partition

        return Partition.by_cases(self, others, names)

    # --- the objective ----------------------------------------------------------------------

    @advise_keywords
    def maximize(self) -> "slalom.wrappers.Maximize":
        """Maximizes the loss with this transform, which descends by itself.

        **Returns:** a transform, for a whole model or for some of its parameters.
        """
        from ...wrappers import Maximize

        return Maximize(self)

    # --- layout -----------------------------------------------------------------------------

    @advise_keywords
    def flatten(self, max_size: int = 8192) -> "slalom.wrappers.Flatten":
        """Applies this transform to all small leaves at once, concatenated into a buffer per dtype.

        **Arguments:**

        - `max_size`: the size of the largest leaves that are concatenated, an int ≥ 1.

        **Returns:** a transform.
        """
        from ...wrappers import Flatten

        return Flatten(self, max_size)

    @advise_keywords
    def split_complex(self) -> "slalom.wrappers.SplitComplex":
        """Applies this transform to the real and imaginary parts of complex leaves.

        **Returns:** a transform.
        """
        from ...wrappers import SplitComplex

        return SplitComplex(self)

    # --- precision --------------------------------------------------------------------------

    @advise_keywords
    def store(
        self, codec: Any, where: WhereLike | None = None, *, min_size: int = 4096
    ) -> "slalom.wrappers.Store":
        """Stores the state of this transform in fewer bits.

        **Arguments:**

        - `codec`: `"bfloat16"`, `"float16"`, `"float8_e4m3fn"`, `"int8"`, `"dynamic8"`, `"int4"`,
            or a codec of `sl.codecs`; or a mapping from fields of the state to them. A field is
            named by its path, such as `"scale_by_adam.mu"`, a suffix of it, or a glob.
        - `where`: the parameters whose state is encoded: a selector, a function or a tree of
            bools. Defaults to all.
        - `min_size`: the number of entries from which a leaf is encoded, an int ≥ 1.

        **Returns:** a transform.
        """
        from ...wrappers import Store

        return Store(self, codec, where, min_size)

    @advise_keywords
    def write(
        self,
        policy: Literal["master", "kahan", "ecc", "stochastic", "nearest"],
        key: Any = 0,
    ) -> "slalom.wrappers.Write":
        """Writes half-precision parameters so that small updates are not rounded away.

        **Arguments:**

        - `policy`: what keeps small updates: `"master"`, a float32 copy of the parameters;
            `"kahan"`, a compensation in the parameter's dtype; `"ecc"`, eight more bits;
            `"stochastic"`, rounding at random; or `"nearest"`, nothing.
        - `key`: the key of the random rounding, an int in [0, 2³¹) or a PRNG key.

        **Returns:** a transform, which must be the last link of a chain.
        """
        from ...wrappers import Write

        return Write(self, policy, key)

    # --- conditional updates ----------------------------------------------------------------

    @advise_keywords
    def every_k(
        self,
        k: Any,
        *,
        mean: bool = True,
        accumulator_dtype: Any | None = None,
        skip: Callable[..., Any] | None = None,
    ) -> "slalom.wrappers.EveryK":
        """Applies this transform every `k` mini-steps, to the mean of their gradients.

        **Arguments:**

        - `k`: the number of mini-steps in a window: an int ≥ 1, or a schedule, which is called
            with the number of earlier windows at the start of each window, and rounded. It is a
            hyperparameter: `opt.with_hyperparams(k=8)` does not recompile.
        - `mean`: whether to use the weighted mean of the window's gradients, or their weighted sum.
        - `accumulator_dtype`: the dtype of the accumulator. Defaults to float32 for
            half-precision leaves, and to the leaf's own dtype for wider ones.
        - `skip`: a condition for mini-batches to be skipped: `sl.SkipNotFinite()`,
            `sl.SkipLargeUpdates(max_squared_norm)`, several joined with `|`, or any function
            `(updates, gradient_step, params) -> (bool scalar, dict of scalars)`, where
            `gradient_step` is the number of updates so far. The dict appears in `opt.metrics`.
            Defaults to none.

        **Returns:** a transform.
        """
        from ...wrappers import EveryK

        return EveryK(self, k, mean=mean, accumulator_dtype=accumulator_dtype, skip=skip)

    @advise_keywords
    def if_finite(
        self,
        max_consecutive_errors: int = 5,
        on_limit: Literal["accept", "skip", "raise"] = "accept",
        check: Literal["grads", "both"] = "grads",
    ) -> "slalom.wrappers.IfFinite":
        """Applies this transform only in steps whose gradients are finite.

        **Arguments:**

        - `max_consecutive_errors`: the number of consecutive steps that may be skipped, an
            int ≥ 0.
        - `on_limit`: what happens in the next step that is not finite: `"accept"` applies it,
            `"skip"` continues to skip, `"raise"` raises an error at the following step.
        - `check`: `"grads"`, or `"both"` to check the resulting updates too.

        **Returns:** a transform.
        """
        from ...wrappers import IfFinite

        return IfFinite(self, max_consecutive_errors, on_limit, check)

    @advise_keywords
    def skip_spikes(
        self,
        sigma: Hyperparameter = 6.0,
        window: int = 128,
        by: Literal["both", "loss", "grad_norm"] = "both",
        max_consecutive: int = 20,
    ) -> "slalom.wrappers.SkipSpikes":
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
        from ...wrappers import SkipSpikes

        return SkipSpikes(self, sigma, window, by, max_consecutive)

    @advise_keywords
    def when(
        self, condition: Callable[..., Any], otherwise: Literal["pass", "zero"] = "pass"
    ) -> "slalom.wrappers.When":
        """Applies this transform only in steps in which a condition holds.

        **Arguments:**

        - `condition`: a function `condition(context, updates)` that returns a bool scalar. It is
            called in every step. `context.step` is the step count.
        - `otherwise`: the updates in other steps: `"pass"` leaves them unchanged, `"zero"` makes
            them zero.

        **Returns:** a transform.
        """
        from ...wrappers import When

        return When(self, condition, otherwise)

    @advise_keywords
    def scale_loss(
        self, initial: float | int = 2.0**15, growth_interval: int = 2000
    ) -> "slalom.wrappers.ScaleLoss":
        """Scales the loss for gradients in float16, and skips steps that overflow.

        **Arguments:**

        - `initial`: the first scale, in [2⁻¹²⁶, 2¹²⁶]. Powers of two round nothing.
        - `growth_interval`: the number of finite steps before the scale doubles, an int ≥ 1.

        **Returns:** a transform. `sl.train_step` scales the loss itself; in other loops, multiply
        it by `opt.loss_scale`.
        """
        from ...wrappers import ScaleLoss

        return ScaleLoss(self, initial, growth_interval)

    # --- another gradient or scale ----------------------------------------------------------

    @advise_keywords
    def sam(
        self, rho: Hyperparameter = 0.05, adaptive: bool = False, every: int = 1
    ) -> "slalom.wrappers.Sam":
        """Gives this transform the gradient at the worst point nearby (SAM).

        **Arguments:**

        - `rho`: ρ, the size of the neighborhood, ≥ 0. The paper uses 0.05, and 0.5 to 2 with
            `adaptive`.
        - `adaptive`: whether the neighborhood scales with the parameters (ASAM).
        - `every`: the number of steps from one perturbation to the next, an int ≥ 1. The steps
            between use the plain gradient, and cost one.

        **Returns:** a transform. `sl.train_step` computes the second gradient. By hand, pass the
        loss as a function of the model, as `value_fn`, to `opt.step`.
        """
        from ...wrappers import Sam

        return Sam(self, rho, adaptive, every)

    @advise_keywords
    def mechanize(
        self,
        weight_decay: Hyperparameter = 1e-2,
        eps: Hyperparameter = 1e-8,
        s_init: Hyperparameter = 1e-6,
        num_betas: int = 6,
    ) -> "slalom.wrappers.Mechanize":
        """Learns a scale of this transform's updates while training (Mechanic).

        **Arguments:**

        - `weight_decay`: λ, the coefficient of a weight decay that only Mechanic sees, ≥ 0.
        - `eps`: ε, a small number that keeps divisors positive, > 0.
        - `s_init`: s₀, the first scale, > 0.
        - `num_betas`: n, the number of decays that it chooses from, an int ≥ 1.

        **Returns:** a transform.
        """
        from ...wrappers import Mechanize

        return Mechanize(self, weight_decay, eps, s_init, num_betas)

    # --- parameters for evaluation ----------------------------------------------------------

    @advise_keywords
    def outer(
        self, optimizer: "slalom.AbstractTransform", every: int, reset_state: bool = False
    ) -> "slalom.wrappers.Outer":
        """Keeps slow weights, which another optimizer steps towards this transform's parameters.

        **Arguments:**

        - `optimizer`: the transform that makes the slow steps, such as
            `sl.sgd(0.7, momentum=0.9, nesterov=True)`.
        - `every`: the number of fast steps between two slow ones, an int ≥ 1.
        - `reset_state`: whether to reset this transform's state after each slow step. As with
            `opt.reset(model)`, moments start from scratch, and step counts continue. The state of
            `optimizer` stays.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the slow weights.
        """
        from ...wrappers import Outer

        return Outer(self, optimizer, every, reset_state)

    @advise_keywords
    def lookahead(
        self, sync_period: int, slow_step_size: Hyperparameter, reset_state: bool = False
    ) -> "slalom.wrappers.Outer":
        """Keeps slow weights that move towards this transform's parameters every few steps.

        This is `tx.outer(sl.sgd(slow_step_size), sync_period)`.

        **Arguments:**

        - `sync_period`: k, the number of fast steps between two slow ones, an int ≥ 1.
        - `slow_step_size`: α, the fraction of the way to the fast weights that the slow weights
            move, in [0, 1].
        - `reset_state`: whether to reset this transform's state after each slow step. As with
            `opt.reset(model)`, moments start from scratch, and step counts continue.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the slow weights.
        """
        from ...wrappers.parameters.outer import lookahead

        return lookahead(self, sync_period, slow_step_size, reset_state)

    @advise_keywords
    def average(
        self, decay: Hyperparameter | None = None, debias: bool = True
    ) -> "slalom.wrappers.Average":
        """Keeps an average of the parameters that this transform produces.

        **Arguments:**

        - `decay`: d, the decay of an exponential average, in [0, 1). Defaults to a uniform average.
        - `debias`: whether the exponential average is corrected for its start at zero. If not, it
            starts at the first parameters.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the average.
        """
        from ...wrappers import Average

        return Average(self, decay, debias)

    @advise_keywords
    def schedule_free(
        self,
        b1: Hyperparameter = 0.9,
        weight_lr_power: Hyperparameter = 2.0,
        r: Hyperparameter = 0.0,
        state_dtype: Any | None = None,
    ) -> "slalom.wrappers.ScheduleFree":
        """Averages the iterates of this transform, in place of a decaying learning rate.

        **Arguments:**

        - `b1`: β₁, the weight of the average in the parameters at which gradients are taken, in
            (0, 1]. With a schedule, they are written with the value of each step.
        - `weight_lr_power`: p, the power of the learning rate that weighs the steps in the average,
            ≥ 0. With 0 the learning rate has no influence.
        - `r`: the power of the step that weighs them, ≥ 0. Positive values weigh late steps more.
        - `state_dtype`: the floating dtype of the iterates; complex parameters use its complex
            counterpart. Defaults to the parameter's dtype, but at least float32.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the average.
        """
        from ...wrappers import ScheduleFree

        return ScheduleFree(self, b1, weight_lr_power, r, state_dtype)

    # --- after each step --------------------------------------------------------------------

    @advise_keywords
    def project(
        self, fn: Callable[..., Any], where: WhereLike | None = None
    ) -> "slalom.wrappers.Project":
        """Projects the parameters after each step of this transform.

        **Arguments:**

        - `fn`: a function from a tree of parameters to a tree like it, such as those of
            `sl.projections`. It receives all selected parameters, in at least float32 (complex
            ones as complex arrays), and `None` at the others.
        - `where`: which parameters: a selector, a function or a tree of bools. Defaults to all.

        **Returns:** a transform, which must be the last link of a chain.
        """
        from ...wrappers import Project

        return Project(self, fn, where)

    # --- stateful schedules and metrics -----------------------------------------------------

    @advise_keywords
    def drive(self, schedules: Mapping[str, Any]) -> "slalom.wrappers.Drive":
        """Sets hyperparameters of this transform by stateful schedules.

        **Arguments:**

        - `schedules`: a mapping from hyperparameters to stateful schedules such as
            `sl.schedules.ReduceOnPlateau`. A hyperparameter is named by its path inside this
            transform, any unambiguous suffix of it, such as `"learning_rate"`, or a glob.

        **Returns:** a transform.
        """
        from ...wrappers import Drive

        return Drive(self, schedules)

    @advise_keywords
    def record(self) -> "slalom.wrappers.Record":
        """Reports norms and the hyperparameters in use in `opt.metrics`.

        **Returns:** a transform.
        """
        from ...wrappers import Record

        return Record(self)


FLUENT = frozenset(name for name in vars(AbstractFluent) if name[0] != "_")
"""The names that fields of transforms must not have."""
