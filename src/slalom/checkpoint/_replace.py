"""Replaces a file as a whole: a process killed at any moment leaves the old file or the new one."""

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

try:
    import fcntl
except ImportError:  # Windows, which renames no open file
    fcntl = None

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
"""The names of temporary files, with the name of the file that each would become, which may be
shortened."""
_LONGEST = 255
"""The number of bytes that the name of a file may have."""
_ABANDONED = 24 * 3600
"""The age in seconds at which a temporary file is a leftover, where files cannot be locked."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of the one at `path` once it is whole and on the disk."""
    path = Path(os.path.realpath(path))  # a link keeps its place
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            instead = "Add the name of a file, or use `sl.checkpoint.Rolling`"
            raise OSError(errno.EISDIR, f"it is a directory. {instead}")
        if os.path.exists(path) and not os.path.isfile(path):
            what = "it is a device or a pipe, not a file"
            raise OSError(errno.EINVAL, f"{what}. Choose another path")
        prefix = _shortened(path.name)
        remove_leftovers(path.parent, lambda name: name == prefix)
        file = _open_temporary(path)
        with file:
            if os.path.exists(path):
                shutil.copymode(path, file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()
            # Under the lock, so that no other process takes it for a leftover.
            os.replace(file.name, path)
    except BaseException as error:
        if file is not None:
            with suppress(OSError):  # it is in place already
                os.unlink(file.name)
        if isinstance(error, OSError):
            _raise_unwritable(path, error)
        raise
    try:
        _sync(path.parent)
    except OSError as error:
        raise OSError(
            error.errno,
            f"The checkpoint '{path}' is written and in place, but the directory could not be "
            f"synced ({error.strerror or error}), so it may not survive a power loss. Save again",
        ) from error


def _shortened(name: str) -> str:
    """The start of a file's name that fits into the name of a temporary file."""
    name_bytes, room = os.fsencode(name), _LONGEST - len("..12345678.partial")
    return name if len(name_bytes) <= room else name_bytes[:room].decode(errors="ignore")


def _open_temporary(path: Path) -> IO[bytes]:
    """A new file next to `path`, locked for as long as it is open."""
    while True:
        name = f".{_shortened(path.name)}.{secrets.token_hex(4)}.partial"
        file = (path.parent / name).open("xb")
        # Another process may have taken it for a leftover before it was locked.
        if _lock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _lock(number: int) -> bool | None:
    """Locks an open file until it is closed or its process ends.

    **Returns:** `False` if another process has it, `None` if files cannot be locked here.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None  # a file system without locks
    return True


def remove_leftovers(directory: Path, of: Callable[[str], Any]) -> None:
    """Removes temporary files whose processes have ended.

    **Arguments:**

    - `directory`: where they are.
    - `of`: whether to remove those of the file with this name.
    """
    for leftover in directory.iterdir() if directory.is_dir() else ():
        ours = _TEMPORARY.fullmatch(leftover.name)
        if not (ours and of(ours[1])):
            continue
        with suppress(OSError):
            number = os.open(leftover, os.O_WRONLY)
            try:
                locked, age = _lock(number), time.time() - os.fstat(number).st_mtime
                if locked or (locked is None and age > _ABANDONED):
                    leftover.unlink()
            finally:
                os.close(number)


def _sync(directory: Path) -> None:
    """Makes the new name of a file last through a loss of power, where the system can."""
    if os.name != "posix":
        return
    # Not every directory may be opened, and not every network file system can sync one.
    unable = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.EBADF)
    try:
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        if error.errno not in unable:
            raise


def _raise_unwritable(path: Path, error: OSError) -> NoReturn:
    """Raises an error that names the file that could not be written, the cause and a remedy."""
    why, number = error.strerror or str(error), error.errno
    if file := next(filter(os.path.isfile, path.parents), None):
        why, number = f"'{file}' is a file, not a directory. Choose another path", errno.ENOTDIR
    elif number in (errno.EACCES, errno.EPERM):
        why = f"this user may not write in '{path.parent}'. Choose another directory"
    elif number in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full. Free some space and save again"
    elif number == errno.EFBIG:
        why = "the file would exceed the size limit of this process (`ulimit -f`)"
    elif number == errno.ENAMETOOLONG:
        why = f"its name has {len(os.fsencode(path.name))} bytes, which is too long. Shorten it"
    kept = " The old file is intact." if os.path.isfile(path) else ""
    raise OSError(number, f"The checkpoint '{path}' cannot be written: {why}.{kept}") from error
