"""The inputs of a step that transforms need, and how to pass them."""

from collections.abc import Callable

from ...tree.types import Params
from ..fields.schedule import AbstractSchedule
from ..text.messages import series
from .context import Context
from .parts import AbstractDeclared, Part, transforms

_HOW = {
    "params": "pass the parameters: `tx.update(grads, state, params)`",
    "step": "pass `context=sl.Context(step=n)` with the number of updates so far",
    "value": "pass the loss: `opt.step(model, grads, value=loss)`, or `sl.Context(value=loss)`",
    "grad": "pass the gradient of the loss: `opt.step(model, grads, grad=grads)`",
    "value_fn": "pass the loss as a function of the model: `opt.step(..., value_fn=fn)`",
    "grad_fn": "pass the loss as a function of the model: `opt.step(..., value_fn=fn)`",
    "sampled_grad_fn": (
        "pass it to the training step, `sl.train_step(loss_fn, sampled_loss_fn=fn)`, or to "
        "`opt.step(..., sampled_grad_fn=fn)` with `fn(model, key)` that returns the gradient for "
        "labels drawn from the model, and their number"
    ),
    "residuals": (
        "pass a loss of `sl.LeastSquares` or `sl.OutputLoss` to the training step, "
        "`sl.train_step(sl.LeastSquares(residual))`, or its linearization to the optimizer, "
        "`opt.step(model, grads, residuals=loss_fn.on(x, y))`"
    ),
    "terms": (
        "let the loss return a dict of terms, and train with `sl.train_step(loss_fn)`, which "
        "passes them and combines their gradients"
    ),
    "max_logits": (
        'let the loss return `(loss, {"max_logits": S})`, with the largest attention logit S of '
        "each layer and head, and train with `sl.train_step(loss_fn, has_aux=True)`, or pass it: "
        "`opt.step(model, grads, max_logits=S)`"
    ),
    "key": "pass a PRNG key: `opt.step(model, grads, key=key)`",
}


def absent_inputs(
    transform: AbstractDeclared, has: Callable[[str], bool]
) -> tuple[list[Part], tuple[str, ...]]:
    """The parts of a transform that lack inputs, and what they lack.

    `has` says whether the step has an input of this name.
    """
    lacking: dict[str, Part] = {}
    names: dict[str, None] = {}
    for part in transforms(transform):
        absent = dict.fromkeys(name for name in part.module.needs if not has(name))
        if absent:
            lacking.setdefault(part.name, part)
        names |= absent
    return [*lacking.values()], tuple(names)


def check_inputs(transform: AbstractDeclared, context: Context, params: Params | None) -> None:
    """Raises an error that names all inputs that a transform called by hand needs and lacks."""

    def has(name: str) -> bool:
        return params is not None if name == "params" else context.has(name)

    lacking, names = absent_inputs(transform, has)
    if lacking:
        modules = [part.module for part in transforms(transform)]
        fields = (x for module in modules for x in vars(module).values())
        if context.step is None and any(isinstance(x, AbstractSchedule) for x in fields):
            names = dict.fromkeys((*names, "step"))
        kinds = dict.fromkeys(type(part.module).__name__ for part in lacking)
        raise TypeError(missing(series(kinds, "and"), *names)) from None


def missing(who: str, *names: str, in_training_step: bool = False) -> str:
    """The message for inputs that a transform needs and did not get."""
    how = {name: _HOW.get(name, f"pass it: `opt.step(model, grads, {name}=...)`") for name in names}
    for name in names:
        if in_training_step and "train_step" not in how[name]:
            how[name] = f'pass it: `step(model, opt, ..., context={{"{name}": ...}})`'
    itself = " `sl.train_step` passes value, grad and value_fn itself."
    by_step = {"value", "grad", "value_fn", "grad_fn"}
    needed = ", ".join(map(repr, names))
    verb = "need" if " and " in who else "needs"
    return f"{who} {verb} {needed}: {'; '.join(how.values())}." + itself * bool(by_step & {*names})
