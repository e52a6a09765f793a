"""A line search for the strong Wolfe conditions."""

from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ... import fields, tree
from ...tree.types import Params, Scalar
from ._line import AbstractLinesearch, Line, LinesearchState, next_guess, scale_or_zero, steepest


class _TriedRate(NamedTuple):
    """A learning rate that was tried."""

    rate: Scalar
    value: Scalar
    slope: Scalar


class _Best(NamedTuple):
    """The result if the search ended now."""

    rate: Scalar
    value: Scalar
    decrease_error: Scalar
    curvature_error: Scalar
    grad: PyTree


class _ZoomSearch(NamedTuple):
    tried: Int[Array, ""]
    last: _TriedRate
    low: _TriedRate  # the end with the lower loss, which may have the larger rate
    high: _TriedRate
    third: _TriedRate  # an earlier point, for the cubic through three points
    enclosed: Array | bool  # whether the ends are known to enclose an acceptable rate
    enough: Array | bool  # whether the best one meets the first criterion
    on: Array | bool
    best: _Best


class ScaleByZoomLinesearch(AbstractLinesearch):
    """Scales updates by a learning rate that meets the strong Wolfe conditions.

    With loss f, parameters w, updates u, gradients g at w and g_η at w + η·u, these are

        f(w + η·u) ≤ f(w) + c₁·η·⟨g, u⟩ + ε      and      |⟨g_η, u⟩| ≤ c₂·|⟨g, u⟩| + ε

    Close to a minimum, where rounding hides the first condition, it is replaced by the two
    conditions ⟨g_η, u⟩ ≤ (2·c₁ − 1)·⟨g, u⟩ + ε and f(w + η·u) ≤ f(w) + c₃·|f(w)|. The search
    increases η until an interval contains an acceptable rate, and then narrows the interval by
    cubic and quadratic interpolation and bisection. The cubic goes through three points, or, inside
    `.project` onto a box, has the slopes of both ends. A loss or slope that is not finite meets no
    condition, so the search turns back from there.

    If no rate meets both conditions, the search uses the lowest loss that meets the first one. If
    there is none, it uses the lowest loss of all if that is below f(w); otherwise the parameters do
    not change. If u ascends, ⟨g, u⟩ > 0, they do not change, and no rate is tried.

    Use it as the last link of a chain, as in `sl.lbfgs`. Pass `value=`, `grad=` and `value_fn=` to
    `opt.step`, or use `sl.train_step`. Under `.mask`, `.only` and `.partition` the loss is a
    function of the selected parameters, and the others are constant. Inside `.every_k` it is
    refused: its window has the mean of several losses.

    Differs from Optax: no step raises the loss by more than c₃·|f(w)| (Optax uses the last rate if
    none is good), and after a failed search the next one does not start from η = 0.

    **Arguments:**

    - `max_linesearch_steps`: the maximum number of rates to try, an int ≥ 1.
    - `max_learning_rate`: the largest η, > 0. Defaults to no limit.
    - `tol`: ε, ≥ 0.
    - `increase_factor`: the factor by which η increases, > 1.
    - `slope_rtol`: c₁, in [0, 1).
    - `curv_rtol`: c₂, ≥ 0; if infinite, only the first condition counts.
    - `approx_dec_rtol`: c₃, ≥ 0, or `None` to never replace the first condition.
    - `stepsize_precision`: the length of the interval at which a rate that meets the first
        condition is enough, ≥ 0.
    - `initial_guess_strategy`: the first rate of each search: `"keep"` for the previous rate,
        `"one"` for 1, which suits quasi-Newton directions.
    - `verbose`: whether to print a message if no rate meets both conditions.

    ??? cite "Nocedal & Wright, [Numerical Optimization](https://doi.org/10.1007/978-0-387-40065-5),
        algorithms 3.5 and 3.6; Hager & Zhang, [Algorithm 851: CG_DESCENT, a conjugate gradient
        method with guaranteed descent](https://doi.org/10.1145/1132973.1132979), 2006"
    """

    max_linesearch_steps: int = fields.count_field()
    max_learning_rate: fields.OptionalNumber = fields.hyperparameter(None, within="(0, inf]")
    tol: fields.Number = fields.hyperparameter(0.0, within="[0, inf)")
    increase_factor: fields.Number = fields.hyperparameter(2.0, within="(1, inf)")
    slope_rtol: fields.Number = fields.hyperparameter(1e-4, within="[0, 1)")
    curv_rtol: fields.Number = fields.hyperparameter(0.9, within="[0, inf]")
    approx_dec_rtol: fields.OptionalNumber = fields.hyperparameter(
        1e-6, within="[0, inf)", optional=True
    )
    stepsize_precision: fields.Number = fields.hyperparameter(1e-5, within="[0, inf)")
    initial_guess_strategy: str = fields.choice_field("keep", "one")
    verbose: bool = eqx.field(default=False, static=True)

    metric_fields: ClassVar[tuple[str, ...]] = (
        *AbstractLinesearch.metric_fields,
        "curvature_error",
    )

    def init(self, params: Params) -> LinesearchState:
        return self._fresh(params, keeps_grad=True, has_slopes=True)

    def update(self, updates, state, params=None, context=None):
        along = self._line(updates, params, context)
        now = self.at(context)
        zero = jnp.zeros_like(along.value)
        guess = state.guess if self.initial_guess_strategy == "keep" else zero + 1
        start = _TriedRate(zero, along.value, along.slope)

        end = tree.while_loop(
            type(self).__name__,
            lambda search: search.on,
            lambda search: self._try(search, along, now, guess),
            _ZoomSearch(
                tried=tree.fresh_count(),
                last=start,
                low=start,
                high=start,
                third=start,
                enclosed=jnp.asarray(False),
                enough=jnp.asarray(False),
                on=along.descends,
                best=_Best(zero, along.value, zero + jnp.inf, zero + jnp.inf, along.grad),
            ),
        )
        best = end.best
        tried = jnp.where(end.tried > 0, end.last.rate, state.guess)
        if self.verbose:
            _report(now.tol, best, along)
        rate, value = along.taken(best.rate, best.value)
        return scale_or_zero(along.updates, rate), LinesearchState(
            learning_rate=rate,
            guess=next_guess(jnp.where(best.rate > 0, best.rate, tried)),
            value=value,
            num_linesearch_steps=end.tried,
            decrease_error=best.decrease_error,
            curvature_error=best.curvature_error,
            age=tree.increment(state.age),
            grad=tree.cast_like(best.grad, state.grad),
        )

    def _try(
        self, search: _ZoomSearch, along: Line, now: SimpleNamespace, guess: Scalar
    ) -> _ZoomSearch:
        """Tries one more rate; both phases share this evaluation of the loss."""
        # A Python float would not do: the guess is float64 still where x64 was switched off.
        limit = jnp.full_like(guess, jnp.finfo(guess.dtype).max)
        if now.max_learning_rate is not None:
            limit = jnp.minimum(limit, now.max_learning_rate)
        limit = along.at_most(limit)
        further = jnp.where(search.tried == 0, guess, now.increase_factor * search.last.rate)
        at_limit = further >= limit
        low, high = search.low, search.high
        in_box = along.bounds is not None
        cubic = _by_slopes(low, high) if in_box else _by_points(low, high, search.third)
        interpolated = _between(low, high, cubic)
        rate = jnp.where(search.enclosed, interpolated, jnp.minimum(further, limit))

        value, grad = jax.value_and_grad(along.value_fn)(along.point(rate))
        grad = steepest(grad)
        slope = tree.as_canonical(tree.inner(grad, along.updates))
        new = _TriedRate(rate, jnp.asarray(value, rate.dtype), slope)
        decrease, curvature = self._errors(new, along, now)
        enough = decrease <= now.tol
        done = jnp.maximum(decrease, curvature) <= now.tol
        tried = search.tried + 1

        # Algorithm 3.5: increase the rate until the loss rises or its slope does.
        too_far = (decrease > 0) | ((new.value >= search.last.value) & (search.tried > 0))
        back = ~too_far & (new.slope >= 0)
        outer = (_pick(back, new, search.last), _pick(back, search.last, new))
        encloses = too_far | back | done
        # Algorithm 3.6: the new point replaces one of the two ends.
        worse = (decrease > 0) | (new.value >= low.value)
        turned = ~worse & (new.slope * (high.rate - low.rate) >= 0)
        inner = (_pick(worse, low, new), _pick(worse, new, _pick(turned, low, high)))
        third = _pick(worse | turned, high, low)
        narrow = jnp.abs(high.rate - low.rate) <= now.stepsize_precision
        exhausted = jnp.where(
            search.enclosed, narrow & (enough | search.enough), at_limit & ~encloses
        )

        best = search.best
        lower = (decrease < jnp.inf) & (new.value < best.value)
        # A rate that meets both conditions is better than one that meets the first, and that one
        # is better than one that only lowers the loss.
        better = done | (enough & ~search.enough) | (lower & (enough | ~search.enough))
        low, high = _pick(search.enclosed, inner, outer)
        return _ZoomSearch(
            tried=tried,
            last=new,
            low=low,
            high=high,
            third=_pick(search.enclosed, third, low),
            enclosed=search.enclosed | encloses,
            enough=search.enough | enough,
            on=~(done | exhausted | (tried >= self.max_linesearch_steps)),
            best=_pick(better, _Best(new.rate, new.value, decrease, curvature, grad), best),
        )

    def _errors(self, new: _TriedRate, along: Line, now: SimpleNamespace) -> tuple[Scalar, Scalar]:
        """The amount by which a point misses each condition; infinite if the loss is not finite."""
        rise = new.value - along.value
        decrease = rise - now.slope_rtol * new.rate * along.slope
        if now.approx_dec_rtol is not None:
            flat = new.slope + (1 - 2 * now.slope_rtol) * along.slope
            close = rise - now.approx_dec_rtol * jnp.abs(along.value)
            decrease = jnp.minimum(decrease, jnp.maximum(flat, close))
        curvature = jnp.abs(new.slope) - now.curv_rtol * jnp.abs(along.slope)
        # An infinite factor times slope 0 is NaN.
        curvature = jnp.where(jnp.isinf(now.curv_rtol), 0, curvature)

        def error(x: Scalar) -> Scalar:
            finite = jnp.isfinite(new.value) & jnp.isfinite(new.slope) & ~jnp.isnan(x)
            return jnp.maximum(jnp.where(finite, x, jnp.inf), 0)

        return error(decrease), error(curvature)


