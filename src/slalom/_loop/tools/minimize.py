"""Full-batch problems, solved to a tolerance in one compiled loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ... import tree
from ..._core.fields.declare import check_number
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...tree.dtypes import canonical_float
from ...tree.types import PyTree, Scalar, Tracer
from ...where.resolve import WhereLike
from ..binding.model import Split, split, strong
from ..binding.optimizer import Optimizer
from ..programs.callables import as_tree
from ..programs.compiled import carried, homes
from ..programs.program import Program
from ..residual_losses import AbstractCurvatureLoss
from ..training.loss import checked_loss
from ..training.options import check_steps
from .progress import progress_bar, shows_progress
from .receivers import receiver, send

REASONS = ("max_steps", "gradient", "change", "function", "not_finite", "stuck")

MOST_IDLE = 40
"""After how many steps that change no parameter the loop ends: a damping that is raised tenfold
each time has then covered all that a float holds."""


class MinimizeResult(eqx.Module):
    """The result of `sl.minimize`.

    Under `vmap` every array has a first axis of runs.

    **Arguments:**

    - `model`: the model, at the parameters where the loop stopped.
    - `opt`: its optimizer, to continue with or to save.
    - `loss`: the loss of the model.
    - `steps`: the number of steps.
    - `stopped`: whether the loop stopped by `tol`, `rtol` or `stop`.
    - `code`: the reason as a number.
    - `losses`: the loss before each step, an array of `max_steps`; NaN after the last step.
    """

    model: PyTree
    opt: Optimizer
    loss: Float[Array, "*runs"]
    steps: Int[Array, "*runs"]
    stopped: Bool[Array, "*runs"]
    code: Int[Array, "*runs"]
    losses: Float[Array, "*runs_and_steps"]

    @property
    def reason(self) -> str:
        """Why the loop ended: `"max_steps"`, `"gradient"`, `"change"`, `"function"`,
        `"not_finite"` or `"stuck"`."""
        return REASONS[int(self.code)]


class _Inputs(NamedTuple):
    """What a call of `minimize` passes to its program."""

    args: tuple[Any, ...]
    every: int
    loss: Any
    """The loss as a tree."""
    max_steps: int
    model: PyTree
    opt: Optimizer
    receiver: Array | None
    """The number of the function that takes the reports, or `None` for no reports."""
    stop: Any
    """The function `stop` as a tree, or `None`."""
    tolerances: dict[str, Array]


class _Carry(NamedTuple):
    params: list[Array]
    opt: Optimizer
    value: Scalar
    grads: list[Array]
    losses: Array
    idle: Array
    code: Array


@advise_keywords
def minimize(
    loss_fn: Callable[..., Any],
    tx: AbstractTransform[Any] | Optimizer,
    model: PyTree,
    *args: Any,
    max_steps: int,
    tol: float = 0.0,
    rtol: float = 0.0,
    stop: Callable[[PyTree, Scalar], Any] | None = None,
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
    >>> found = sl.minimize(rosenbrock, sl.lbfgs(), start, max_steps=100, tol=1e-3)
    >>> found.reason, bool(found.loss < 1e-6)
    ('gradient', True)

    ```

    It works for every rule, and under `jax.vmap` for restarts from many points:

    ```python
    >>> def restart(x):
    ...     start = {"x": x, "y": jnp.array(0.0)}
    ...     return sl.minimize(rosenbrock, sl.lbfgs(), start, max_steps=100, tol=1e-3)
    >>> found = jax.vmap(restart)(jnp.array([-1.0, 0.5, 2.0]))
    >>> found.stopped
    Array([ True,  True,  True], dtype=bool)

    ```

    If you need the derivative of the solution with respect to the data, or the root of a function,
    use Optimistix.

    **Arguments:**

    - `loss_fn`: called as `loss_fn(model, *args)`. Returns a real scalar.
    - `tx`: the transform, or an optimizer to continue with.
    - `model`: where to start.
    - `args`: the data of the loss.
    - `max_steps`: the largest number of steps, an int ≥ 1.
    - `tol`: stop if the norm of the gradient is at most this, ≥ 0.
    - `rtol`: stop if a step changes the loss by at most this share of it, ≥ 0. Steps that change no
        parameter, such as rejected ones, do not count. 0 never stops.
    - `stop`: a function `stop(model, loss)` that returns a bool scalar, called before each step.
    - `trainable`: as in `sl.Optimizer`.
    - `progress`: whether to show a progress bar, with tqdm. Defaults to whether the error stream is
        a terminal.
    - `callback`: called as `callback(step, loss)` with Python numbers, every `every` steps.
    - `every`: the number of steps between two reports, an int ≥ 1.

    **Returns:** the model, the optimizer, the losses, and whether and why it stopped. It also
    stops, with `"not_finite"`, at a loss that is not finite, and with `"stuck"` after 40 steps in a
    row that change no parameter.

    **Raises:** `ValueError` for `progress=True` or a callback under `vmap`, `jit` or `grad`.
    """
    check_steps(max_steps, "sl.minimize", 1, "max_steps")
    check_steps(every, "sl.minimize", 1, "every")
    tolerances = {
        name: jnp.asarray(check_number(f"minimize.{name}", x, "[0, inf)"), canonical_float())
        for name, x in {"tol": tol, "rtol": rtol}.items()
    }
    opt = tx if isinstance(tx, Optimizer) else Optimizer(tx, model, trainable=trainable)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((model, args, opt, loss_fn)))
    if traced and (progress or callback is not None):
        name = "progress" if progress else "callback"
        raise ValueError(
            f"`{name}` of `sl.minimize` runs on the host, so it does not work under `vmap`, `jit` "
            f"or `grad`. Remove `{name}`."
        )
    inputs = _Inputs(
        args=args,
        every=every,
        loss=as_tree(loss_fn),
        max_steps=max_steps,
        model=model,
        opt=opt,
        receiver=None,
        stop=None if stop is None else as_tree(stop),
        tolerances=tolerances,
    )
    if traced or (callback is None and not shows_progress(progress)):
        return _result(inputs)
    with progress_bar(max_steps, progress, "minimize") as bar:

        def report(step: Any, loss: Any) -> None:
            bar(f"loss {float(loss):.4g}", every)
            if callback is not None:
                callback(int(step), float(loss))

        with receiver(report) as number:
            return _result(inputs._replace(receiver=number))


