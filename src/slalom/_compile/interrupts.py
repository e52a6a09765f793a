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

# What the module `signal` wraps in enums, which would make every step 20 µs longer.
_c: Any = importlib.import_module("_signal")
_SIGINT, _MAIN = int(signal.SIGINT), threading.main_thread()


class HeldInterrupts:
    """A context in which Ctrl-C waits from the moment when an argument is donated.

    Before, such as while a program is compiled, it interrupts at once: nothing is lost. Other
    threads than the main one are never interrupted.

    **Arguments:**

    - `arguments`: what may be donated.
    """

    def __init__(self, arguments: PyTree):
        self._arguments = arguments
        self._handler: Any = None
        self._frame: FrameType | None = None
        self._is_finished = False
        self.has_waited = False
        """Whether there was an interrupt that waits."""

    def __enter__(self) -> "HeldInterrupts":
        if threading.get_ident() == _MAIN.ident:
            handler = _c.getsignal(_SIGINT)
            # Otherwise the signal is ignored, ends the process, or is not Python's.
            if callable(handler):
                self._handler = handler
                _c.signal(_SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            _c.signal(_SIGINT, self._handler)

    def finish(self) -> None:
        """Lets the arguments go, since there are results. To free them takes time, in which an
        interrupt should wait."""
        self._is_finished = True
        self._arguments = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_finished or any(
            getattr(x, "is_deleted", bool)() for x in jax.tree.leaves(self._arguments)
        ):
            self.has_waited, self._frame = True, frame
        else:
            # It usually raises, and if it does so in `__enter__`, there is no `__exit__`.
            _c.signal(_SIGINT, self._handler)
            self._handler(number, frame)
            _c.signal(_SIGINT, self._handle)

    def interrupt(self) -> None:
        """Calls the handler of the interrupt that waited, which usually raises
        `KeyboardInterrupt`."""
        self._handler(_SIGINT, self._frame)
