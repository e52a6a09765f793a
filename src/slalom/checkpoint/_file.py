"""One checkpoint as a safetensors file of NumPy arrays, written atomically.

Nothing here needs JAX, so a program that only copies or checks files starts fast.
"""

import errno
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

try:
    import fcntl
except ImportError:  # Windows removes and renames no open file, so it needs no lock
    fcntl = None

FORMAT = "slalom.checkpoint"
VERSION = 1
POLICY = (
    "A reader accepts its own format version and all earlier ones. The version is raised whenever "
    "an older reader would misread the file."
)

DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""The dtypes that safetensors can both write and read as NumPy arrays, by NumPy's names."""

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial")
"""The names of temporary files, with the name of the file that each would become."""


class DamagedError(ValueError):
    """A file that is not a whole checkpoint: truncated, changed, or written by something else."""

    __module__ = "slalom.checkpoint"  # as it is shown when it is raised


class Contents(NamedTuple):
    """What a file holds."""

    header: dict[str, str]
    """The text of the header."""
    arrays: dict[str, np.ndarray]
    """The arrays by name. Keys are words of type uint32."""
    dtypes: dict[str, str]
    """The dtypes of arrays that are stored as another one, such as `key<threefry2x32>`."""
    values: dict[str, Any]
    """Python numbers and strings by name."""
    names: list[str]
    """The names of all arrays and values, also of those that were not read."""


def need_safetensors() -> Any:
    """The library that reads the files."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("Checkpoints need safetensors: pip install safetensors.") from error
    return safetensors


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

    The arrays are written here rather than by `safetensors.serialize_file`, whose temporary file
    is not synced and has a name that cannot be told from others.

    **Arguments:**

    - `path`: the file. Missing directories are made.
    - `arrays`: contiguous arrays by name.
    - `dtypes`: the dtypes of arrays that stand for another one, such as the words of keys.
    - `values`: Python numbers and strings by name.
    - `header`: more text for the header.

    **Raises:** `OSError`, with the path, if the file cannot be written. The old file is intact.
    """
    stored, kinds = {}, dict(dtypes or {})
    for name, x in arrays.items():
        stored[name], kind = _encode(x)
        if kind:
            kinds.setdefault(name, kind)
    # The widest first, so that all arrays are aligned.
    order = sorted(stored, key=lambda name: -stored[name].dtype.itemsize)
    layout, offset = {}, 0
    for name in order:
        x = stored[name]
        place = {"dtype": DTYPES[x.dtype.name], "shape": list(x.shape)}
        layout[name] = place | {"data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = {
        "format": FORMAT,
        "format_version": str(VERSION),
        "format_policy": POLICY,
        **(header or {}),
        "values": json.dumps({name: _to_json(v) for name, v in (values or {}).items()}),
        "dtypes": json.dumps(kinds),
        "checksums": json.dumps({name: checksum(_bytes(stored[name])) for name in order}),
    }
    text["header_checksum"] = _header_checksum(text, layout)
    head = json.dumps({"__metadata__": text} | layout).encode()
    head += b" " * (-len(head) % 8)
    with _replacing(Path(path)) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in order:
            file.write(_bytes(stored[name]))


def _encode(x: np.ndarray) -> tuple[np.ndarray, str]:
    """An array in a dtype that safetensors has, and its own dtype if it is another one."""
    if x.dtype.byteorder == ">":
        x = x.astype(x.dtype.newbyteorder("<"))
    x, kind = np.asarray(x, order="C"), x.dtype.name
    if kind in DTYPES:
        return x, ""
    if kind == "complex128":
        return x.reshape(*x.shape, 1).view(np.float64), kind
    if _small_dtype(kind) is not None:
        return x.view(np.uint8), kind
    raise TypeError(f"An array of dtype {x.dtype} cannot be saved in a checkpoint.")


