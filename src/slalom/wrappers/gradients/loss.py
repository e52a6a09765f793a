"""The loss, negated or scaled."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ... import fields, tree
from ..._core.engine.encoded import scaled
from ..._core.fields.declare import checked_field
from ..._core.protocol.context import Context
from ..._core.protocol.loss import Loss
from ..._core.protocol.parts import Part, transforms
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractPacedWrapper, AbstractWrapper, run_if
from ..._core.protocol.writer import Writer
from ...tree.dtypes import nearest_float
from ...tree.types import Gradients, Params, PyTree, Updates


class Maximize(AbstractWrapper[Any]):
    """Maximizes the loss: the inner transform descends −ℓ.

    Made by `tx.maximize`, which describes the arguments.

    The inner transform sees −g, and the negative of everything that a step knows about the loss:
    `value`, `grad`, `value_fn` and `grad_fn`. So line searches, plateau schedules and weight decay
    work as they do for descent.

    Parts of a model may descend while others ascend, as in a min-max problem:

    ```python
    >>> def loss_fn(model):  # a saddle point at x = y = 1
    ...     return (model["x"] - 1) ** 2 - (model["y"] - 1) ** 2
    >>> tx = sl.sgd(0.1).partition({sl.where.path("y"): sl.sgd(0.1).maximize()})
    >>> model = {"x": jnp.zeros(()), "y": jnp.zeros(())}
    >>> model, opt, loss = sl.train_step(loss_fn)(model, sl.Optimizer(tx, model))
    >>> model
    {'x': Array(0.2, dtype=float32), 'y': Array(0.2, dtype=float32)}

    ```

    `.mechanize`, `.sam` and `.drive` follow the loss too, so they belong inside. Rules that use the
    residuals of the loss, such as `sl.levenberg_marquardt`, are refused.
    """

    over: ClassVar[str] = "number"
    passes_gradients: ClassVar[bool] = True

    def __check_init__(self):
        refuse_residuals(self.inner, ".maximize()")

    def ask(self, here: Part, loss: Loss) -> Loss:
        return super().ask(here, loss.request("negated loss", here))

    def inner_context(self, here: Part) -> Context:
        def negated(function: Callable[[Params], Any]) -> Callable[[Params], Any]:
            return lambda params: _negative(function(params))

        return here.context.mapped(
            value=_negative, grad=_negative, value_fn=negated, grad_fn=negated
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        return self.inner_part(here).run(write, _negative(updates))


def refuse_residuals(inner: AbstractTransform, call: str) -> None:
    """Raises an error for a wrapper that changes gradients around a rule that does not use them.

    **Arguments:**

    - `inner`: the transform inside the wrapper.
    - `call`: the call that makes the wrapper, such as `".maximize()"`.
    """
    for part in transforms(inner):
        if "residuals" in part.module.needs:
            raise ValueError(
                f"'{part.name}' computes its updates from the residuals of the loss, so `{call}` "
                f"around it would have no effect. Remove `{call}`."
            )


def _negative(updates: Updates) -> Updates:
    return jax.tree.map(lambda u: -u, updates)


# The inverse of each scale in between is a normal float32.
SMALLEST, LARGEST = 2.0**-126, 2.0**126


def _as_number(value: Any) -> object:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return nearest_float(value) if whole or isinstance(value, np.floating) else value


def _check_scale(name: str, value: object) -> None:
    if not isinstance(value, float):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.")
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name} must be in [2**-126, 2**126], got {value}.")


class ScaleLossState(eqx.Module):
    """The state of `ScaleLoss`."""

    scale: Float[Array, "*runs"]
    """The scale of the next step's loss."""
    finite_steps: Int[Array, "*runs"]
    """The number of consecutive finite steps since the scale last changed."""
    last_finite: Bool[Array, "*runs"]
    """Whether the last step was finite."""
    total_notfinite: Int[Array, "*runs"]
    """The total number of non-finite steps."""
    count: Int[Array, "*runs"]
    """The number of steps of the inner transform: its clock."""
    inner: PyTree
    """The inner transform's state."""


