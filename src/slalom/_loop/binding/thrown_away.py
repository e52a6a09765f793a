"""Warns of a loop that keeps only one of the two results of `opt.step`."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..._core.text.messages import warn
from ...tree.types import PyTree, Tracer

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
