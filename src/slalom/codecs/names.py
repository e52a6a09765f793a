"""Codecs by their names, and the memory of the host."""

from typing import Any

import equinox as eqx

from .._core.text.printing import AbstractPrinted, code
from ._codec import AbstractCodec
from .blocks import dynamic8, int4, int8
from .floats import cast


class offload(AbstractPrinted):
    """The memory of the host: state stays there between steps, and moves to the device for each
    step.

    It is not changed, so this is not a codec. To encode it too, store it twice:
    `tx.store("int8").store(sl.codecs.offload("pinned_host"))`.

    **Arguments:**

    - `memory_kind`: the name of the memory, as in `jax.sharding.NamedSharding(...,
        memory_kind="pinned_host")`.
    """

    memory_kind: str = eqx.field(default="pinned_host", static=True)


NAMED: dict[str, AbstractCodec] = {
    "bfloat16": cast("bfloat16"),
    "float16": cast("float16"),
    "float8_e4m3fn": cast("float8_e4m3fn"),
    "int8": int8(),
    "dynamic8": dynamic8(),
    "int4": int4(),
}


def as_codec(what: str, codec: Any) -> AbstractCodec | offload:
    """The codec with this name, or the codec itself. `what` names it in errors."""
    if isinstance(codec, AbstractCodec | offload):
        return codec
    if isinstance(codec, str) and codec in NAMED:
        return NAMED[codec]
    called_hint = ""
    if isinstance(codec, type) and issubclass(codec, AbstractCodec | offload):
        called_hint = f" Call it: `sl.codecs.{codec.__name__}(...)`."
    names = ", ".join(map(repr, NAMED))
    raise TypeError(
        f"{what} must be one of {names}, or a codec such as `sl.codecs.int8()`, got "
        f"{code(codec)}.{called_hint}"
    )
