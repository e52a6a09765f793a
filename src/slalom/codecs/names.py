"""Codecs by their names."""

from typing import Any

from .._core.text.printing import code
from ._codec import AbstractCodec
from .dynamic import dynamic8
from .floats import cast
from .four_bits import int4
from .integers import int8
from .offloading import offload

NAMED: dict[str, AbstractCodec] = {
    "bfloat16": cast("bfloat16"),
    "float16": cast("float16"),
    "float8_e4m3fn": cast("float8_e4m3fn"),
    "int8": int8(),
    "dynamic8": dynamic8(),
    "int4": int4(),
}


def as_codec(what: str, given: Any) -> AbstractCodec | offload:
    """The codec with this name, or the codec itself. `what` names it in errors."""
    if isinstance(given, AbstractCodec | offload):
        return given
    if isinstance(given, str) and given in NAMED:
        return NAMED[given]
    called_hint = ""
    if isinstance(given, type) and issubclass(given, AbstractCodec | offload):
        called_hint = f" Call it: `sl.codecs.{given.__name__}(...)`."
    names = ", ".join(map(repr, NAMED))
    raise TypeError(
        f"{what} must be one of {names}, or a codec such as `sl.codecs.int8()`, got "
        f"{code(given)}.{called_hint}"
    )
