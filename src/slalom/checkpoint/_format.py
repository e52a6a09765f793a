"""The header of a checkpoint, and every fault that it can have.

Nothing here needs JAX, so a program that only copies or checks files starts fast.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np

FORMAT = "slalom.checkpoint"
VERSION = 1
"""Every change to the form of the header, the layouts or the body raises it. Readers of a new
version still read all earlier ones; `tests/io/files` has a file of each."""
POLICY = (
    "A reader accepts its own format version and all earlier ones. The version is raised whenever "
    "an older reader would misread the file."
)
PIECE = 4 * 2**20
"""The number of bytes that one checksum covers."""
LARGEST_HEADER = 100_000_000
"""The largest header that readers of safetensors accept, in bytes."""
VALUES = "__values__"
"""The name of the bytes that hold Python numbers and strings. They may exceed a header."""

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
"""The dtypes of safetensors, by NumPy's names."""

_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_START = b'{"__metadata__": {"header_checksum": "'
"""The first bytes of a header. Its checksum, of 8 digits, follows."""
_UNKNOWN = b"0" * 8
"""A placeholder in the header while it is computed."""

INSTEAD = "Load an older checkpoint; `sl.checkpoint.Rolling` finds the newest complete one."


class DamagedError(ValueError):
    """A file that is not a complete checkpoint: truncated, changed, or written by something
    else."""

    __module__ = "slalom.checkpoint"  # as it is shown when it is raised


class NewerVersionError(ValueError):
    """A checkpoint that only a newer version of Slalom, or of ml_dtypes, can read."""

    __module__ = "slalom.checkpoint"


class Entry(NamedTuple):
    """One array of a file."""

    dtype: str
    """The NumPy name of the dtype in the file."""
    shape: tuple[int, ...]
    """The shape in the file."""
    start: int
    """Its position in the body of the file."""
    size: int
    """Its number of bytes."""
    kind: str
    """The dtype of the array that it stands for, such as `key<threefry2x32>`, or its own."""
    checksums: list[str]
    """The checksum of each of its pieces."""


def checksum(data: Any) -> str:
    """A checksum as it stands in the header."""
    return f"{zlib.crc32(data):08x}"


