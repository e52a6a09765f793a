"""Full-batch problems, solved to a tolerance in one compiled loop."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ... import tree
from ..._core.fields.declare import check_number
from ..._core.protocol.loss import loss_of
from ..._core.protocol.parts import transforms
from ..._core.protocol.real_vectors import from_vector, to_vector
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.calls import advise_positions, call, check_function
from ..._core.text.messages import check_int
from ...rules.curvature.levenberg_marquardt import ScaleByLevenbergMarquardt
from ...tree.types import PyTree, Tracer, WhereLike
from ..binding.model import split
from ..binding.optimizer import Optimizer
from ..binding.stepping import check_can_step, check_one_run
from ..programs.arguments import as_tree, carried
from ..programs.program import Program
from ..residual_losses import LeastSquares
from ..training.loss import check_call, residual_loss
from .runs import bound, progress_bar, receiver, shows_progress
from .solving import CONVERGED, REASONS, Problem, Solver


class MinimizeResult(eqx.Module):
    """The result of `sl.minimize`.

    Under `vmap` every array has a first axis of runs.

    **Arguments:**

    - `model`: the model, at the parameters where the loop stopped.
    - `opt`: its optimizer, to continue with or to save.
    - `loss`: the loss of the model.
    - `grad_norm`: the norm of its gradient; with bounds or `.project`, of the part along the set.
    - `steps`: the number of steps.
    - `evaluations`: how often the loss was evaluated, with or without its gradient, or a product
        with its Hessian. The Jacobians of residuals, one for each step, do not count.
    - `code`: the reason as a number.
    - `losses`: the loss before each step, an array of `max_steps`; NaN after the last step.
    """

    model: PyTree
    opt: Optimizer
    loss: Float[Array, "*runs"]
    grad_norm: Float[Array, "*runs"]
    steps: Int[Array, "*runs"]
    evaluations: Int[Array, "*runs"]
    code: Int[Array, "*runs"]
    losses: Float[Array, "*runs_and_steps"]

    @property
    def converged(self) -> Bool[Array, "*runs"]:
        """Whether the loop ended at a minimum to within a tolerance, with `"gradient"`, `"change"`
        or `"step"`."""
        codes = [list(REASONS).index(name) for name in CONVERGED]
        return jnp.isin(self.code, np.asarray(codes, np.int32))

    @property
    def reason(self) -> Any:
        """Why the loop ended: `"gradient"`, `"change"`, `"step"`, `"function"`, `"max_steps"`,
        `"not_finite"` or `"stuck"`. Of several runs a list."""
        names = np.array(list(REASONS), object)
        return names[np.asarray(self.code)].tolist() if np.ndim(self.code) else names[self.code]

    def covariance(
        self, loss_fn: Any, *args: Any, example_weights: Any = None, absolute_sigma: bool = False
    ) -> Float[Array, "params params"]:
        """The covariance of the fitted parameters, as `scipy.optimize.curve_fit` estimates it.

        With the Jacobian J of the residuals, weighted as in the loss, it is (JᵀJ)⁻¹·σ², where σ²
        is the mean square of the weighted residuals over the N − P degrees of freedom.

        **Arguments:**

        - `loss_fn`: the `sl.LeastSquares` that was minimized.
        - `args`, `example_weights`: its data, as for `sl.minimize`.
        - `absolute_sigma`: whether the residuals times the square root of their weight ω have unit
            variance, as with `1 / sigma**2` for known deviations. Otherwise they are scaled such
            that the residuals of the fit agree with it.

        **Returns:** a matrix over the numbers of the trained parameters, in the order of
        `jax.tree.leaves`. It is infinite where the data do not determine the parameters.
        """
        if not isinstance(loss_fn, LeastSquares):
            raise TypeError(
                "The covariance of a fit follows from its residuals. Pass the `sl.LeastSquares` "
                "that was minimized, and its data: `found.covariance(loss_fn, x, y)`, got "
                f"{loss_fn!r}."
            )
        model = split(self.model, self.opt.binding.trainable)
        residuals = loss_fn.on(*args, example_weights=example_weights)
        linear = residuals.of(model.join).at(model.params)
        rows, number = linear.jacobian(), linear.num_params
        _, values, vectors = jnp.linalg.svd(rows, full_matrices=False)
        least = jnp.finfo(linear.dtype).eps * max(rows.shape) * values[0]
        determined = jnp.all(values > least) & (len(values) == number)
        half = vectors.T / jnp.where(values > least, values, 1)[None, :]
        if absolute_sigma:
            # What the loss multiplies the squares of residuals of unit variance by.
            pairs = zip(loss_fn.terms.values(), linear.outputs, strict=True)
            scales = [jnp.full(z.size, 2 * t.weight / z.size, linear.dtype) for t, z in pairs]
            # half @ half.T @ rowsᵀ is the derivative of the fit by the data.
            by_data = tree.matmul(half, tree.matmul(half.T, rows.T))
            found = tree.matmul(by_data * jnp.concatenate(scales)[None, :], by_data.T)
        else:
            free = max(linear.num_rows - number, 1)
            found = tree.matmul(half, half.T) * (2 * linear.value / free)
            determined &= linear.num_rows > number
        return jnp.where(determined, found, jnp.inf)

    def standard_errors(self, loss_fn: Any, *args: Any, **options: Any) -> PyTree:
        """The standard errors of the fitted parameters: the roots of the diagonal of
        `covariance`, which has the same arguments.

        **Returns:** a tree like the model, with `None` in place of leaves that are not trained.
        """
        squares = jnp.diagonal(self.covariance(loss_fn, *args, **options))
        like = split(self.model, self.opt.binding.trainable).params
        return from_vector(jnp.sqrt(squares), like)

    def __repr__(self) -> str:
        if any(isinstance(x, Tracer) for x in (self.loss, self.code)):
            return super().__repr__()
        if np.ndim(self.code):
            ended = f"{int(np.sum(self.converged))} of {self.code.size} runs converged"
        else:
            verb = "converged" if self.converged else "not converged"
            ended = f"{verb} ({self.reason}): {REASONS[self.reason]}{self._advice()}"
        values = f"loss {_shown(self.loss)}, gradient {_shown(self.grad_norm)}"
        counts = f"{_shown(self.steps)} steps, {_shown(self.evaluations)} evaluations"
        leaves = jax.tree.leaves(eqx.filter(self.model, eqx.is_array))
        small = sum(x.size for x in leaves) <= 12
        model = self.model if small else eqx.tree_pformat(self.model, width=10**6)
        return f"{ended}\n{values}, {counts}\n{model}"

    def _advice(self) -> str:
        """What else to try, where the units of the parameters may be why it has not converged."""
        modules = [part.module for part in transforms(self.opt.transform, self.opt.state)]
        unscaled = [
            m for m in modules if isinstance(m, ScaleByLevenbergMarquardt) and m.scaling is None
        ]
        params = split(self.model, self.opt.binding.trainable).params
        sizes = np.abs(np.asarray(to_vector(params, tree.sum_dtype(params))))
        sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
        if self.converged or not unscaled or sizes.size == 0 or np.ptp(np.log10(sizes)) < 3:
            return ""
        ratio = np.max(sizes) / np.min(sizes)
        return f'. The parameters differ {ratio:.0e}-fold in size: try `scaling="columns"`'


def _shown(x: Array) -> str:
    """A number, or the range of several."""
    ends = [f"{end:.4g}" for end in (np.min(x), np.max(x))]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


@advise_positions("Write `found = sl.minimize(loss_fn, sl.lbfgs(), model, max_steps=100)`.")
def minimize(
    loss_fn: Callable[..., Any],
    tx: AbstractTransform[Any] | Optimizer,
    model: PyTree,
    *args: Any,
    max_steps: int,
    ftol: float | None = None,
    xtol: float | None = None,
    gtol: float | None = None,
    stop: Callable[[PyTree, Array], Any] | None = None,
    example_weights: Any = None,
    trainable: WhereLike | None = None,
    progress: bool | None = None,
    callback: Callable[[int, float], None] | None = None,
    every: int = 10,
) -> MinimizeResult:
    """Minimizes a deterministic loss until a tolerance is met, in one compiled loop.

    ```python
    >>> def rosenbrock(p):
    ...     return 100 * (p["y"] - p["x"] ** 2) ** 2 + (1 - p["x"]) ** 2
    >>> start = {"x": jnp.array(0.0), "y": jnp.array(0.0)}
    >>> found = sl.minimize(rosenbrock, sl.lbfgs(), start, max_steps=100)
    >>> bool(found.converged), bool(found.loss < 1e-8)
    (True, True)

    ```

    It stops when no progress is left, whatever the units of the loss f and of the parameters w:
    after a step s, with the gradient g along the set of `.project` or of bounds, if

    - the change of the loss and half of the slope along s are at most `ftol`·|f| (`"change"`),
    - every |sᵢ| is at most `xtol` times the largest |wᵢ| so far (`"step"`), or
    - every |gᵢ| times the largest |wᵢ| so far is at most `gtol`·|f| (`"gradient"`).

    The first two need a step that changes the slope along itself by half: a shorter one, as with a
    small learning rate or a large damping, does not measure the distance to the minimum. In a
    narrow valley, a step can also be short because its direction is poor. So both need Newton's
    step as well, from at most 20 products with the Hessian: without negative curvature, and at most
    `xtol` or √ε long, or with a decrease of at most `ftol`·|f|. This also ends runs whose steps or
    gradients are lost in rounding.

    It works for every rule, and under `jax.vmap` for restarts from many points:

    ```python
    >>> def restart(x):
    ...     start = {"x": x, "y": jnp.array(0.0)}
    ...     return sl.minimize(rosenbrock, sl.lbfgs(), start, max_steps=100)
    >>> found = jax.vmap(restart)(jnp.array([-1.0, 0.5, 2.0]))
    >>> found.converged
    Array([ True,  True,  True], dtype=bool)

    ```

    If you need the derivative of the solution with respect to the data, or the root of a function,
    use Optimistix.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args)`. Returns a real scalar.
    - `tx`: the transform, or an optimizer to continue with.
    - `model`: the initial model.
    - `args`: the data of the loss.
    - `max_steps`: the largest number of steps, an int ≥ 1.
    - `ftol`, `xtol`, `gtol`: the tolerances, ≥ 0. They default to 1e-8 as in
        `scipy.optimize.least_squares`, or to ε^⅔ for the ε of the loss's dtype if that is larger,
        which is 2e-5 in float32.
    - `stop`: a function `stop(model, loss)` that returns a bool scalar, called before each step.
    - `example_weights`: the weights of examples of an `sl.LeastSquares`. For standard deviations
        sigma of the data, pass `1 / sigma**2`.
    - `trainable`: as in `sl.Optimizer`. Not for an optimizer, which knows it.
    - `progress`: whether to show a progress bar, with tqdm. Defaults to whether the error stream is
        a terminal.
    - `callback`: called as `callback(step, loss)` with Python numbers, every `every` steps.
    - `every`: the number of steps between two reports, an int ≥ 1.

    **Returns:** the model, the optimizer, the losses, and whether it converged and why it stopped.
    It also stops, with `"not_finite"`, at a loss or a gradient that is not finite, and with
    `"stuck"` after 40 steps in a row that change no parameter.

    **Raises:** `ValueError` for `progress=True` or a callback under `vmap`, `jit` or `grad`.
    """
    check_int("`max_steps` of `sl.minimize`", max_steps, 1)
    check_int("`every` of `sl.minimize`", every, 1)
    tolerances = {
        name: jnp.asarray(check_number(f"minimize.{name}", x, "[0, inf)"), tree.canonical_float())
        for name, x in (("ftol", ftol), ("xtol", xtol), ("gtol", gtol))
        if x is not None
    }
    if isinstance(tx, Optimizer) and trainable is not None:
        raise ValueError(
            "The optimizer that `sl.minimize` got knows which arrays it trains. Remove "
            "`trainable`, or change it first: `opt, report = opt.rebind(model, trainable=...)`."
        )
    opt = tx if isinstance(tx, Optimizer) else bound("sl.minimize", loss_fn, tx, model, trainable)
    check_can_step(opt)
    check_one_run(opt.arrays.count, "sl.minimize(loss_fn, opt, model, ...)")
    for name, function, names in (
        ("stop", stop, ("model", "loss")),
        ("callback", callback, ("step", "loss")),
    ):
        if function is not None:
            check_function(f"`{name}` of `sl.minimize`", function, *names)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((model, args, opt, loss_fn)))
    if traced and (progress or callback is not None):
        name = "progress" if progress else "callback"
        raise ValueError(
            f"`{name}` of `sl.minimize` runs on the host, so it does not work under `vmap`, `jit` "
            f"or `grad`. Remove `{name}`."
        )
    problem = Problem(
        args=args,
        every=every,
        kwargs={} if example_weights is None else {"example_weights": example_weights},
        loss=as_tree(loss_fn),
        max_steps=max_steps,
        model=model,
        opt=opt,
        receiver=None,
        stop=as_tree(stop),
        tolerances=tolerances,
    )
    if traced or (callback is None and not shows_progress(progress)):
        return _result(problem)
    with progress_bar(max_steps, progress, "minimize") as bar:

        def report(step: Any, loss: Any) -> None:
            bar(f"loss {float(loss):.4g}", every)
            if callback is not None:
                call("`callback` of `sl.minimize`", callback, step=int(step), loss=float(loss))

        with receiver(report) as number:
            return _result(problem._replace(receiver=number))


def _result(problem: Problem) -> MinimizeResult:
    after, others = _program(problem)
    return MinimizeResult(after.model, after.opt, *others)


def _minimize(problem: Problem) -> tuple[list[Array], tuple[Array, ...]]:
    # Before the loss is called, so that the error says what is missing.
    source = residual_loss(problem.loss, loss_of(problem.opt.transform), "sl.minimize")
    check_call(problem.loss, problem.args, problem.kwargs, "sl.minimize")
    return Solver(problem, split(problem.model, problem.opt.binding.trainable), source).solve()


_program = Program(_minimize, carried)
