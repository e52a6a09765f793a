"""Signals during a call that donates its arguments, such as Ctrl-C or the SIGTERM of a scheduler.

Python runs the handler of a signal between two instructions. If that is after a program has taken
the memory of its arguments, and before the caller has its results, a handler that raises loses
both. So the handlers wait in between.
"""

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jaxtyping import PyTree

from ...tree.types import is_deleted

# The module `signal` wraps its functions in enums, which would make every step 20 µs longer.
_c: Any = importlib.import_module("_signal")
_MAIN = threading.main_thread()


_WITHOUT_HANDLER = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
_SIGNALS = [int(number) for number in signal.valid_signals() - _WITHOUT_HANDLER]


class HeldSignals:
    """A context in which the handlers of signals wait for its end, or for a program to compile.

    Tracing and compiling takes long, and nothing is donated before it ends. Any other call takes a
    moment, and an exception inside JAX's own callbacks would be ignored or become another one.
    Python runs handlers in the main thread only, so in other threads the context does nothing.

    **Arguments:**

    - `arguments`: what may be donated.
    """

    def __init__(self, arguments: PyTree):
        self._arguments = arguments
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._is_compiling = False
        self.waiting: dict[int, FrameType | None] = {}
        """The signals that wait, with the frames that they came in."""

    def __enter__(self) -> "HeldSignals":
        if threading.get_ident() != _MAIN.ident:
            return self
        try:
            for number in _SIGNALS:
                handler = _c.getsignal(number)
                # Otherwise the signal is ignored, ends the process, or is not Python's.
                if callable(handler):
                    self._handlers[number] = handler
                    _c.signal(number, self._handle)
        except BaseException:  # of a handler that does not wait yet
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            if _c.getsignal(number) == self._handle:
                _c.signal(number, handler)
        self.deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_compiling or any(map(is_deleted, jax.tree.leaves(self._arguments))):
            self.waiting[number] = frame
            return
        handler = self._handlers[number]
        _c.signal(number, handler)
        handler(number, frame)
        if _c.getsignal(number) is handler:  # it may have installed another one
            _c.signal(number, self._handle)

    def deliver(self) -> None:
        """Calls the handlers of the signals that wait, all of them, even if some raise."""
        while self.waiting:
            number, frame = self.waiting.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self.deliver()


def compiling() -> None:
    """Lets signals through. Called when tracing of a program starts, before it is compiled."""
    if threading.get_ident() != _MAIN.ident:
        return
    for number in _SIGNALS:
        held = getattr(_c.getsignal(number), "__self__", None)
        if isinstance(held, HeldSignals):
            held._is_compiling = True
            held.deliver()
            return