def _decode(x: np.ndarray, kind: str | None) -> np.ndarray:
    if kind is None or kind.startswith("key<"):
        return x
    if kind == "complex128":
        return x.view(np.complex128)[..., 0]
    dtype = _small_dtype(kind)
    if dtype is None:
        raise ValueError(
            f"An array of this checkpoint has the dtype {kind}, which the installed ml_dtypes does "
            "not have: pip install --upgrade ml_dtypes."
        )
    return x.view(dtype)


def _small_dtype(kind: str) -> np.dtype | None:
    """A dtype of at most 8 bits that NumPy does not have, such as float8 and int4 variants."""
    import ml_dtypes

    found = getattr(ml_dtypes, kind, None)
    small = isinstance(found, type) and issubclass(found, np.generic)
    return np.dtype(found) if small and np.dtype(found).itemsize == 1 else None


def _bytes(x: np.ndarray) -> memoryview:
    return x.reshape(-1).view(np.uint8).data


def checksum(data: Any) -> str:
    """A checksum as it stands in the header."""
    return f"crc32:{zlib.crc32(data):08x}"


def _header_checksum(text: Mapping[str, str], layout: Mapping[str, Any]) -> str:
    known = {name: [place["dtype"], place["shape"]] for name, place in layout.items()}
    return checksum(json.dumps([dict(text), known], sort_keys=True).encode())


def _to_json(value: Any) -> Any:
    # JSON has everything else: integers of any size, floats to the last bit, also nan and inf.
    return {"complex": [value.real, value.imag]} if isinstance(value, complex) else value


def _from_json(value: Any) -> Any:
    return complex(*value["complex"]) if isinstance(value, dict) else value


# --- replacing a file -----------------------------------------------------------------------


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of the one at `path` once it is whole and on the disk."""
    path = Path(os.path.realpath(path))  # a link keeps its place
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        remove_leftovers(path.parent, lambda name: name == path.name)
        temporary, file = _open_temporary(path)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()
            # Under the lock, so that no other process takes it for a leftover.
            os.replace(temporary, path)
        _sync(path.parent)
    except BaseException as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError):
            _raise_unwritable(path, error)
        raise


def _open_temporary(path: Path) -> tuple[Path, IO[bytes]]:
    """A new file next to `path`, locked for as long as it is open."""
    while True:
        temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        file = os.fdopen(number, "wb")
        try:
            if _lock(number) and os.fstat(number).st_nlink:
                return temporary, file
        except BaseException:
            file.close()
            raise
        file.close()  # another process took it for a leftover before it was locked


def _lock(number: int) -> bool:
    """Locks an open file until it is closed or its process ends. False if another one has it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


def remove_leftovers(directory: Path, of: Callable[[str], Any]) -> None:
    """Removes temporary files whose processes have ended.

    **Arguments:**

    - `directory`: where they are.
    - `of`: whether to remove those of the file with this name.
    """
    for leftover in directory.iterdir() if directory.is_dir() else ():
        ours = TEMPORARY.fullmatch(leftover.name)
        if not (ours and of(ours[1])):
            continue
        with suppress(OSError):
            number = os.open(leftover, os.O_WRONLY)
            try:
                if _lock(number):
                    leftover.unlink()
            finally:
                os.close(number)


def _sync(directory: Path) -> None:
    """Makes the new name of a file last through a loss of power, where the system can."""
    if os.name != "posix":
        return
    number = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every network file system can
            os.fsync(number)
    finally:
        os.close(number)


