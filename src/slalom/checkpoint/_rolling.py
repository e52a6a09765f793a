"""The last few checkpoints of a run, in one directory."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .._core.text.messages import as_int, check_int, warn
from .._loop.binding.optimizer import Optimizer
from ..tree.types import PyTree
from ._file import File
from ._format import DamagedError, NewerVersionError
from ._load import layouts, load
from ._match import Loaded
from ._replace import remove_leftovers
from ._save import Saving, start, trees_of, wait_for_saves

_Read = TypeVar("_Read")
_NAME = re.compile(r"step-(\d+)\.safetensors")


class Rolling:
    """The last checkpoints of a run in one directory, named by step.

    ```python
    >>> import tempfile
    >>> model = {"w": jnp.ones(2)}
    >>> opt = sl.Optimizer(sl.sgd(0.1), model)
    >>> checkpoints = sl.checkpoint.Rolling(tempfile.mkdtemp(), keep=2)
    >>> for _ in range(3):
    ...     model, opt = opt.step(model, {"w": jnp.ones(2)})
    ...     saving = checkpoints.save(model=model, opt=opt)
    >>> checkpoints.steps
    (2, 3)
    >>> checkpoints.load(model=model, opt=opt)["opt"].count
    Array(3, dtype=int32)

    ```
    """

    directory: Path
    """The directory of the checkpoints."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        background: bool = False,
    ):
        """Opens a directory, which need not exist.

        **Arguments:**

        - `directory`: the directory. Only this object should write to it.
        - `keep`: the number of checkpoints to keep, at least 1; `None` keeps all of them.
        - `background`: whether to write files while training goes on, as for `save`.
        """
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f"`directory` must be a path, got {directory!r}.")
        if keep is not None:
            check_int("`keep`", as_int(keep), 1, " or None")
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep
        self.background = background

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a file, in order."""
        return tuple(sorted(self._files()))

    def save(
        self,
        step: int | None = None,
        *,
        model: PyTree = None,
        opt: PyTree = None,
        **more: PyTree,
    ) -> Saving:
        """Saves a checkpoint, and then removes all but the last ones.

        **Arguments:**

        - `step`: its number. Defaults to the step count of `opt`.
        - `model`, `opt`, `more`: trees as for `sl.checkpoint.save`.

        **Returns:** a `Saving`. Before an older file is removed, the new one is read again and
        compared with its checksums. It warns of one that cannot be removed.
        """
        trees = trees_of(model, opt, more)
        step = _count(opt) if step is None else as_int(step)
        check_int("`step`", step, 0)
        later = [n for n in self.steps if n > step]
        if later:
            warn(
                f"'{self.directory}' has a checkpoint of step {later[-1]}, later than step {step} "
                "which is being saved, so `latest()` is that one. If training was started again "
                "from an earlier step, remove the later files or use another directory."
            )
        path = self.directory / f"step-{step:08d}.safetensors"

        def prune() -> None:
            remove_leftovers(self.directory, _NAME.fullmatch)
            files = self._files()
            earlier = [n for n in sorted(files) if n <= step]
            old = [] if self.keep is None else earlier[: -self.keep]
            if old:
                # What the disk holds, before an older file goes.
                _checked(path)
            for n in old:
                try:
                    files[n].unlink(missing_ok=True)
                except OSError as error:
                    warn(
                        f"The checkpoint of step {step} is written, but the older one "
                        f"'{files[n]}' cannot be removed: {error.strerror or error}. The next save "
                        "tries again."
                    )

        return start(path, trees, self.background, prune)

    def latest(self) -> Path | None:
        """The newest complete checkpoint. Warns about files that cannot be read.

        **Returns:** its path, or `None` if there is no complete one.
        """
        return self._newest(_checked)

    def load(
        self,
        *,
        model: PyTree = None,
        opt: PyTree = None,
        strict: bool = True,
        hyperparams: str = "program",
        **more: PyTree,
    ) -> Loaded:
        """Loads the newest complete checkpoint. Warns about files that cannot be read.

        **Arguments:**

        - `model`, `opt`, `strict`, `hyperparams`, `more`: as for `sl.checkpoint.load`.

        **Returns:** a dict, as `sl.checkpoint.load`.

        **Raises:** `FileNotFoundError` if there is no complete checkpoint; `MismatchError` if the
        newest one does not fit the program, as `sl.checkpoint.load`.
        """
        trees = trees_of(model, opt, more)
        options: dict[str, Any] = {"strict": strict, "hyperparams": hyperparams}
        loaded = self._newest(lambda path: load(path, **options, **trees))
        if loaded is not None:
            return loaded
        complete = "complete " if self.steps else ""
        raise FileNotFoundError(
            f"There is no {complete}checkpoint in '{self.directory}'. To start without one, check "
            "`.latest()` first: it returns None."
        )

    def __repr__(self) -> str:
        return f"sl.checkpoint.Rolling({str(self.directory)!r}, keep={self.keep})"

    def _files(self) -> dict[int, Path]:
        entries = self.directory.iterdir() if self.directory.is_dir() else ()
        named = ((_NAME.fullmatch(path.name), path) for path in entries)
        return {int(match[1]): path for match, path in named if match}

    def _newest(self, read: Callable[[Path], _Read]) -> _Read | None:
        """Reads the newest file that can be read.

        Another process may save meanwhile: the last file of an earlier look may be gone, and a look
        at a directory that changes may show neither an old file nor a new one.
        """
        wait_for_saves(self.directory / "any")
        tried: set[int] = set()
        looks = 3
        while looks:
            files = {step: path for step, path in self._files().items() if step not in tried}
            looks = 3 if files else looks - 1
            for step in sorted(files)[-1:]:
                tried.add(step)
                try:
                    return read(files[step])
                except _UNREADABLE as error:
                    if os.path.lexists(files[step]):
                        warn(f"{error} It is skipped.")
        return None


_UNREADABLE = (DamagedError, NewerVersionError, OSError)
"""The errors of a file that this program cannot read, while it may be able to read an older one."""


def _checked(path: Path) -> Path:
    """The path. Raises the error of a file that is no whole checkpoint."""
    with File(path) as file:
        layouts(file)
        file.values()
        file.check()
    return path


def _count(opt: PyTree) -> int:
    if not isinstance(opt, Optimizer):
        raise TypeError("Pass the step: `.save(step, ...)`. It is only known from one optimizer.")
    return int(np.max(opt.count))