def pieces(size: int) -> int:
    """The number of checksums of an array with this number of bytes."""
    return -(-size // PIECE)


# --- writing --------------------------------------------------------------------------------


def encoded(text: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """The header as bytes, with its length before it.

    Its length does not depend on the checksums.
    """
    kinds = {name: e.kind for name, e in entries.items() if e.kind != e.dtype}
    metadata = {
        "header_checksum": _UNKNOWN.decode(),
        "format": FORMAT,
        "format_version": str(VERSION),
        "format_policy": POLICY,
        # Only Python's JSON has lone surrogates.
        **{name: x.encode(errors="backslashreplace").decode() for name, x in text.items()},
        "dtypes": json.dumps(kinds),
        "checksums": json.dumps({name: " ".join(e.checksums) for name, e in entries.items()}),
    }
    layout = {
        name: {
            "dtype": DTYPES[e.dtype],
            "shape": list(e.shape),
            "data_offsets": [e.start, e.start + e.size],
        }
        for name, e in entries.items()
    }
    head = json.dumps({"__metadata__": metadata} | layout).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > LARGEST_HEADER:
        raise ValueError(
            f"This checkpoint would have {len(entries)} arrays and a header of {len(head):,} "
            f"bytes, and a safetensors file has at most {LARGEST_HEADER:,}. Save fewer arrays, for "
            "example by stacking those of equal shape."
        )
    at = len(_START)
    head = head[:at] + checksum(head).encode() + head[at + len(_UNKNOWN) :]
    return len(head).to_bytes(8, "little") + head


# --- reading --------------------------------------------------------------------------------


def read_header(file: IO[bytes], what: str) -> tuple[dict[str, str], dict[str, Entry], int]:
    """The text of a header, its entries, and the position of the arrays.

    **Arguments:**

    - `file`: the file, at its start.
    - `what`: the file, for errors.

    **Raises:** `DamagedError` for anything that `encoded` would not have written.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        why = f"{size} bytes" if size < 8 else "a header of impossible length"
        raise DamagedError(_not_safetensors(what, why))
    head, body = file.read(length), size - 8 - length
    at = len(_START)
    if not head.startswith(_START):
        raise DamagedError(_foreign(head, what))
    if checksum(head[:at] + _UNKNOWN + head[at + 8 :]).encode() != head[at : at + 8]:
        raise DamagedError(f"{what} is damaged: its header does not match its checksum. {INSTEAD}")
    # Only a program that computes the checksum of what it has made up comes this far.
    with parsing(what):
        layout = json.loads(head)
        text = layout.pop("__metadata__")
        if not all(isinstance(x, str) for x in text.values()):
            raise TypeError("text that is not a string")
        _check_version(text, what)
        entries = _entries(layout, json.loads(text["dtypes"]), json.loads(text["checksums"]))
        expected = _total(entries)
    if body != expected:
        raise DamagedError(
            f"{what} is damaged: its arrays have {expected:,} bytes, and the file has {body:,} for "
            f"them. {INSTEAD}"
        )
    return text, entries, 8 + length


def _foreign(head: bytes, what: str) -> str:
    """The message for a header that starts as no header of a known version does."""
    try:
        layout = json.loads(head)
    except (ValueError, RecursionError):
        layout = None
    if not isinstance(layout, dict):
        return _not_safetensors(what, "its header is not JSON")
    text = layout.get("__metadata__")
    # Without this key, it is the start of this very version that is damaged.
    if isinstance(text, dict) and text.get("format") == FORMAT and "header_checksum" in text:
        return (
            f"{what} is a checkpoint of an older form, from before format version 1 was fixed, "
            f"which this version of Slalom does not read. Load it with the version that wrote it: "
            f"{text.get('versions')}."
        )
    return (
        f"{what} is a safetensors file, but not a checkpoint that Slalom wrote. Read it with "
        "`safetensors.numpy.load_file`."
    )


def _not_safetensors(what: str, why: str) -> str:
    """The message for a file without a readable header."""
    return f"{what} is damaged, or is not a safetensors file ({why}). {INSTEAD}"


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """A context in which text of a file is parsed, whose errors become `DamagedError`.

    All errors, since NumPy and Python raise many for text that somebody has made up.
    """
    try:
        yield
    except (OSError, DamagedError, NewerVersionError):
        raise
    except Exception as error:
        message = f"{what} is damaged: its header is malformed ({error}). {INSTEAD}"
        raise DamagedError(message) from error


def _check_version(text: Mapping[str, str], what: str) -> None:
    version = text.get("format_version", "none")
    if text.get("format") != FORMAT or not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise ValueError(f"the format is {text.get('format')!r}, version {version}")
    if int(version) > VERSION:
        raise NewerVersionError(
            f"{what} has format version {version}, but this version of Slalom reads up to "
            f"{VERSION}. Upgrade Slalom to load it."
        )


def _entries(
    layout: Mapping[str, Any], kinds: Mapping[str, str], checksums: Mapping[str, str]
) -> dict[str, Entry]:
    entries = {}
    for name, entry in layout.items():
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
            raise ValueError(f"'{name}' has the shape {shape} at [{start}, {stop}]")
        if stop - start != math.prod(shape) * np.dtype(_NAMES[dtype]).itemsize:
            raise ValueError(f"'{name}' has {stop - start} bytes")
        kind, sums = kinds.get(name, _NAMES[dtype]), checksums[name].split()
        if len(sums) != pieces(stop - start):
            raise ValueError(f"'{name}' has {len(sums)} checksums")
        entries[name] = Entry(_NAMES[dtype], tuple(shape), start, stop - start, kind, sums)
        if not _is_stored_as(entries[name]):
            raise ValueError(f"'{name}' of dtype {kind!r} is stored as {dtype}")
    return entries


def _is_stored_as(entry: Entry) -> bool:
    """Whether arrays of this kind are stored in this form."""
    kind, dtype, last = entry.kind, entry.dtype, entry.shape[-1:]
    if kind == dtype:
        return True
    if kind == "complex128":
        return dtype == "float64" and last == (2,)
    if kind.startswith("key<"):
        return dtype == "uint32" and last != ()
    return dtype == "uint8"


def _total(entries: Mapping[str, Entry]) -> int:
    """The number of bytes of all arrays. Each byte must belong to one of them."""
    total = 0
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.size)):
        if entry.start != total:
            raise ValueError(f"an array starts at {entry.start} and not at {total}")
        total += entry.size
    return total
