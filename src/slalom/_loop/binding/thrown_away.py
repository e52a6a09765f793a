"""Warns of loops that use an optimizer in part only.

They keep one of the two results of `opt.step`, step with an optimizer that never changes, or ignore
its scale of the loss.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from ..._core.protocol.loss import loss_of
from ..._core.text.messages import warn
from ...tree.types import PyTree, Tracer, under_jit

_MOST = 3


def _never(x: Any) -> bool:
    return False


class _LastCall(threading.local):
    """The last call of `opt.step` in a thread: tests for its arguments and its results."""

    got_model: Callable[[Any], bool] = staticmethod(_never)
    got_count: Callable[[Any], bool] = staticmethod(_never)
    returned_model: Callable[[Any], bool] = staticmethod(_never)
    returned_count: Callable[[Any], bool] = staticmethod(_never)
    number: int = 1
    """The number of calls in a row that went on with one of the results and not with the other."""


_last = _LastCall()


def watch_results(model: PyTree, count: Any, new_model: PyTree, new_count: Any) -> None:
    """Notes a call of `opt.step`, and warns if it is the third that went on with one result only.

    **Arguments:**

    - `model`, `count`: what went in. The count stands for the optimizer.
    - `new_model`, `new_count`: what came out.
    """
    if isinstance(count, Tracer) or isinstance(new_count, Tracer):
        return
    same_opt = _last.got_count(count) and _last.returned_model(model)
    same_model = _last.got_model(model) and _last.returned_count(count)
    _last.number = _last.number + 1 if same_opt or same_model else 1
    _last.got_model, _last.got_count = _is(model), _is(count)
    _last.returned_model, _last.returned_count = _is(new_model), _is(new_count)
    if _last.number == _MOST:
        lost = "optimizer, so its state" if same_opt else "model, so it"
        warn(
            f"`opt.step` was called {_MOST} times with the same {lost} never changes. Assign both "
            "results: `model, opt = opt.step(model, grads)`."
        )


def _is(x: Any) -> Callable[[Any], bool]:
    """A function that says whether something is this object, which it does not keep alive."""
    try:
        reference = weakref.ref(x)
    except TypeError:  # a dict, whose id another one may get
        return _never
    return lambda other: reference() is other


def note_scale_is_read(binding: Any) -> None:
    """Notes that the caller knows the scale of the loss."""
    object.__setattr__(binding, "scale_is_read", True)


def warn_of_unread_scale(opt: Any) -> None:
    """Warns of a step by hand whose gradients cannot be those of the scaled loss."""
    if not opt.binding.scale_is_read and loss_of(opt.transform).askers("scaled loss"):
        warn(
            "`.scale_loss()` divides the gradients by a scale that nobody has read from this "
            "optimizer, so they cannot be those of the scaled loss. Differentiate "
            "`opt.loss_scale * loss`, or step with `sl.train_step`, which scales the loss itself."
        )


def warn_of_capture(opt: Any, inputs: PyTree) -> None:
    """Warns of an optimizer that is no argument of the function that is traced around a step."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(opt)):
        return
    if any(isinstance(x, Tracer) and under_jit(x) for x in jax.tree.leaves(inputs)):
        warn(
            "The function that JAX traces here captured this optimizer, so each of its calls "
            "starts from the same state. Pass the optimizer as an argument, and return the new "
            "one: `def step(model, opt, x): ...; return model, opt`."
        )
