"""The backtracking line search."""

from types import SimpleNamespace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ... import fields, tree
from ...tree.types import Params, Scalar
from ._line import AbstractLinesearch, Line, LinesearchState, next_guess, scale_or_zero, steepest


class _Trial(NamedTuple):
    rate: Scalar
    value: Scalar
    error: Scalar
    tried: Int[Array, ""]
    grad: PyTree


class ScaleByBacktrackingLinesearch(AbstractLinesearch):
    """Scales updates by a learning rate that decreases until the loss is low enough.

    The criterion, with loss f, parameters w, updates u and gradient g, is

        f(w + η·u) ≤ f(w) + δ·|f(w)| + c·η·⟨g, u⟩ + ε

    The search tries η = min(a·η_last, η_max), then η·d, η·d², … A loss that is not finite never
    meets the criterion. If no η meets it, the last one is used if it lowers the loss; otherwise the
    parameters do not change, and the next search starts where this one ended. If u ascends, ⟨g, u⟩
    > 0, the parameters do not change, and no rate is tried.

    Use it as the last link of a chain, for example after `sl.sgd(1.0)`. Pass `value=`, `grad=` and
    `value_fn=` to `opt.step`, or use `sl.train_step`. Under `.mask`, `.only` and `.partition` the
    loss is a function of the selected parameters, and the others are constant. Inside `.every_k` it
    is refused: its window has the mean of several losses.

    Differs from Optax: no step raises the loss (Optax uses the last η in any case), and after a
    failed search the next one does not start from η = 0.

    **Arguments:**

    - `max_backtracking_steps`: the maximum number of reductions of η, an int ≥ 1.
    - `slope_rtol`: c, in [0, 1).
    - `decrease_factor`: d, in (0, 1).
    - `increase_factor`: a, ≥ 1; if infinite, each search starts at η_max.
    - `max_learning_rate`: η_max, > 0.
    - `atol`: ε, ≥ 0.
    - `rtol`: δ, ≥ 0.
    - `store_grad`: whether to compute the gradient at the new parameters and store it, for
        `reuse_linesearch`.
    - `verbose`: whether to print a message if no η meets the criterion.

    ??? cite "Nocedal & Wright, [Numerical Optimization](https://doi.org/10.1007/978-0-387-40065-5),
        algorithm 3.1; Vaswani et al., [Painless Stochastic
        Gradient](https://arxiv.org/abs/1905.09997), 2019"
    """

    max_backtracking_steps: int = fields.count_field()
    slope_rtol: fields.Number = fields.hyperparameter(1e-4, within="[0, 1)")
    decrease_factor: fields.Number = fields.hyperparameter(0.8, within="(0, 1)")
    increase_factor: fields.Number = fields.hyperparameter(1.5, within="[1, inf]")
    max_learning_rate: fields.Number = fields.hyperparameter(1.0, within="(0, inf]")
    atol: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    rtol: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    store_grad: bool = eqx.field(default=False, static=True)
    verbose: bool = eqx.field(default=False, static=True)

    def init(self, params: Params) -> LinesearchState:
        return self._fresh(params, keeps_grad=self.store_grad, has_slopes=False)

    def update(self, updates, state, params=None, context=None):
        along = self._line(updates, params, context)
        now = self.at(context)
        first = jnp.minimum(now.increase_factor * state.guess, now.max_learning_rate)

        def lower(value: Scalar) -> Array:
            return jnp.isfinite(value) & (value < along.value)

        def shorten(t: _Trial) -> _Trial:
            rate = jnp.where(t.tried > 0, now.decrease_factor * t.rate, t.rate)
            tried = t.tried + 1
            if self.store_grad:
                value, pullback = jax.vjp(along.value_fn, along.point(rate))
            else:
                value, pullback = along.value_fn(along.point(rate)), None
            one = jnp.ones((), value.dtype)
            value = jnp.asarray(value, rate.dtype)
            error = _decrease_error(now, along, rate, value)
            grad = t.grad
            if pullback is not None:
                last = (error <= now.atol) | ((tried > self.max_backtracking_steps) & lower(value))
                grad = jax.lax.cond(
                    last, lambda: steepest(pullback(one)[0]), lambda before=grad: before
                )
            return _Trial(rate, value, error, tried, grad)

        def unmet(t: _Trial) -> Array:
            again = (t.error > now.atol) & (t.tried <= self.max_backtracking_steps)
            return along.descends & again

        end = tree.while_loop(
            type(self).__name__,
            unmet,
            shorten,
            _Trial(
                rate=along.at_most(first),
                value=along.value,
                error=jnp.full_like(along.value, jnp.inf),
                tried=tree.fresh_count(),
                grad=along.grad if self.store_grad else None,
            ),
        )
        met = end.error <= now.atol
        accepted = met | lower(end.value)
        rate, value = along.taken(
            jnp.where(accepted, end.rate, 0), jnp.where(accepted, end.value, along.value)
        )
        if self.verbose:
            _report(met, rate, end.error, along.value, along.slope)
        return scale_or_zero(along.updates, rate), LinesearchState(
            learning_rate=rate,
            # A bound that was close says nothing about the next step.
            guess=next_guess(jnp.where(end.tried > 1, end.rate, first)),
            value=value,
            num_linesearch_steps=end.tried,
            decrease_error=end.error,
            curvature_error=None,
            age=tree.increment(state.age),
            grad=end.grad,
        )


def _report(met: Array, rate: Array, error: Array, value: Array, slope: Array) -> None:
    def print_message() -> None:
        jax.debug.print(
            "ScaleByBacktrackingLinesearch found no learning rate that lowers the loss enough: "
            "used {rate}, which misses by {error}; loss {value}, slope {slope}.",
            rate=rate,
            error=error,
            value=value,
            slope=slope,
        )

    jax.lax.cond(met, lambda: None, print_message)


def _decrease_error(now: SimpleNamespace, along: Line, rate: Scalar, value: Scalar) -> Scalar:
    """How far the loss at this rate is above the bound of a sufficient decrease."""
    bound = along.value + now.rtol * jnp.abs(along.value)
    error = value - bound - rate * now.slope_rtol * along.slope
    error = jnp.where(jnp.isfinite(value) & ~jnp.isnan(error), error, jnp.inf)
    return jnp.maximum(error, 0)