def _result(inputs: _Inputs) -> MinimizeResult:
    after, (loss, steps, code, losses) = _program(inputs)
    converged = [REASONS.index(name) for name in ("gradient", "change", "function")]
    stopped = jnp.isin(code, np.asarray(converged, np.int32))
    return MinimizeResult(after.model, after.opt, loss, steps, stopped, code, losses)


def _minimize(inputs: _Inputs) -> tuple[list[Array], tuple[Array, ...]]:
    """The traced loop: the new parameters and the state, and the other results."""
    loss_fn, opt, model, args = inputs.loss, inputs.opt, inputs.model, inputs.args
    tolerances, most = inputs.tolerances, inputs.max_steps
    whole: Split = split(model, opt.binding.trainable)
    residuals = loss_fn.on(*args) if isinstance(loss_fn, AbstractCurvatureLoss) else None

    def value_of(params: list[Array]) -> Scalar:
        return checked_loss(loss_fn(whole.join(params), *args), False, False).loss

    def loss_of(model: PyTree) -> Scalar:
        return loss_fn(model, *args)

    def evaluate(params: list[Array]) -> tuple[Scalar, list[Array]]:
        value, grads = jax.value_and_grad(value_of)(params)
        return value, [jnp.conj(g) for g in grads]

    def criteria(c: _Carry, before: Scalar | None, moved: Any) -> Array:
        """The position of the reason to stop, or −1."""
        norm = tree.global_norm(c.grads).astype(canonical_float())
        met = [(c.idle >= MOST_IDLE, "stuck"), (~jnp.isfinite(c.value), "not_finite")]
        if inputs.stop is not None:
            given = inputs.stop(whole.join(c.params), c.value)
            met.append((jnp.asarray(given, bool), "function"))
        if before is not None:
            change = jnp.abs(before - c.value)
            bound = tolerances["rtol"].astype(change.dtype) * jnp.abs(before)
            small = (change <= bound) & moved & (tolerances["rtol"] > 0)
            met.append((small, "change"))
        met.append((norm <= tolerances["tol"], "gradient"))
        code = jnp.full((), -1, jnp.int32)
        for flag, name in met:
            code = jnp.where(flag, REASONS.index(name), code)
        return code

    def body(carry: tuple[Array, _Carry]) -> tuple[Array, _Carry]:
        step, c = carry
        losses = jax.lax.dynamic_update_index_in_dim(
            c.losses, c.value.astype(c.losses.dtype), step, 0
        )
        if inputs.receiver is not None:
            due, number = step % inputs.every == 0, inputs.receiver
            jax.lax.cond(due, lambda: send(number, step, c.value), lambda: None)
        here = whole.join(c.params)
        structure = jax.tree.structure(whole.params)
        grads = structure.unflatten(c.grads)
        known: dict[str, Any] = {} if residuals is None else {"residuals": residuals}
        after, opt = c.opt.step(here, grads, value=c.value, grad=grads, value_fn=loss_of, **known)
        params = jax.tree.leaves(split(after, opt.binding.trainable).params)
        same = [jnp.all(a == b) for a, b in zip(params, c.params, strict=True)]
        moved = ~jnp.all(jnp.stack(same))
        value, new = evaluate(params)
        idle = jnp.where(moved, 0, c.idle + 1)
        c, before = _Carry(params, opt, value, new, losses, idle, c.code), c.value
        return step + 1, c._replace(code=criteria(c, before, moved))

    params = [strong(x) for x in jax.tree.leaves(whole.params)]
    value, grads = evaluate(params)
    zero = jnp.zeros((), jnp.int32)
    losses = jnp.full(most, jnp.nan, value.dtype)
    start = _Carry(params, opt, value, grads, losses, zero, zero)
    start = start._replace(code=criteria(start, None, None))
    steps, end = tree.while_loop(
        "`sl.minimize`", lambda carry: (carry[0] < most) & (carry[1].code < 0), body, (zero, start)
    )
    state = end.opt.arrays[end.opt.binding.rules :]
    code = jnp.maximum(end.code, 0)
    return [*end.params, *state], (end.value, steps, code, end.losses)


_program = Program(_minimize, carried, homes=homes)
