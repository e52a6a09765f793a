"""Damped Gauss–Newton directions, with momentum."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree

from ... import fields, tree
from ..._core.protocol.real_vectors import to_vector
from ..._core.protocol.residuals import Residuals
from ...tree.types import Hyperparameter, Params, Scalar
from .._base import AbstractTransform, advise_keywords, chain
from ..linesearch.backtracking import ScaleByBacktrackingLinesearch
from ..shaping.clip import ClipByGlobalNorm
from ..shaping.descent import ScaleByLearningRate
from ..shaping.scale import Scale
from ._system import FORMS, chosen_form, chunk_field, solver_field, solver_of, system_bytes

MOST_TRIES = 30
"""The largest number of increases of the damping in one step."""


class ScaleByGaussNewtonState(eqx.Module):
    """The state of `ScaleByGaussNewton`."""

    damping: Float[Array, ""]
    """λ of the last step."""
    num_failures: Int[Array, ""]
    """The number of factorizations that failed in the last step."""
    stuck: Bool[Array, ""]
    """Whether the parameters had not moved since the step before the last one."""
    age: Int[Array, "*leaves"] = fields.per_leaf()
    """The number of updates of each parameter."""
    params: PyTree[Inexact[Array, "..."]] = fields.param_like("exact")
    """The parameters of the last update."""
    direction: PyTree[Inexact[Array, "..."]] | None = fields.param_like("exact")
    """φ; `None` without momentum."""


class ScaleByGaussNewton(AbstractTransform[ScaleByGaussNewtonState]):
    """Gauss–Newton: solves the damped normal equations of the linearized loss.

    For a loss ½‖ρ‖² with the Jacobian J of ρ (see `sl.LeastSquares`),

        φₜ = (JᵀJ + λ)⁻¹·Jᵀ·(ρ − μ·J·φₜ₋₁) + μ·φₜ₋₁ = Jᵀ·(JJᵀ + λ)⁻¹·(ρ − μ·J·φₜ₋₁) + μ·φₜ₋₁

    The second form solves a system of the size of the residuals. With μ = 0 this is damped
    Gauss–Newton, minSR, or in other words energy natural gradient descent; with μ > 0 it is SPRING.
    The incoming gradients are not used. For losses of outputs JᵀJ is the generalized Gauss–Newton
    matrix.

    `sl.train_step` passes the linearization if the loss is an `sl.LeastSquares`, `sl.OutputLoss`
    or `sl.VariationalEnergy`. By hand, write
    `opt.step(model, grads, residuals=loss_fn.on(x, y))`. For complex parameters J holds the
    derivatives with respect to real and imaginary parts.

    If a factorization fails, λ is raised tenfold until one succeeds. If the parameters did not move
    in the last step, as after a failed line search, λ starts at ten times its last value, and
    φₜ₋₁ counts as 0. Otherwise it returns to `damping` by a factor of ten per step. `opt.metrics`
    has `damping`, `num_failures` (failed factorizations of the last step) and `stuck`.

    A step costs N·P² + P³ operations with `form="parameters"`, and N²·P + N³ with
    `form="residuals"`, for N residuals and P parameters. Without `chunk` the Jacobian stays in
    memory during the step, N·P elements, next to a copy for each product or factorization. With
    `chunk=c` it needs memory for the Jacobian of c examples and for the system: P² with
    `"parameters"`, and N² with `"residuals"`, where Jacobians are then computed once for each pair
    of chunks. For N = 4000 and P = 501 in float64, where the Jacobian has 16 MB, a compiled step
    takes 72 MB (Levenberg–Marquardt: 37), and with `chunk=100` 14 MB (13).

    **Arguments:**

    - `damping`: λ, ≥ 0.
    - `momentum`: μ, in [0, 1), or `None` for none.
    - `form`: `"residuals"`, `"parameters"`, or `"auto"` for the smaller system.
    - `solver`: `"cholesky"` of the Gram matrix, which has half the digits of the Jacobian; `"qr"`
        of the Jacobian, at about five times the cost, which has all of them; `"auto"`, QR where
        Cholesky would have fewer than about three digits; or a function `(matrix, rhs) -> x` for
        the damped Gram matrix. With `form="residuals"`, QR does not work with `chunk`, nor with a
        loss of outputs.
    - `chunk`: the number of examples that are differentiated at a time. Defaults to all.

    ??? cite "Guzmán-Cordero et al., [Improving Energy Natural Gradient Descent through Woodbury,
        Momentum, and Randomization](https://arxiv.org/abs/2505.12149), 2025; Goldshlager et al.,
        [A Kaczmarz-inspired approach to accelerate the optimization of neural network
        wavefunctions](https://arxiv.org/abs/2401.10190), 2024"
    """

    damping: fields.Number = fields.hyperparameter(1e-3, within="[0, inf)")
    momentum: fields.OptionalNumber = fields.hyperparameter(None, within="[0, 1)")
    form: str = fields.choice_field(*FORMS)
    solver: Any = solver_field()
    chunk: int | None = chunk_field()

    needs: ClassVar[tuple[str, ...]] = ("params", "residuals")
    computes_gradient: ClassVar[bool] = True
    unconstrained: ClassVar[bool] = True
    metric_fields: ClassVar[tuple[str, ...]] = ("damping", "num_failures", "stuck")

    def init(self, params: Params) -> ScaleByGaussNewtonState:
        tree.check_inexact(params)

        def zeros() -> Params:
            # New ones for each field: no two leaves of a state may share a buffer.
            return tree.zeros_like(params, tree.accumulation_dtype)

        return ScaleByGaussNewtonState(
            damping=jnp.zeros((), tree.canonical_float()),
            num_failures=tree.fresh_count(),
            stuck=jnp.array(False),
            age=tree.fresh_count(),
            params=zeros(),
            direction=None if self.momentum is None else zeros(),
        )

    def update(self, updates, state, params=None, context=None):
        params = self.demand("params", params)
        residuals: Residuals = self.demand("residuals", context and context.residuals)
        if not jax.tree.leaves(params):
            return updates, state
        now, linear = self.at(context), residuals.at(params, self.chunk)
        dtype = linear.dtype
        stuck = _same(params, state.params) & jnp.any(state.age > 0)

        def number(x: Array) -> Scalar:
            return jnp.asarray(x, dtype)

        vector, gradient, before = linear.vector, linear.gradient, None
        if state.direction is not None:
            before = to_vector(state.direction, dtype)
            before = jnp.where(stuck, 0, number(now.momentum)) * before
            moved = linear.push(before)
            vector = None if vector is None else vector - moved
            gradient = gradient - linear.pull(moved)
        form = chosen_form("ScaleByGaussNewton", self.form, self.solver, linear)
        solve, trace = solver_of(linear, vector, gradient, form, self.solver)

        # What the largest eigenvalue still feels. A loss without curvature has none.
        floor = jnp.where(trace > 0, jnp.finfo(dtype).eps * trace, 1)
        last = number(state.damping)
        raised = jnp.where(stuck, jnp.maximum(10 * last, floor), last / 10)
        damping = jnp.maximum(number(now.damping), jnp.where(raised >= floor, raised, 0))

        def failed(x: Array) -> Array:
            return ~jnp.all(jnp.isfinite(x))

        def again(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            tried, damping, _ = carry
            damping = jnp.maximum(10 * damping, floor)
            return tried + 1, damping, solve(damping)

        failures, damping, direction = tree.while_loop(
            type(self).__name__,
            lambda carry: failed(carry[2]) & (carry[0] < MOST_TRIES) & jnp.isfinite(trace),
            again,
            (jnp.zeros((), state.num_failures.dtype), damping, solve(damping)),
        )
        if before is not None:
            direction = direction + before
        result = linear.updates(direction)
        return result, ScaleByGaussNewtonState(
            damping=damping.astype(state.damping.dtype),
            num_failures=failures,
            stuck=stuck,
            age=tree.increment(state.age),
            params=tree.copy(tree.cast_like(params, state.params)),
            direction=None if state.direction is None else tree.cast_like(result, state.direction),
        )

    def system(self, params: Params) -> int:
        return 0 if self.form == "residuals" else system_bytes(params)


def _same(a: Params, b: Params) -> Bool[Array, ""]:
    """Whether two trees are equal."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    flags = [jnp.all(jnp.asarray(x, y.dtype) == y) for x, y in pairs]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


# The factor takes each search back to 1, also after 30 halvings.
BACKTRACKING = ScaleByBacktrackingLinesearch(30, decrease_factor=0.5, increase_factor=1e10)


@advise_keywords
def gauss_newton(
    damping: Hyperparameter = 1e-7,
    *,
    form: str = "auto",
    solver: object = "auto",
    chunk: int | None = None,
    linesearch: AbstractTransform | None = BACKTRACKING,
) -> AbstractTransform:
    """Gauss–Newton, with a line search.

        p ↦ p − η·(JᵀJ + λ)⁻¹·Jᵀρ

    For deterministic losses ½‖ρ‖², written as an `sl.LeastSquares`, or as an `sl.OutputLoss`. In
    float64 it solves small physics-informed networks to errors that first-order rules do not reach.
    For mini-batches use `sl.natural_gradient`.

    ```python
    >>> loss_fn = sl.LeastSquares(lambda model, x, y: model["a"] * jnp.exp(model["b"] * x) - y)
    >>> model = {"a": jnp.array(1.0), "b": jnp.array(0.0)}
    >>> opt = sl.Optimizer(sl.gauss_newton(), model)
    >>> x = jnp.linspace(0, 1, 10)
    >>> step = sl.train_step(loss_fn)
    >>> for _ in range(10):
    ...     model, opt, loss = step(model, opt, x, 2 * jnp.exp(-x))
    >>> bool(loss < 1e-8)
    True

    ```

    **Arguments:**

    - `damping`: λ, ≥ 0.
    - `form`, `solver`, `chunk`: as in `ScaleByGaussNewton`.
    - `linesearch`: the line search, or `None` for no search. Defaults to one that tries 1 first,
        and then halves up to 30 times.

    **Returns:** a chain of `ScaleByGaussNewton`, `Scale` and the line search.

    ??? cite "Müller & Zeinhofer, [Achieving High Accuracy with PINNs via Energy Natural Gradient
        Descent](https://arxiv.org/abs/2302.13163), 2023"
    """
    links = () if linesearch is None else (linesearch,)
    rule = ScaleByGaussNewton(damping, None, form, solver, chunk)
    return chain(rule, Scale(-1.0), *links)


@advise_keywords
def natural_gradient(
    learning_rate: Hyperparameter,
    damping: Hyperparameter = 1e-3,
    momentum: Hyperparameter | None = 0.9,
    *,
    max_norm: Hyperparameter | None = None,
    form: str = "auto",
    solver: object = "auto",
    chunk: int | None = None,
) -> AbstractTransform:
    """SPRING: energy natural gradient descent, with momentum.

        p ↦ p − η·φₜ   with   φₜ = (JᵀJ + λ)⁻¹·Jᵀ·(ρ − μ·J·φₜ₋₁) + μ·φₜ₋₁

    J is the Jacobian of the residuals ρ, as in `ScaleByGaussNewton`.

    For mini-batches: the momentum keeps the directions that earlier batches have determined.

    **Arguments:**

    - `learning_rate`: η.
    - `damping`: λ, ≥ 0.
    - `momentum`: μ, in [0, 1). `None` is minSR, or energy natural gradient descent. The paper uses
        0.99, together with `max_norm`, without which it diverges for wave functions.
    - `max_norm`: the largest norm of a step, ≥ 0. The paper uses √1e-3 for wave functions. Defaults
        to none.
    - `form`, `solver`, `chunk`: as in `ScaleByGaussNewton`.

    **Returns:** a chain of `ScaleByGaussNewton`, `ScaleByLearningRate` and, with `max_norm`,
    `ClipByGlobalNorm`.

    ??? cite "Goldshlager et al., [A Kaczmarz-inspired approach to accelerate the optimization of
        neural network wavefunctions](https://arxiv.org/abs/2401.10190), 2024"
    """
    rule = ScaleByGaussNewton(damping, momentum, form, solver, chunk)
    clip = () if max_norm is None else (ClipByGlobalNorm(max_norm),)
    return chain(rule, ScaleByLearningRate(learning_rate), *clip)
