"""Records in a file which transform and parameter each array of an optimizer belongs to."""

import ast
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .. import codecs
from .._core.engine.encoded import Encoded, is_encoded
from .._core.state.slots import Slot, rule_slots
from .._loop.binding.names import Position, named_arrays, positions
from .._loop.binding.optimizer import Optimizer
from .._loop.reports.rebind import Side
from ..tree.paths import example
from ._file import Unread, dtype_named
from ._leaves import difference

StateLayout = dict[str, Side]
"""The arrays of a transform under `"rules"`, and those of its state under `"state"`, with their
names in place of values. The count of an optimizer is in neither. An encoded leaf of a file has the
code of its codec in place of the codec."""


def layout_of(opt: Optimizer, start: str) -> StateLayout:
    """The layout of an optimizer, all of whose names begin with `start`."""
    transform, state, _ = positions(jax.tree.structure(opt.arrays))
    names = [start + name for name in named_arrays(opt.arrays)]

    def named(leaf: Any) -> Any:  # `None` for what is no array
        return jax.tree.map(lambda i: names[i] if isinstance(i, Position) else None, leaf)

    own = Side.of(transform, state, example(opt.binding.params))
    rules = Side.at(rule_slots(transform), jax.tree.leaves(transform), own.params)
    return {"rules": rules.mapped(named), "state": own.mapped(named)}


# --- as JSON --------------------------------------------------------------------------------


def layout_to_json(layout: StateLayout) -> dict[str, Any]:
    """A layout as JSON."""
    parts = {
        part: [_leaf_to_json(*pair) for pair in zip(side.places, side.leaves, strict=True)]
        for part, side in layout.items()
    }
    return {"params": layout["state"].params} | parts


def _leaf_to_json(slot: Slot, names: Any) -> dict[str, Any]:
    place = slot._asdict() | {"node": slot.node[1]}  # its first entry is the owner
    known = {"slot": _without_defaults(place), "arrays": jax.tree.leaves(names)}
    if is_encoded(names):
        known |= {"parts": [*names.arrays], "codec": repr(names.codec), "shape": names.shape}
        known |= {"dtype": names.dtype.name, "nonnegative": names.nonnegative}
    return _without_defaults(known)


def _without_defaults(known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in known.items() if x not in ("", (), False)}


def layout_from_json(known: Mapping[str, Any], start: str) -> StateLayout:
    """The layout from the JSON of `layout_to_json`, with `start` before all names.

    Raises an error for anything else.
    """
    params = [_text(x) for x in known["params"]]
    parts = {part: [_leaf_from_json(x, start) for x in known[part]] for part in ("rules", "state")}
    return {
        part: Side.at([slot for slot, _ in pairs], [names for _, names in pairs], params)
        for part, pairs in parts.items()
    }


def _leaf_from_json(known: Mapping[str, Any], start: str) -> tuple[Slot, Any]:
    fields: dict[str, Any] = dict.fromkeys(Slot._fields, "") | known["slot"]
    for name, x in fields.items():
        if x is not None or name not in ("mark", "param"):
            _text(x)
    fields["node"] = fields["owner"], fields["node"]
    slot = Slot(**fields)
    arrays = [start + _text(x) for x in known["arrays"]]
    if "codec" not in known:
        (name,) = arrays
        return slot, name
    named = dict(zip(map(_text, known["parts"]), arrays, strict=True))
    if len(named) < max(1, len(arrays)):
        raise ValueError(f"a leaf with the arrays {arrays} and the parts {[*named]}")
    codec, dtype = _text(known["codec"]), dtype_named(_text(known["dtype"]))
    shape = tuple(known.get("shape", ()))
    np.empty(0, dtype).reshape(0, *shape)
    if not jax.numpy.issubdtype(dtype, np.inexact):
        raise ValueError(f"parameters of the dtype {dtype.name}")
    return slot, Encoded(named, codec, shape, dtype, bool(known.get("nonnegative")))


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError("a name that is not a string")
    return x


# --- the values of a leaf -------------------------------------------------------------------


def has_all(names: Any, arrays: Mapping[str, Any]) -> bool:
    """Whether there are all arrays of a leaf of a layout."""
    return all(name in arrays for name in jax.tree.leaves(names))


def filled(names: Any, arrays: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """A leaf of a layout with arrays in place of their names.

    **Arguments:**

    - `names`: the leaf.
    - `arrays`: arrays by name, read or not.
    - `known`: the codecs of the program, by their code.
    """
    leaf = jax.tree.map(arrays.__getitem__, names)
    if is_encoded(leaf) and isinstance(leaf.codec, str):
        codec = known[leaf.codec] if leaf.codec in known else _codec(leaf.codec)
        leaf = Encoded(leaf.arrays, codec, *leaf.form[1:])
    return leaf


def arrays_in(leaf: Any) -> list[Any]:
    """The arrays of a leaf, read or not."""
    return [*leaf.arrays.values()] if is_encoded(leaf) else [leaf]


def read(leaf: Any) -> Any:
    """A leaf whose arrays are in memory."""
    if is_encoded(leaf):
        return Encoded({name: read(x) for name, x in leaf.arrays.items()}, *leaf.form)
    return leaf.read() if isinstance(leaf, Unread) else leaf


def decoded(names: Any, arrays: Mapping[str, Any], what: str) -> np.ndarray:
    """The value of a leaf of a file.

    **Arguments:**

    - `names`: the leaf of a layout.
    - `arrays`: arrays by name, which are not read yet.
    - `what`: the leaf, for errors.
    """
    leaf = filled(names, arrays, {})
    if not is_encoded(leaf):
        return read(leaf)
    if not is_decodable(leaf):
        raise ValueError(
            f"'{what}' is stored in `{names.codec}`, which only an optimizer with this "
            "codec can decode. Load the checkpoint, remove the codec with `opt.rebind`, and save "
            "it again."
        )
    return np.asarray(read(leaf).decode())


def is_decodable(leaf: Encoded) -> bool:
    """Whether the codec is known, and its arrays have the right form."""
    if isinstance(leaf.codec, str):
        return False
    try:
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        expected = jax.eval_shape(leaf.encode, like).arrays
    except (TypeError, ValueError):
        return False
    same = expected.keys() == leaf.arrays.keys()
    return same and all(difference(leaf.arrays[n], x) is None for n, x in expected.items())


def _codec(code: str) -> Any:
    """The codec of Slalom with this code, or the code. Nothing else is made of a file's text."""
    try:
        call = ast.parse(code, mode="eval").body
        if not isinstance(call, ast.Call):
            return code
        made = getattr(codecs, ast.unparse(call.func).removeprefix("sl.codecs."), None)
        if not (isinstance(made, type) and issubclass(made, codecs.AbstractCodec)):
            return code
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        found = made(*map(ast.literal_eval, call.args), **options)
    except (RecursionError, SyntaxError, TypeError, ValueError):
        return code
    return found if repr(found) == code else code