def _pick(condition: Array | bool, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _by_points(low: _TriedRate, high: _TriedRate, third: _TriedRate) -> Scalar:
    """The minimum of the cubic with the values at three points and the slope at `low`.

    In units of the interval, t = 0 at `low` and t = 1 at `high`, f = f₀ + C·t + B·t² + A·t³.
    """
    width = high.rate - low.rate
    t = (third.rate - low.rate) / width
    c = low.slope * width
    a_and_b = high.value - low.value - c
    a = (a_and_b - (third.value - low.value - c * t) / (t * t)) / (1 - t)
    b = a_and_b - a
    return (jnp.sqrt(b * b - 3 * a * c) - b) / (3 * a)


def _by_slopes(low: _TriedRate, high: _TriedRate) -> Scalar:
    """The minimum of the cubic with the values and the slopes at both ends."""
    width = high.rate - low.rate
    c = low.slope * width
    a_and_b = high.value - low.value - c
    a = high.slope * width - c - 2 * a_and_b
    b = a_and_b - a
    root = jnp.sqrt(b * b - 3 * a * c)
    # Without a difference of two close numbers where A is small.
    return jnp.where(b > 0, -c / (b + root), (root - b) / (3 * a))


def _between(low: _TriedRate, high: _TriedRate, cubic: Scalar) -> Scalar:
    """A rate in the interval: the minimum of a cubic, or of a parabola, or the middle.

    A minimum that is NaN fails the comparisons, and the next method is used.
    """
    width = high.rate - low.rate
    slope = low.slope * width
    parabola = -slope / (2 * (high.value - low.value - slope))
    inside = jnp.where((parabola > 0.1) & (parabola < 0.9), parabola, 0.5)
    inside = jnp.where((cubic > 0.2) & (cubic < 0.8), cubic, inside)
    return low.rate + inside * width


def _report(tol: Array, best: _Best, along: Line) -> None:
    def print_message() -> None:
        jax.debug.print(
            "ScaleByZoomLinesearch found no learning rate that meets both conditions: used {rate}, "
            "which misses them by {decrease} and {curvature}; loss {value}, slope {slope}.",
            rate=best.rate,
            decrease=best.decrease_error,
            curvature=best.curvature_error,
            value=along.value,
            slope=along.slope,
        )

    met = jnp.maximum(best.decrease_error, best.curvature_error) <= tol
    jax.lax.cond(met, lambda: None, print_message)
