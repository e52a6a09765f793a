"""One checkpoint as a safetensors file of NumPy arrays.

Nothing here needs JAX, so a program that only copies or checks files starts fast. Neither does it
need the library safetensors, which copies every array once more and shows no checksums.
"""

import collections
import dataclasses
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ._format import (
    DTYPES,
    INSTEAD,
    PIECE,
    VALUES,
    DamagedError,
    Entry,
    NewerVersionError,
    checksum,
    encoded,
    parsing,
    pieces,
    read_header,
)
from ._replace import replacing

_ALIGNED = 64
"""The alignment with which JAX takes an array on the CPU as it is, without a copy."""


# --- checksums ------------------------------------------------------------------------------


class _Checksums:
    """Computes checksums in other threads, while a file is written or read.

    Not with `concurrent.futures`, which takes no more work once the program is about to end: a save
    in the background may still be under way then.
    """

    def __init__(self):
        self._threads: collections.deque[threading.Thread] = collections.deque()

    def compute(self, sums: list[str], n: int, data: memoryview) -> None:
        """Puts the checksum of a piece into a list, until `finish` returns."""

        def work() -> None:
            sums[n] = checksum(data)

        thread = threading.Thread(target=work, name="checksum", daemon=True)
        # To start one takes longer than a small piece, and the system may have no more threads.
        with suppress(RuntimeError):
            if len(data) > PIECE // 64:
                thread.start()
        if thread.ident is None:
            work()
        else:
            self._threads.append(thread)
        if len(self._threads) > 2:
            # So that arrays that are in use elsewhere do not wait here for long.
            self._threads.popleft().join()

    def finish(self) -> None:
        """Waits for all checksums."""
        while self._threads:
            self._threads.popleft().join()


