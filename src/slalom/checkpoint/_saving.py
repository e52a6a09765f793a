"""Saves in the background, whose errors come to light."""

import atexit
import os
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
        self._process = os.getpid()
        if not background:
            work()
            return
        thread = threading.Thread(target=self._run, name=f"saving {path.name}")
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads, or the program is about to end
            work()
            return
        self._thread = thread
        _unfinished[_place(path)] = self

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            error.add_note(f"This happened while '{self.path}' was saved in the background.")
            self._error = error

    @property
    def done(self) -> bool:
        """Whether the file is written, or writing it has failed.

        **Raises:** `RuntimeError` in a process that was forked since, which cannot know.
        """
        self._check_process()
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until the file is written.

        **Returns:** its path.

        **Raises:** the error, if it could not be written; `RuntimeError` in a process that was
        forked since, which cannot know.
        """
        self._check_process()
        if self._thread is not None:
            self._thread.join()
        if _unfinished.get(_place(self.path)) is self:
            del _unfinished[_place(self.path)]
        if self._error is not None:
            raise self._error
        return self.path

    def _check_process(self) -> None:
        if self._thread is not None and os.getpid() != self._process:
            raise RuntimeError(
                f"'{self.path}' is being saved by the process {self._process}, of which this one "
                "is a fork. Wait in that process, or before the fork."
            )

    def __repr__(self) -> str:
        if self._thread is not None and os.getpid() != self._process:
            state = f"in process {self._process}"
        else:
            state = "failed" if self._error else "done" if self.done else "under way"
        return f"<saving '{self.path}': {state}>"


_unfinished: dict[Path, Saving] = {}
"""The last save to each directory in the background, until its result is known to the caller."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unfinished.clear)


def _place(path: str | os.PathLike[str]) -> Path:
    """The directory of a file, whatever links lead to it."""
    return Path(os.path.realpath(path)).parent


def settle(path: str | os.PathLike[str]) -> None:
    """Waits for a save to the directory of this file, and raises its error if nobody has seen it.

    Called before the next snapshot is made: at most one for each directory is in memory, and saves
    end in their order. And before a file is read, which would be the old one otherwise.
    """
    if (place := _place(path)) in _unfinished:
        _unfinished[place].wait()


@atexit.register
def _report_errors() -> None:
    for saving in list(_unfinished.values()):
        try:
            saving.wait()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
