"""The line search that shortens the step until the loss falls enough."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ... import tree
from ..._core.fields import Hyperparameter, count_field, hyperparameter
from ..._core.marks import param_like, per_leaf
from ..._core.transform import AbstractTransform, Context, count_from_zero
from ..._types import Params, Scalar, Updates
from ...tree.dtypes import canonical_float
from ._line import line, next_guess, numbers, scaled, steepest


class ScaleByBacktrackingLinesearchState(eqx.Module):
    """What `ScaleByBacktrackingLinesearch` remembers."""

    learning_rate: Float[Array, ""]
    """The one that was taken; 0 where none was."""
    guess: Float[Array, ""]
    """The last one that was tried."""
    value: Float[Array, ""]
    """The loss at the parameters that the step led to; infinite before the first step."""
    num_linesearch_steps: Int[Array, ""]
    """How many learning rates were tried."""
    decrease_error: Float[Array, ""]
    """By how much the last one missed the criterion."""
    age: Int[Array, "*leaves"] = per_leaf()
    """How often each parameter was in a search; 0 says that its gradient here is not known."""
    grad: PyTree[Inexact[Array, "..."]] | None = param_like()
    """The gradient there. Only with `store_grad`."""


class _Trial(NamedTuple):
    rate: Scalar
    value: Scalar
    error: Scalar
    tried: Int[Array, ""]
    grad: Any


class ScaleByBacktrackingLinesearch(AbstractTransform):
    """Scales updates by the first learning rate of a falling sequence that lowers the loss enough.

    The criterion, with loss f, parameters w, updates u and gradient g, is

        f(w + η·u) ≤ f(w) + δ·|f(w)| + c·η·⟨g, u⟩ + ε

    and what is tried is η = min(a·η_last, η_max), then η·d, η·d², … A loss that is not finite
    never meets it. Where none does, the last η is taken if the loss is lower there; otherwise the
    parameters stay, and the next search begins where this one ended. They also stay, and nothing
    is tried, where u ascends, ⟨g, u⟩ > 0.

    The last link of a chain, behind `sl.sgd(1.0)` say, since it searches along what it is given.
    Pass `value=`, `grad=` and `value_fn=` to `opt.step`, or use `sl.train_step`. Under `.mask`,
    `.only` and `.partition` the loss is one of the selected parameters, the others standing
    still; under `.every_k` it is the loss of the window's last mini-step.

    Differs from Optax: no step raises the loss (there the last η is taken in any case), and a
    search that failed does not end all later ones, which would start from its 0.

    **Arguments:**

    - `max_backtracking_steps`: how often η may be shortened, an int ≥ 1.
    - `slope_rtol`: c, in [0, 1).
    - `decrease_factor`: d, in (0, 1).
    - `increase_factor`: a, ≥ 1; infinite to begin each search at η_max.
    - `max_learning_rate`: η_max, > 0.
    - `atol`: ε, ≥ 0.
    - `rtol`: δ, ≥ 0.
    - `store_grad`: whether to compute, and keep in the state, the gradient at the new parameters.
    - `verbose`: whether to print where no η met the criterion.

    ??? cite "Nocedal & Wright, [Numerical Optimization](https://doi.org/10.1007/978-0-387-40065-5),
        algorithm 3.1; Vaswani et al., [Painless Stochastic
        Gradient](https://arxiv.org/abs/1905.09997), 2019"
    """

    max_backtracking_steps: int = count_field()
    slope_rtol: Hyperparameter = hyperparameter(1e-4, within="[0, 1)")
    decrease_factor: Hyperparameter = hyperparameter(0.8, within="(0, 1)")
    increase_factor: Hyperparameter = hyperparameter(1.5, within="[1, inf]")
    max_learning_rate: Hyperparameter = hyperparameter(1.0, within="(0, inf]")
    atol: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    rtol: Hyperparameter = hyperparameter(0.0, within="[0, inf)")
    store_grad: bool = eqx.field(default=False, static=True)
    verbose: bool = eqx.field(default=False, static=True)

    needs: ClassVar[tuple[str, ...]] = ("params", "value", "grad", "value_fn")
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByBacktrackingLinesearchState:
        tree.check_inexact(params)
        dtype = canonical_float()
        return ScaleByBacktrackingLinesearchState(
            learning_rate=jnp.ones((), dtype),
            guess=jnp.ones((), dtype),
            value=jnp.full((), jnp.inf, dtype),
            num_linesearch_steps=count_from_zero(),
            decrease_error=jnp.full((), jnp.inf, dtype),
            age=tree.fresh_age(),
            grad=tree.zeros_like(params) if self.store_grad else None,
        )

    def update(
        self,
        updates: Updates,
        state: ScaleByBacktrackingLinesearchState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByBacktrackingLinesearchState]:
        along = line(self, updates, params, context)
        now = numbers(self, context)
        most = along.value + now.rtol * jnp.abs(along.value)
        descends = along.slope <= 0  # not so where it is NaN

        def lower(value: Scalar) -> Any:
            return jnp.isfinite(value) & (value < along.value)

        def shorten(t: _Trial) -> _Trial:
            rate = jnp.where(t.tried > 0, now.decrease_factor * t.rate, t.rate)
            tried = t.tried + 1
            if self.store_grad:
                value, pullback = jax.vjp(along.value_fn, along.at(rate))
            else:
                value, pullback = along.value_fn(along.at(rate)), None
            one = jnp.ones((), value.dtype)
            value = jnp.asarray(value, rate.dtype)
            error = value - most - rate * now.slope_rtol * along.slope
            error = jnp.where(jnp.isfinite(value) & ~jnp.isnan(error), error, jnp.inf)
            error = jnp.maximum(error, 0)
            grad = t.grad
            if pullback is not None:
                last = (error <= now.atol) | ((tried > self.max_backtracking_steps) & lower(value))
                grad = jax.lax.cond(
                    last, lambda: steepest(pullback(one)[0]), lambda before=grad: before
                )
            return _Trial(rate, value, error, tried, grad)

        def unmet(t: _Trial) -> Any:
            again = (t.error > now.atol) & (t.tried <= self.max_backtracking_steps)
            return descends & again

        end = jax.lax.while_loop(
            unmet,
            shorten,
            _Trial(
                rate=jnp.minimum(now.increase_factor * state.guess, now.max_learning_rate),
                value=along.value,
                error=jnp.full_like(along.value, jnp.inf),
                tried=count_from_zero(),
                grad=along.grad if self.store_grad else None,
            ),
        )
        met = end.error <= now.atol
        taken = met | lower(end.value)
        rate = jnp.where(taken, end.rate, 0)
        if self.verbose:
            _report(met, rate, end.error, along.value, along.slope)
        return scaled(updates, rate), ScaleByBacktrackingLinesearchState(
            learning_rate=rate,
            guess=next_guess(end.rate),
            value=jnp.where(taken, end.value, along.value),
            num_linesearch_steps=end.tried,
            decrease_error=end.error,
            age=tree.increment(state.age),
            grad=end.grad,
        )

    def metrics(self, state: ScaleByBacktrackingLinesearchState) -> dict[str, Array]:
        return {
            "learning_rate": state.learning_rate,
            "num_linesearch_steps": state.num_linesearch_steps,
            "decrease_error": state.decrease_error,
        }


def _report(met: Any, rate: Any, error: Any, value: Any, slope: Any) -> None:
    def say() -> None:
        jax.debug.print(
            "ScaleByBacktrackingLinesearch found no learning rate that lowers the loss enough: "
            "took {rate}, which misses by {error}; loss {value}, slope {slope}.",
            rate=rate,
            error=error,
            value=value,
            slope=slope,
        )

    jax.lax.cond(met, lambda: None, say)