def _pieces(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    return ((n, data[n * PIECE : (n + 1) * PIECE]) for n in range(pieces(len(data))))


# --- writing --------------------------------------------------------------------------------


def write(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    *,
    dtypes: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
    header: Mapping[str, str] | None = None,
) -> None:
    """Writes a checkpoint: a process killed at any moment leaves the old file or the new one.

    **Arguments:**

    - `path`: the file. Missing directories are made.
    - `arrays`: contiguous arrays by name.
    - `dtypes`: the dtypes of arrays that stand for another one, such as the words of keys.
    - `values`: Python numbers and strings by name.
    - `header`: more text for the header.

    **Raises:** `OSError`, with the path, if the file cannot be written; `ValueError` or `TypeError`
    for what no reader would accept. The old file is intact.
    """
    stored, kinds = {}, dict(dtypes or {})
    for name, x in arrays.items():
        check_name(name)
        stored[name], kind = _encode(name, x)
        kinds.setdefault(name, kind)
    if values:
        # JSON has all but complex numbers: integers of any size, floats to the last bit, nan, inf.
        text = json.dumps(values, default=lambda z: {"complex": [z.real, z.imag]})
        stored[VALUES] = np.frombuffer(text.encode(), np.uint8)
    # The widest first, so that all arrays are aligned.
    order = sorted(stored, key=lambda name: -stored[name].dtype.itemsize)
    entries, at = {}, 0
    for name in order:
        x = stored[name]
        dtype: str = x.dtype.name
        checksums = [checksum(b"")] * pieces(x.nbytes)
        entries[name] = Entry(dtype, x.shape, at, x.nbytes, kinds.get(name, dtype), checksums)
        at += x.nbytes
    head = encoded(header or {}, entries)
    with replacing(Path(path)) as file:
        # The checksums are computed while the arrays are written, and the header comes last.
        file.seek(len(head))
        threads = _Checksums()
        try:
            for name in order:
                for n, data in _pieces(stored[name].reshape(-1).view(np.uint8).data):
                    threads.compute(entries[name].checksums, n, data)
                    file.write(data)
        finally:
            threads.finish()
        file.seek(0)
        file.write(encoded(header or {}, entries))


def check_name(name: str) -> None:
    """Raises an error for a name that no reader would accept."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"The name {name!r} has a character that is not valid in UTF-8, so it cannot be in a "
            "checkpoint. Rename the entry."
        ) from None
    if name.startswith("__"):
        raise ValueError(f"The name '{name}' is reserved. Choose one without leading underscores.")


def _encode(name: str, x: np.ndarray) -> tuple[np.ndarray, str]:
    """An array in a dtype that safetensors has, and its own dtype."""
    if x.dtype.byteorder == ">":
        x = x.astype(x.dtype.newbyteorder("<"))
    x, kind = np.asarray(x, order="C"), x.dtype.name
    if kind in DTYPES:
        return x, kind
    if kind == "complex128":
        return x.reshape(*x.shape, 1).view(np.float64), kind
    if _small_dtype(kind) is not None:
        return x.view(np.uint8), kind
    raise TypeError(
        f"'{name}' is an array of dtype {x.dtype}, which cannot be saved in a checkpoint. Save and "
        "load numbers, or a list of strings, `x.tolist()`."
    )


def _decode(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == x.dtype.name or kind.startswith("key<"):
        return x
    if kind == "complex128":
        return x.view(np.complex128)[..., 0]
    dtype = _small_dtype(kind)
    if dtype is None:
        raise NewerVersionError(
            f"An array of this checkpoint has the dtype {kind}, which the installed ml_dtypes does "
            "not have: pip install --upgrade ml_dtypes."
        )
    return x.view(dtype)


def dtype_named(kind: str) -> np.dtype:
    """The dtype of an array of a checkpoint. Raises an error for a name that stands for none."""
    small = _small_dtype(kind)
    if small is not None:
        return small
    if kind not in DTYPES and kind != "complex128":
        raise ValueError(f"the dtype {kind!r}")
    return np.dtype(kind)


def _small_dtype(kind: str) -> np.dtype | None:
    """A dtype of at most 8 bits that NumPy does not have, such as float8 and int4 variants."""
    import ml_dtypes

    dtype = getattr(ml_dtypes, kind, None)
    small = isinstance(dtype, type) and issubclass(dtype, np.generic)
    return np.dtype(dtype) if small and np.dtype(dtype).itemsize == 1 else None


# --- reading --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Unread:
    """An array in an open file. To JAX, it is a leaf."""

    shape: tuple[int, ...]
    kind: str
    """The name of its dtype. A dtype of keys names their implementation."""
    read: Callable[[], np.ndarray]
    """Reads it. Keys are words of type uint32."""


class File:
    """A checkpoint that is open for reading, as a context.

    An array that was read is checked in the background: leaving the context raises `DamagedError`
    unless all of them are as they were written. Nothing in the file is ever executed.
    """

    text: dict[str, str]
    """The text of the header."""
    arrays: dict[str, Unread]
    """All arrays by name."""

    def __init__(self, path: str | os.PathLike[str]):
        """Opens a file and reads its header.

        **Arguments:**

        - `path`: the file.

        **Raises:** `DamagedError` for anything that is not a whole checkpoint; `NewerVersionError`
        for one of a newer format; `OSError` if there is no file, or it may not be read.
        """
        import ml_dtypes  # noqa: F401  # gives NumPy the dtype bfloat16, which JAX may not have done

        self._what = f"'{Path(path)}'"
        self._file = _opened(Path(path))
        try:
            self.text, self._entries, self._start = read_header(self._file, self._what)
        except BaseException:
            self._file.close()
            raise
        self.arrays = {name: self._unread(name) for name in self._entries if name != VALUES}
        self._threads = _Checksums()
        self._read: dict[str, list[str]] = {}
        """The checksums of the arrays that were read."""

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.finish()
        self._file.close()
        for name, checksums in sorted(self._read.items()):
            if checksums != self._entries[name].checksums:
                raise DamagedError(
                    f"{self._what} is damaged: the array '{name}' does not match its checksum. "
                    f"{INSTEAD}"
                )

    def _unread(self, name: str) -> Unread:
        entry = self._entries[name]
        # The last axis of a key is its words; that of a complex128 its two parts.
        joined = entry.kind.startswith("key<") or entry.kind != entry.dtype == "float64"
        shape = entry.shape[:-1] if joined else entry.shape
        return Unread(shape, entry.kind, lambda: self._array(name))

    def values(self) -> dict[str, Any]:
        """Python numbers and strings by name."""
        with self.parsing():
            values = json.loads(self.values_text()).items()
            return {n: complex(*x["complex"]) if isinstance(x, dict) else x for n, x in values}

    def values_text(self) -> str:
        """The same as JSON."""
        with self.parsing():
            return self._array(VALUES).tobytes().decode() if VALUES in self._entries else "{}"

    def parsing(self) -> AbstractContextManager[None]:
        """A context in which text of the file is parsed, whose errors become `DamagedError`."""
        return parsing(self._what)

    def check(self) -> None:
        """Reads everything, one array after the other."""
        for name in self._entries:
            self._array(name)

    def _array(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        memory = np.empty(entry.size + _ALIGNED, np.uint8)
        skipped = -memory.ctypes.data % _ALIGNED
        memory = memory[skipped : skipped + entry.size]
        self._file.seek(self._start + entry.start)
        checksums = [""] * len(entry.checksums)
        for n, data in _pieces(memory.data):
            if self._file.readinto(data) != len(data):
                raise DamagedError(f"{self._what} became shorter while it was read. {INSTEAD}")
            self._threads.compute(checksums, n, data)
        self._read[name] = checksums
        return _decode(memory.view(entry.dtype).reshape(entry.shape), entry.kind)


_UNOPENED = {
    FileNotFoundError: "There is no checkpoint '{0}'.",
    NotADirectoryError: "There is no checkpoint '{0}': a part of this path is a file.",
    IsADirectoryError: "'{0}' is a directory. To load its newest checkpoint, write "
    "`sl.checkpoint.Rolling({0!r}).load(...)`.",
    PermissionError: "This user may not read the checkpoint '{0}'.",
}
"""The messages for paths that lead to no readable file."""


def _opened(path: Path) -> Any:
    """The open file."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        # To open a pipe would wait for somebody who writes to it.
        raise OSError(errno.EINVAL, f"'{path}' is a device or a pipe, not a checkpoint.")
    try:
        return path.open("rb")
    except tuple(_UNOPENED) as error:
        raise type(error)(_UNOPENED[type(error)].format(str(path))) from None