class ScaleLoss(AbstractPacedWrapper[ScaleLossState]):
    """Scales the loss, so that small gradients do not become zero in float16.

    Made by `tx.scale_loss`, which describes the arguments.

    The loss is multiplied by a scale s, and the inner transform receives the gradients divided by
    s. With gradients g of the scaled loss,

        if all of g are finite:   run the inner transform with g/s
                                  s ← 2·s after `growth_interval` such steps in a row
        otherwise:                skip the step,   s ← s/2

    In a skipped step the inner transform is not executed and its state does not change, so
    schedules inside it do not advance. The scale stays between 2⁻¹²⁶ and 2¹²⁶.

    `sl.train_step` multiplies the loss itself, and returns the loss as it was before. In a loop of
    your own, multiply by `opt.loss_scale`, and pass the gradients as they are:

    ```python
    >>> def loss_fn(model, x):
    ...     return jnp.sum(model["w"].astype(jnp.float16) * x).astype(jnp.float32)
    >>> model, x = {"w": jnp.ones(2)}, jnp.full(2, 1e-3, jnp.float16)
    >>> opt = sl.Optimizer(sl.sgd(0.1).scale_loss(), model)
    >>> grads = jax.grad(lambda model: opt.loss_scale * loss_fn(model, x))(model)
    >>> model, opt = opt.step(model, grads)
    >>> float(opt.loss_scale), bool(opt.metrics["last_finite"])
    (32768.0, True)

    ```

    `opt.metrics` contains `loss_scale`, the scale of the next step, `last_finite`, and
    `total_notfinite`, the number of skipped steps. A few skipped steps are normal: at the start,
    until the scale fits, and each time that it has grown too large.

    Call `.scale_loss()` last, on the whole optimizer. Binding refuses transforms outside it that
    would use scaled gradients. It may be inside `.every_k` without `skip`, which then keeps one
    scale for each window and skips the whole window; in `.every_k(k).scale_loss()` each mini-batch
    is checked and skipped separately. It may also be inside `.only`, `.average`, `.lookahead`,
    `.schedule_free`, `.store`, `.write`, `.project`, `.drive` and `.split_complex`. With
    `transform_grads`, `sl.train_step` calls that function with scaled gradients. If each device has
    its own gradients, average them there: the devices then agree on which steps to skip.

    Under a `vmap` over the gradients, `lax.cond` becomes a select: the results are the same, but
    skipped steps cost as much as others.

    ??? cite "Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740),
        2017. The rule and its constants come from `torch.amp.GradScaler`, which starts at 2¹⁶ and
        has no smallest scale."
    """

    initial: float | int = checked_field(_check_scale, 2.0**15, converter=_as_number)
    growth_interval: int = fields.count_field(2000)

    def init(self, params: Params) -> ScaleLossState:
        return ScaleLossState(
            scale=jnp.array(self.initial, jnp.float32),
            finite_steps=tree.fresh_count(),
            last_finite=jnp.array(True),
            total_notfinite=tree.fresh_count(),
            count=tree.fresh_count(),
            inner=self.inner.init(params),
        )

    def ask(self, here: Part, loss: Loss) -> Loss:
        return super().ask(here, loss.request("scaled loss", here))

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, ScaleLossState]:
        state, part = here.state, self.inner_part(here)
        inverse = 1 / state.scale

        def step(inner_state: PyTree) -> tuple[Any, Any]:
            # In here, because the operands of a conditional are written to memory.
            context = part.context.mapped(grad=lambda grad: tree.scale(grad, inverse))
            inner = part._replace(state=inner_state, context=context)
            return inner.run(write, scaled(updates, inverse))

        # Gradients that are finite stay so when they are unscaled, unless s < 1.
        finite = tree.all_finite(updates)
        result, inner_state = run_if(finite, step, write, here.params, state.inner, skips=part)
        total, scale, steps = state.total_notfinite, state.scale, state.finite_steps + 1
        grows = steps >= self.growth_interval
        # A scale at the limit stays as it is, so that a power of two remains one.
        doubled = jnp.where(scale <= LARGEST / 2, 2 * scale, scale)
        halved = jnp.where(scale >= 2 * SMALLEST, scale / 2, scale)
        return result, ScaleLossState(
            scale=jnp.where(finite, jnp.where(grows, doubled, scale), halved),
            finite_steps=jnp.where(finite & ~grows, steps, 0),
            last_finite=finite,
            total_notfinite=jnp.where(finite, total, tree.increment(total)),
            count=jnp.where(finite, tree.increment(state.count), state.count),
            inner=inner_state,
        )

    def has_updated(self, state: ScaleLossState) -> Bool[Array, "*runs"] | bool:
        return state.last_finite & self.inner.has_updated(state.inner)

    def metrics(self, state: ScaleLossState) -> dict[str, Array]:
        return {
            "loss_scale": state.scale,
            "last_finite": state.last_finite,
            "total_notfinite": state.total_notfinite,
        }
