"""Ctrl-C during a call that donates its arguments.

Python runs the handler of a signal between two instructions. If that is after a program has taken
the memory of its arguments, and before the caller has its results, neither exist for the caller any
more. So the handler waits in between.
"""

import importlib
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jaxtyping import PyTree

from ..binding.arrays import is_deleted

# What the module `signal` wraps in enums, which would make every step 20 µs longer.
_c: Any = importlib.import_module("_signal")
_SIGINT, _MAIN = int(signal.SIGINT), threading.main_thread()


class HeldInterrupts:
    """A context in which Ctrl-C waits, except while a program is traced and compiled.

    That takes long, and nothing is donated before it ends. Any other call takes a moment, and an
    exception inside JAX's own callbacks would be ignored or become another one. Other threads
    than the main one are never interrupted.

    **Arguments:**

    - `arguments`: what may be donated.
    """

    def __init__(self, arguments: PyTree):
        self._arguments = arguments
        self._outer: HeldInterrupts | None = None
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._is_compiling = False
        self.has_waited = False
        """Whether there was an interrupt that waits."""

    def __enter__(self) -> "HeldInterrupts":
        global _innermost
        self._outer, _innermost = _innermost, self
        if threading.get_ident() == _MAIN.ident:
            handler = _c.getsignal(_SIGINT)
            # Otherwise the signal is ignored, ends the process, or is not Python's.
            if callable(handler):
                self._handler = handler
                _c.signal(_SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        global _innermost
        _innermost = self._outer
        if self._handler is not None:
            _c.signal(_SIGINT, self._handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_compiling or any(map(is_deleted, jax.tree.leaves(self._arguments))):
            self.has_waited, self._frame = True, frame
        else:
            # It usually raises, and if it does so in `__enter__`, there is no `__exit__`.
            _c.signal(_SIGINT, self._handler)
            self._handler(number, frame)
            _c.signal(_SIGINT, self._handle)

    def let_through(self) -> None:
        """Lets interrupts through, since a program is about to be compiled."""
        self._is_compiling = True
        if self.has_waited:
            self.has_waited = False
            self._handle(_SIGINT, self._frame)

    def interrupt(self) -> None:
        """Calls the handler of the interrupt that waited, which usually raises
        `KeyboardInterrupt`."""
        self._handler(_SIGINT, self._frame)


_innermost: HeldInterrupts | None = None


def compiling() -> None:
    """Says that a program is being traced, and will be compiled."""
    if _innermost is not None and threading.get_ident() == _MAIN.ident:
        _innermost.let_through()
