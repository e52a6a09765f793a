"""Maximizes the loss instead of minimizing it."""

from typing import Any, ClassVar

import jax

from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer
from ...tree.types import Gradients, Params, Updates


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

    `.mechanize`, `.sam` and `.drive` follow the loss too, so they belong inside.
    """

    over: ClassVar[str] = "number"
    passes_gradients: ClassVar[bool] = True

    inner: AbstractTransform

    def init(self, params: Params) -> Any:
        return self.inner.init(params)

    def inner_state(self, state: Any) -> Any:
        return state

    def inner_context(self, here: Part) -> Context:
        value, grad, value_fn, grad_fn = (
            getattr(here.context, name) for name in ("value", "grad", "value_fn", "grad_fn")
        )
        return here.context.replace(
            value=None if value is None else -value,
            grad=None if grad is None else _negative(grad),
            value_fn=None if value_fn is None else lambda params: -value_fn(params),
            grad_fn=None if grad_fn is None else lambda params: _negative(grad_fn(params)),
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        return self.inner_part(here).run(write, _negative(updates))


def _negative(updates: Updates) -> Updates:
    return jax.tree.map(lambda u: -u, updates)
