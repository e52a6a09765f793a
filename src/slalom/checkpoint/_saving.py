"""Saves in the background, whose errors come to light."""

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path


class Saving:
    """A checkpoint on its way to the disk, as `sl.checkpoint.save` returns it."""

    path: Path
    """The file."""

    def __init__(self, path: Path, work: Callable[[], None], background: bool):
        """Starts to save.

        **Arguments:**

        - `path`: the file.
        - `work`: writes it.
        - `background`: whether to return before it is written.
        """
        self.path = path
        self._work = work
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not background:
            work()
            return
        _unfinished[path.parent] = self
        self._thread = threading.Thread(target=self._run, name=f"saving {path.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            error.add_note(f"This happened while '{self.path}' was saved in the background.")
            self._error = error

    @property
    def done(self) -> bool:
        """Whether the file is written, or writing it has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until the file is written.

        **Returns:** its path.

        **Raises:** the error, if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if _unfinished.get(self.path.parent) is self:
            del _unfinished[self.path.parent]
        if self._error is not None:
            raise self._error
        return self.path

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done else "under way"
        return f"<saving '{self.path}': {state}>"


_unfinished: dict[Path, Saving] = {}
"""The last save of each directory in the background, until its result is known to the caller."""


def settle(directory: Path) -> None:
    """Waits for a save to this directory, and raises its error if nobody has seen it.

    Called before the next snapshot is made: at most one for each directory is in memory, and saves
    end in their order.
    """
    if directory in _unfinished:
        _unfinished[directory].wait()


@atexit.register
def _report_errors() -> None:
    for saving in list(_unfinished.values()):
        try:
            saving.wait()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
