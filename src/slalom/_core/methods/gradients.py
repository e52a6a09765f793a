"""Methods that decide which gradients a transform sees, when, and how long its updates are."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from ...tree.types import Hyperparameter
from ..protocol.parts import AbstractDeclared
from ..text.calls import advise_methods
from ..text.messages import library

if TYPE_CHECKING:
    import slalom

# Every `self` here is an `AbstractTransform`: see `fluent.py`.
# pyright: reportArgumentType=false


@advise_methods
class AbstractGradientMethods(AbstractDeclared):
    """Methods that decide which gradients a transform sees, when, and how long its updates are."""

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
        return library.wrappers.EveryK(
            self, k, mean=mean, accumulator_dtype=accumulator_dtype, skip=skip
        )

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
        - `on_limit`: the reaction to the next step that is not finite: `"accept"` applies it,
            `"skip"` continues to skip, `"raise"` raises an error at the following step.
        - `check`: `"grads"`, or `"both"` to check the resulting updates too.

        **Returns:** a transform.
        """
        return library.wrappers.IfFinite(self, max_consecutive_errors, on_limit, check)

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
        - `by`: the values to compare: `"both"`, `"loss"` or `"grad_norm"`.
        - `max_consecutive`: the number of consecutive spikes that may be skipped, an int ≥ 1. The
            next one is accepted, as a new level.

        **Returns:** a transform.
        """
        return library.wrappers.SkipSpikes(self, sigma, window, by, max_consecutive)

    def combine(
        self,
        combination: "slalom.combine.AbstractCombination",
        terms: Iterable[str],
        every: int = 1,
    ) -> "slalom.wrappers.Combine":
        """Steps along a combination of the gradients of several losses.

        The loss of `sl.train_step` returns a dict of terms.

        **Arguments:**

        - `combination`: how the terms are weighted, such as `sl.combine.UPGrad()`.
        - `terms`: the names of the terms, two or more. They have the order of the weights.
        - `every`: the number of steps from one refresh of the weights to the next, an int ≥ 1. The
            steps between compute no gradients of single terms.

        **Returns:** a transform.
        """
        return library.wrappers.Combine(self, combination, terms, every)

    def graft(self, magnitude: "slalom.AbstractTransform") -> "slalom.wrappers.Graft":
        """Rescales the updates of this transform to the norms of another one, layer by layer.

        **Arguments:**

        - `magnitude`: the transform whose updates have these norms, such as `sl.ScaleByAdam()`, or
            `sl.Identity()` for the norms of the gradients.

        **Returns:** a transform.
        """
        return library.wrappers.Graft(self, magnitude)

    def when(
        self, condition: Callable[..., Any], otherwise: Literal["pass", "zero"] = "pass"
    ) -> "slalom.wrappers.When":
        """Applies this transform only in steps in which a condition holds.

        **Arguments:**

        - `condition`: a function `condition(context, updates)` that returns a bool scalar. It is
            called in every step. `context.step` is the step count, and `context.extra` has the
            inputs that custom transforms declare in `needs`.
        - `otherwise`: the updates in other steps: `"pass"` leaves them unchanged, `"zero"` makes
            them zero.

        **Returns:** a transform.
        """
        return library.wrappers.When(self, condition, otherwise)

    def scale_loss(
        self, initial: float | int = 2.0**15, growth_interval: int = 2000
    ) -> "slalom.wrappers.ScaleLoss":
        """Scales the loss for gradients in float16, and skips steps that overflow.

        **Arguments:**

        - `initial`: the first scale, in [2⁻¹²⁶, 2¹²⁶]. Powers of two cause no rounding.
        - `growth_interval`: the number of finite steps before the scale doubles, an int ≥ 1.

        **Returns:** a transform. `sl.train_step` scales the loss itself; in other loops, multiply
        it by `opt.loss_scale`.
        """
        return library.wrappers.ScaleLoss(self, initial, growth_interval)

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
        return library.wrappers.Sam(self, rho, adaptive, every)
