"""Levenberg–Marquardt: Gauss–Newton steps whose damping follows the loss."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.protocol.linearization import Linearization
from ..._core.protocol.real_vectors import to_vector
from ..._core.protocol.residuals import Residuals
from ...tree.types import Hyperparameter, Params, Scalar
from .._base import AbstractTransform, advise_keywords
from ._box import Box, in_boxes
from ._model import Model, bounded
from ._system import FORMS, System, chosen_form, chunk_field, may_be_qr, solver_field, system_bytes

ACCEPTED = 1e-4
"""The ratio of the actual to the predicted decrease from which a step is accepted."""

FIRST_RADIUS = 100.0
"""The first radius, relative to the scaled length of the parameters."""


class ScaleByLevenbergMarquardtState(eqx.Module):
    """The state of `ScaleByLevenbergMarquardt`."""

    damping: Float[Array, ""]
    """λ of the next step."""
    growth: Float[Array, ""]
    """The factor by which λ grows at the next rejection; with `scaling`, not used."""
    radius: Float[Array, ""]
    """The longest ‖D·d‖ of the next step; with `scaling=None`, infinite."""
    ratio: Float[Array, ""]
    """The actual over the predicted decrease of the loss of the last try."""
    num_rejected: Int[Array, ""]
    """The number of tries that the last step rejected."""
    accepted: Bool[Array, ""]
    """Whether the last step changed the parameters."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    """The number of updates of each parameter."""
    scale: PyTree[Inexact[Array, "..."]] | None = fields.param_like("exact")
    """D: the largest norm so far of each column of the Jacobian; `None` with `scaling=None`."""


class _Try(NamedTuple):
    tried: Any
    damping: Scalar
    growth: Scalar
    radius: Scalar
    ratio: Scalar
    accepted: Any
    step: Array


class ScaleByLevenbergMarquardt(AbstractTransform[ScaleByLevenbergMarquardtState]):
    """Levenberg–Marquardt: Gauss–Newton steps with a damping that follows the loss.

    For a loss f = ½‖ρ‖² with the Jacobian J of ρ (see `sl.LeastSquares`), a try is

        d = −(JᵀJ + λ·D²)⁻¹·Jᵀρ,   r = (f(w) − f(w + d)) / (½‖J·d‖² + λ·‖D·d‖²)

    It is accepted if r ≥ 10⁻⁴. Otherwise λ is raised, and only the system is solved again, until
    `max_tries` tries in one step have been rejected; the parameters then do not change, and the
    next step continues with that λ.

    With `scaling=None`, D = 1. λ starts at `damping` times the trace of JᵀJ, is multiplied by
    max(1/3, 1 − (2r − 1)³) if a try is accepted, and by 2, 4, 8, … for rejections in a row. The
    residuals curve along d, and the geodesic acceleration follows them: the step is d + a/2, which
    takes the place of d in f(w + d), with

        a = −(JᵀJ + λ)⁻¹·Jᵀρ̈,   ρ̈ = d²ρ(w + t·d)/dt² at t = 0

    A try with ‖a‖ > `acceleration`·‖d‖ is rejected. This takes one more solution with the same
    factorization, and allows λ to be far smaller.

    With `scaling="columns"`, D holds the largest norm so far of each column of J, so that the
    result does not depend on the units of the parameters, and λ is chosen such that ‖D·d‖ is at
    most a radius, which follows r, as in MINPACK. This suits fits with a few parameters of very
    different sizes. It has no acceleration.

    Inside `.project` onto a box, parameters at a bound that the gradient leads out of are held, and
    each try is projected onto the box. The predicted decrease is then that of the projected d.

    The updates already descend: do not add a learning rate. The incoming gradients are not used.
    `sl.train_step` passes the linearization if the loss is an `sl.LeastSquares` or `sl.OutputLoss`.
    By hand, write `opt.step(model, grads, residuals=loss_fn.on(x, y))`.

    `opt.metrics` has `damping`, `ratio`, `num_rejected` and `accepted`. For the costs of a step and
    its memory see `sl.ScaleByGaussNewton`.

    **Arguments:**

    - `damping`: the first λ relative to the trace of JᵀJ, > 0.
    - `scaling`: `None` or `"columns"`.
    - `acceleration`: the largest ‖a‖ relative to ‖d‖, > 0, or `None` for steps d. Only used with
        `scaling=None`.
    - `max_tries`: the maximum number of tries in one step, an int ≥ 1.
    - `form`: `"residuals"` for systems of their size, `"parameters"`, or `"auto"` for the smaller
        one. With `scaling="columns"` always `"parameters"`.
    - `solver`: as in `sl.ScaleByGaussNewton`. `"auto"` is Cholesky in float64, and QR in
        float32 and with `scaling="columns"`.
    - `chunk`: the number of examples that are differentiated at a time. Defaults to all.

    ??? cite "Moré, [The Levenberg–Marquardt algorithm: implementation and
        theory](https://doi.org/10.1007/BFb0067700), 1978; Nielsen, [Damping parameter in
        Marquardt's method](https://orbit.dtu.dk/en/publications/damping-parameter-in-marquardts-method),
        1999; Transtrum & Sethna, [Improvements to the Levenberg–Marquardt algorithm for nonlinear
        least-squares minimization](https://arxiv.org/abs/1201.5885), 2012"
    """

    damping: fields.Number = fields.hyperparameter(1e-3, within="(0, inf)")
    scaling: str | None = fields.choice_field(None, "columns")
    acceleration: fields.OptionalNumber = fields.hyperparameter(
        0.75, within="(0, inf)", optional=True
    )
    max_tries: int = fields.count_field(10)
    form: str = fields.choice_field(*FORMS)
    solver: Any = solver_field()
    chunk: int | None = chunk_field()

    needs: ClassVar[tuple[str, ...]] = ("params", "residuals")
    computes_gradient: ClassVar[bool] = True
    unconstrained: ClassVar[bool] = True
    heeds_bounds: ClassVar[bool] = True
    update_sign: ClassVar[int | None] = -1
    metric_fields: ClassVar[tuple[str, ...]] = ("damping", "ratio", "num_rejected", "accepted")

    def __check_init__(self):
        if self.scaling is not None and self.form == "residuals":
            raise ValueError(
                'ScaleByLevenbergMarquardt(scaling="columns") solves systems of the size of the '
                'parameters. Remove `form="residuals"`.'
            )

    def init(self, params: Params) -> ScaleByLevenbergMarquardtState:
        tree.check_inexact(params)
        dtype = tree.canonical_float()
        return ScaleByLevenbergMarquardtState(
            damping=jnp.zeros((), dtype),
            growth=jnp.full((), 2, dtype),
            radius=jnp.full((), jnp.inf, dtype),
            ratio=jnp.zeros((), dtype),
            num_rejected=tree.fresh_count(),
            accepted=jnp.array(False),
            age=tree.fresh_count(),
            scale=None
            if self.scaling is None
            else tree.zeros_like(params, tree.accumulation_dtype),
        )

    def update(self, updates, state, params=None, context=None):
        params = self.demand("params", params)
        residuals: Residuals = self.demand("residuals", context and context.residuals)
        if not residuals.searchable:
            raise TypeError(
                "ScaleByLevenbergMarquardt compares losses at different parameters, which this "
                "loss cannot evaluate: its data belong to the current parameters. Use "
                "`sl.natural_gradient`."
            )
        if not jax.tree.leaves(params):
            return updates, state
        linear = residuals.at(params, self.chunk)
        dtype, first = linear.dtype, jnp.all(state.age == 0)
        x, box = to_vector(params, dtype), None
        if context is not None and context.bounds is not None:
            lower, upper = (to_vector(bound, dtype) for bound in context.bounds)
            box = Box(jnp.clip(x, lower, upper), linear.gradient, lower, upper)
            linear = linear.along(~box.held)
        scale = self._scale(linear, state)
        model = Model(params, x, residuals, self._system(linear, scale), box)
        now = self.at(context)

        def body(t: _Try) -> _Try:
            if self.scaling is not None:
                return self._with_radius(model, t, first)
            return self._with_damping(model, t, now.acceleration)

        end = tree.while_loop(
            type(self).__name__,
            lambda t: ~t.accepted & (t.tried < self.max_tries),
            body,
            self._first_try(model, state, now.damping),
        )
        step = jnp.where(end.accepted, end.step, 0)
        float_ = state.damping.dtype
        return linear.updates(step), ScaleByLevenbergMarquardtState(
            damping=end.damping.astype(float_),
            growth=end.growth.astype(float_),
            radius=end.radius.astype(float_),
            ratio=end.ratio.astype(float_),
            num_rejected=end.tried - end.accepted.astype(end.tried.dtype),
            accepted=end.accepted,
            age=tree.increment(state.age),
            scale=None
            if scale is None or state.scale is None
            else tree.cast_like(linear.updates(scale), state.scale),
        )

    def _first_try(
        self, model: Model, state: ScaleByLevenbergMarquardtState, damping: Scalar
    ) -> _Try:
        system, dtype, first = model.system, model.x.dtype, jnp.all(state.age == 0)
        start = jnp.asarray(damping, dtype) * system.trace
        # A loss without curvature has no scale of its own.
        start = jnp.where(start > 0, start, 1)
        radius = state.radius.astype(dtype)
        if self.scaling is not None:
            length = FIRST_RADIUS * jnp.linalg.norm(system.diagonal * model.x)
            length = jnp.where(length > 0, length, FIRST_RADIUS)
            radius = jnp.where(first, length, radius)
        return _Try(
            jnp.zeros((), state.num_rejected.dtype),
            jnp.where(first, 0 if self.scaling else start, state.damping.astype(dtype)),
            state.growth.astype(dtype),
            radius,
            jnp.zeros((), dtype),
            jnp.array(False),
            jnp.zeros_like(model.x),
        )

    def system(self, params: Params) -> int:
        return 0 if self.form == "residuals" else system_bytes(params)

    def _scale(
        self, linear: Linearization, state: ScaleByLevenbergMarquardtState
    ) -> Float[Array, " params"] | None:
        """D at these parameters, before zeros are replaced by ones."""
        if state.scale is None:
            return None
        squares = linear.fold(
            lambda total, rows, _: total + jnp.sum(rows**2, axis=0),
            jnp.zeros(linear.num_params, linear.dtype),
            jnp.zeros(linear.num_rows, linear.dtype),
        )
        return jnp.maximum(to_vector(state.scale, linear.dtype), jnp.sqrt(squares))

    def _system(self, linear: Linearization, scale: Array | None) -> System:
        form, solver = self.form, self.solver
        if scale is not None:
            form = "parameters"
            scale = jnp.where(scale > 0, scale, 1)
        form = chosen_form("ScaleByLevenbergMarquardt", form, solver, linear)
        if solver == "auto":
            narrow = jnp.finfo(linear.dtype).bits < 64
            exact = may_be_qr(form, linear) and (narrow or scale is not None)
            solver = "qr" if exact else "cholesky"
        return System(linear, linear.vector, linear.gradient, form, solver, scale)

    def _with_damping(self, model: Model, t: _Try, limit: Scalar | None) -> _Try:
        """A try with λ, which follows the ratio."""
        system = model.system
        solution = system.solve(t.damping)
        direction = step = -solution.x
        straight: Any = True
        if limit is not None:
            turn = -solution.from_rows(system.linear.bend(direction))
            # Some residuals have no second derivative.
            turn = jnp.where(jnp.all(jnp.isfinite(turn)), turn, 0)
            length = jnp.asarray(limit, turn.dtype) * jnp.linalg.norm(direction)
            straight = jnp.linalg.norm(turn) <= length
            step = direction + turn / 2
        step, _, _, ratio = model.outcome(step, direction, t.damping)
        accepted = (ratio >= ACCEPTED) & straight
        eps = jnp.finfo(step.dtype).eps
        trace = jnp.where(system.trace > 0, system.trace, 1)
        lowered = t.damping * jnp.maximum(1 / 3, 1 - (2 * jnp.minimum(ratio, 1) - 1) ** 3)
        damping = jnp.where(accepted, lowered, t.damping * t.growth)
        damping = jnp.clip(damping, eps**2 * trace, trace / eps)
        growth = jnp.where(accepted, 2, jnp.minimum(2 * t.growth, 1e6))
        return _Try(t.tried + 1, damping, growth, t.radius, ratio, accepted, step)

    def _with_radius(self, model: Model, t: _Try, first: Any) -> _Try:
        """A try with a bounded length, which follows the ratio as in MINPACK."""
        step, damping, length = bounded(model.system, t.radius, t.damping)
        # The first radius is a guess.
        radius = jnp.where(first, jnp.minimum(t.radius, length), t.radius)
        found = model.outcome(step, step, damping)
        accepted = found.ratio >= ACCEPTED

        # The derivative of the loss along the step.
        slope = damping * length**2 / 2 - found.predicted
        shrink = 0.5 * slope / (slope + 0.5 * found.actual)
        worse = ~jnp.isfinite(shrink) | (shrink < 0.1)
        shrink = jnp.where(found.actual >= 0, 0.5, jnp.where(worse, 0.1, shrink))
        short = found.ratio <= 0.25
        grow = ~short & ((damping == 0) | (found.ratio >= 0.75))
        tiny = jnp.finfo(radius.dtype).tiny
        shorter = jnp.maximum(shrink * jnp.minimum(radius, 10 * length), tiny)
        radius = jnp.where(short, shorter, jnp.where(grow, 2 * length, radius))
        factor = jnp.where(short, 1 / shrink, jnp.where(grow, 0.5, 1))
        return _Try(
            t.tried + 1, damping * factor, t.growth, radius, found.ratio, accepted, found.step
        )

    def has_updated(self, state: ScaleByLevenbergMarquardtState) -> Bool[Array, "*runs"]:
        return state.accepted

    def num_evaluations(self, state: ScaleByLevenbergMarquardtState) -> Int[Array, "*runs"]:
        return state.num_rejected + state.accepted.astype(state.num_rejected.dtype)


@advise_keywords
def levenberg_marquardt(
    damping: Hyperparameter = 1e-3,
    *,
    scaling: str | None = None,
    acceleration: Hyperparameter | None = 0.75,
    max_tries: int = 10,
    form: str = "auto",
    solver: object = "auto",
    chunk: int | None = None,
    bounds: Any = None,
) -> AbstractTransform:
    """Levenberg–Marquardt, for losses written as an `sl.LeastSquares`.

        p ↦ p − (JᵀJ + λ·D²)⁻¹·Jᵀ·(ρ + ρ̈/2)

    The step is computed twice: first with ρ̈ = 0, and then with the second derivative of the
    residuals along the first step. λ increases until the loss falls, and decreases afterwards; see
    `ScaleByLevenbergMarquardt`.

    It has no learning rate. Its steps lower the loss of the batch that they see, so batches should
    be large. For the fit of a formula with a few parameters, use `scaling="columns"`. With `bounds`
    all parameters stay in a box.

    **Arguments:**

    - `damping`, `scaling`, `acceleration`, `max_tries`, `form`, `solver`, `chunk`: as in
        `ScaleByLevenbergMarquardt`.
    - `bounds`: as in `sl.lbfgs`. Defaults to no bounds.

    **Returns:** a `ScaleByLevenbergMarquardt`; with `bounds` inside
    `.project(sl.projections.box(lower, upper))`.
    """
    rule = ScaleByLevenbergMarquardt(damping, scaling, acceleration, max_tries, form, solver, chunk)
    return in_boxes("levenberg_marquardt", rule, bounds)