def _raise_unwritable(path: Path, error: OSError) -> NoReturn:
    """Says which file could not be written, why, and what to do."""
    kept = " The old file is intact." if path.is_file() else ""
    file = next((p for p in path.parents if os.path.isfile(p)), None)
    number = error.errno if file is None else errno.ENOTDIR
    if file is not None:
        why = f"'{file}' is a file, not a directory. Choose another path"
    elif isinstance(error, IsADirectoryError):
        why = "it is a directory. Add the name of a file, or use `sl.checkpoint.Rolling`"
    elif isinstance(error, PermissionError):
        why = f"this user may not write in '{path.parent}'. Choose another directory"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full. Free some space and save again"
    elif error.errno == errno.EFBIG:
        why = "the file would exceed the size limit of this process (`ulimit -f`)"
    else:
        why = error.strerror or str(error)
    message = f"The checkpoint '{path}' cannot be written: {why}.{kept}"
    raise OSError(number, message) from error


# --- reading --------------------------------------------------------------------------------


def read(
    path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda name: True
) -> Contents:
    """Reads a checkpoint and checks everything that it reads. Nothing is ever executed.

    **Arguments:**

    - `path`: the file.
    - `wanted`: whether to read the array with this name.

    **Returns:** its contents.

    **Raises:** `DamagedError` for anything that is not a whole checkpoint; `ValueError` for one of
    a newer format; `OSError` if there is no file, or it may not be read.
    """
    import ml_dtypes  # noqa: F401  # gives NumPy the dtype bfloat16, which JAX may not have done

    path, library = Path(path), need_safetensors()
    _check_readable(path)
    try:
        with library.safe_open(path, framework="numpy", backend="pread") as file:
            header, names = file.metadata() or {}, list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            layout = {
                name: {"dtype": part.get_dtype(), "shape": part.get_shape()}
                for name, part in slices.items()
            }
            _check_header(path, header, layout)
            sums, kinds = json.loads(header["checksums"]), json.loads(header["dtypes"])
            stored = {name: file.get_tensor(name) for name in filter(wanted, names)}
    except library.SafetensorError as error:
        raise DamagedError(
            f"'{path}' is damaged, or is not a safetensors file ({error}). {_INSTEAD}"
        ) from error
    for name, x in stored.items():
        if checksum(_bytes(x)) != sums.get(name):
            raise DamagedError(
                f"'{path}' is damaged: the array '{name}' does not match its checksum. {_INSTEAD}"
            )
    values = {name: _from_json(v) for name, v in json.loads(header["values"]).items()}
    arrays = {name: _decode(x, kinds.get(name)) for name, x in stored.items()}
    return Contents(header, arrays, kinds, values, [*names, *values])


_INSTEAD = "Load an older checkpoint; `sl.checkpoint.Rolling` finds the newest whole one."


def _check_readable(path: Path) -> None:
    """Raises the error of a path that leads to no readable file."""
    try:
        with path.open("rb"):
            return
    except FileNotFoundError:
        message = f"There is no checkpoint '{path}'."
        kind = FileNotFoundError
    except NotADirectoryError:
        message = f"There is no checkpoint '{path}': a part of this path is a file."
        kind = NotADirectoryError
    except IsADirectoryError:
        message = f"'{path}' is a directory. To load its newest checkpoint, write "
        message += f"`sl.checkpoint.Rolling({str(path)!r}).load(...)`."
        kind = IsADirectoryError
    except PermissionError:
        message = f"This user may not read the checkpoint '{path}'."
        kind = PermissionError
    raise kind(message)


def _check_header(path: Path, header: Mapping[str, str], layout: Mapping[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise DamagedError(
            f"'{path}' is a safetensors file, but not a checkpoint that Slalom wrote. Read it with "
            "`safetensors.numpy.load_file`."
        )
    version = header.get("format_version", "")
    if version.isdecimal() and int(version) > VERSION:
        raise ValueError(
            f"'{path}' has format version {version}, but this version of Slalom reads up to "
            f"{VERSION}. Upgrade Slalom to load it."
        )
    text = {key: value for key, value in header.items() if key != "header_checksum"}
    if header.get("header_checksum") != _header_checksum(text, layout):
        raise DamagedError(
            f"'{path}' is damaged: its header does not match its checksum. {_INSTEAD}"
        )
