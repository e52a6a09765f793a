"""The leaves to save, with their names, layouts, and their way to the host and back.

A layout records in a file which transform and parameter each array of an optimizer belongs to.
"""

import ast
import collections
import datetime
import enum
import random
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import codecs, tree
from .._core.engine.encoded import Encoded, is_encoded
from .._core.state.slots import Slot, rule_slots
from .._loop.binding import binding
from .._loop.binding.optimizer import Optimizer
from .._loop.reports.rebind import Side
from ..tree.types import PyTree
from ._file import Unread, dtype_named

NUMBERS = (bool, int, float, complex, str)
"""The Python types that are saved. A subclass, such as an enum, is not."""


def optimizers(root: str, value: PyTree) -> dict[str, Optimizer]:
    """The optimizers in a tree, by path."""
    pairs = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: isinstance(x, Optimizer))
    return {_joined(root, tree.dotted(path)): x for path, x in pairs if isinstance(x, Optimizer)}


def _joined(root: str, path: str) -> str:
    return f"{root}.{path}" if path else root


def named_leaves(root: str, value: PyTree) -> list[tuple[str, Any]]:
    """Every leaf of a tree with a name of its own, in order."""
    named: dict[str, Any] = {}
    for path, leaf in binding.named_leaves(value):
        named[binding.free_name(_joined(root, path), named)] = leaf
    return [*named.items()]


def saved_leaves(root: str, value: PyTree) -> dict[str, Any]:
    """The leaves of a tree that are saved: arrays, and numbers and strings outside the model.

    Functions are part of the program, as is whatever else a model holds. Raises an error for
    anything else, which would be lost.
    """
    result = {}
    for name, leaf in named_leaves(root, value):
        in_model = root == "model"
        if tree.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            result[name] = leaf
        elif type(leaf) in NUMBERS:
            if not in_model:
                result[name] = leaf
        elif _has_values(leaf) or not (
            in_model or callable(leaf) or type(leaf) in (object, _DTYPE)
        ):
            raise TypeError(_not_savable(name, leaf))
    return result


_DTYPE = type(np.dtype("float32"))
_INSTEAD = (
    (enum.Enum, "its name or value, `{}.name`"),
    ((bytes, bytearray, memoryview), "an array, `np.frombuffer({}, np.uint8)`"),
    ((datetime.date, datetime.time), "text, `{}.isoformat()`"),
    (datetime.timedelta, "a number, `{}.total_seconds()`"),
    (np.random.Generator, "its state, `{}.bit_generator.state`"),
    ((np.random.RandomState, np.random.BitGenerator), "its state, `{}.get_state()` or `{}.state`"),
    (random.Random, "its state, `{}.getstate()`"),
    ((collections.Counter, Mapping), "a dict, `dict({})`"),
    ((Set, collections.deque, Sequence), "a list, `list({})`"),
    (NUMBERS, "a plain Python number or string"),
)
"""Remedies by type. The first type that fits counts."""


def _not_savable(name: str, leaf: Any) -> str:
    """The message for a leaf that no checkpoint can hold."""
    last, owner = name.rpartition(".")[2], type(leaf)
    advice = (text for types, text in _INSTEAD if isinstance(leaf, types))
    instead = next(advice, "arrays, numbers and strings, or leave it out")
    if hasattr(leaf, "state_dict"):
        instead = "its state, `{}.state_dict()`"
    elif _has_values(leaf):
        instead = "an array, `np.asarray({})`"
    instead = instead.replace("{}", last if last.isidentifier() else "x")
    module = "" if owner.__module__ == "builtins" else f"{owner.__module__}."
    return (
        f"'{name}' is a `{module}{owner.__qualname__}`, which a checkpoint cannot hold. Save and "
        f"load {instead}."
    )


def _has_values(x: Any) -> bool:
    """Whether this is an array, or a module with arrays, of another library."""
    return not isinstance(x, type) and (hasattr(x, "__array__") or hasattr(x, "state_dict"))


def shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of an array, read or not, or of a stand-in for one; `None` for anything else."""
    return tuple(x.shape) if hasattr(x, "shape") else None


def kind(x: Any) -> str:
    """The type of a leaf: the dtype of an array, which names the implementation of keys, or the
    codec of an encoded one."""
    if isinstance(x, Unread):
        return x.kind
    if is_encoded(x):
        return x.codec if isinstance(x.codec, str) else repr(x.codec)
    if shape_of(x) is None:
        return f"a Python {type(x).__name__}"
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.dtype.name
    if isinstance(x, jax.ShapeDtypeStruct):
        # `jax.random.key_impl` takes no abstract keys.
        return f"key<{x.dtype._impl.name}>"  # pyright: ignore[reportAttributeAccessIssue]  # JAX names it nowhere else
    return f"key<{jax.random.key_impl(x)}>"


def form(x: Any) -> Any:
    """Everything but the values of a leaf, or of the arrays of an encoded one.

    Two leaves of one form can exchange their arrays.
    """
    if is_encoded(x):
        return x.form, {name: form(array) for name, array in x.arrays.items()}
    return shape_of(x), kind(x)


def raw(x: Any) -> Any:
    """An array, or the raw data of keys."""
    return jax.random.key_data(x) if tree.is_key(x) else x


def placed(value: Any, like: Any) -> Any:
    """An array as the type of array that it replaces, on the devices where that is."""
    is_fresh = isinstance(value, Unread)
    if isinstance(value, Unread):
        key = re.fullmatch("key<(.*)>", value.kind)
        value = value.read()
        if key:
            value = jax.random.wrap_key_data(jnp.asarray(value), impl=key[1])
    if isinstance(like, np.generic):
        return np.asarray(value)[()]
    if isinstance(like, np.ndarray):
        return value if is_fresh else np.array(value)
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return value
    if getattr(like, "weak_type", False) and value.shape == ():
        value = value.item()  # a Python number becomes an array with a weak type
    # On the CPU, JAX takes what was just read as it is, without a copy.
    return jax.device_put(value, like.sharding if _has_devices(like) else None, may_alias=is_fresh)


def _has_devices(like: Any) -> bool:
    """Whether an array was put on its devices, or stands for an array that was."""
    if isinstance(like, jax.Array):
        return like.committed
    mesh = getattr(like.sharding, "mesh", None)
    return like.sharding is not None and not isinstance(mesh, jax.sharding.AbstractMesh)


StateLayout = dict[str, Side]
"""The arrays of a transform under `"rules"`, and those of its state under `"state"`, with their
names in place of values. The count of an optimizer is in neither. An encoded leaf of a file has the
code of its codec in place of the codec."""


def layout_of(opt: Optimizer, start: str) -> StateLayout:
    """The layout of an optimizer, all of whose names begin with `start`."""
    transform, state, _ = binding.positions(jax.tree.structure(opt.arrays))
    names = [start + name for name in binding.named_arrays(opt.arrays)]

    def named(leaf: Any) -> Any:  # `None` for what is no array
        return jax.tree.map(lambda i: names[i] if isinstance(i, binding.Position) else None, leaf)

    of_state = Side.of(transform, state, opt.binding.paths)
    of_rules = zip(rule_slots(transform), jax.tree.leaves(transform), strict=True)
    rules = Side.at(of_rules, of_state.params)
    return {"rules": rules.mapped(named), "state": of_state.mapped(named)}


# --- as JSON --------------------------------------------------------------------------------


def layout_to_json(layout: StateLayout) -> dict[str, Any]:
    """A layout as JSON."""
    parts = {part: [_leaf_to_json(*x) for x in side.pairs] for part, side in layout.items()}
    return {"params": layout["state"].params} | parts


def _leaf_to_json(slot: Slot, names: Any) -> dict[str, Any]:
    fields = slot._asdict() | {"node": slot.node[1]}  # its first entry is the owner
    entries = {"slot": _without_defaults(fields), "arrays": jax.tree.leaves(names)}
    if is_encoded(names):
        entries |= {"parts": [*names.arrays], "codec": repr(names.codec), "shape": names.shape}
        entries |= {"dtype": names.dtype.name, "nonnegative": names.nonnegative}
    return _without_defaults(entries)


def _without_defaults(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in entries.items() if x not in ("", (), False)}


def layout_from_json(entries: Mapping[str, Any], start: str) -> StateLayout:
    """The layout from the JSON of `layout_to_json`, with `start` before all names.

    Raises an error for anything else.
    """
    params = [_text(x) for x in entries["params"]]
    return {
        part: Side.at([_leaf_from_json(x, start) for x in entries[part]], params)
        for part in ("rules", "state")
    }


def _leaf_from_json(entries: Mapping[str, Any], start: str) -> tuple[Slot, Any]:
    fields: dict[str, Any] = dict.fromkeys(Slot._fields, "") | entries["slot"]
    for name, x in fields.items():
        if x is not None or name not in ("mark", "param"):
            _text(x)
    fields["node"] = fields["owner"], fields["node"]
    slot = Slot(**fields)
    arrays = [start + _text(x) for x in entries["arrays"]]
    if "codec" not in entries:
        (name,) = arrays
        return slot, name
    named = dict(zip(map(_text, entries["parts"]), arrays, strict=True))
    if len(named) < max(1, len(arrays)):
        raise ValueError(f"a leaf with the arrays {arrays} and the parts {[*named]}")
    codec, dtype = _text(entries["codec"]), dtype_named(_text(entries["dtype"]))
    shape = tuple(entries.get("shape", ()))
    np.empty(0, dtype).reshape(0, *shape)
    if not jax.numpy.issubdtype(dtype, np.inexact):
        raise ValueError(f"parameters of the dtype {dtype.name}")
    return slot, Encoded(named, codec, shape, dtype, bool(entries.get("nonnegative")))


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError("a name that is not a string")
    return x


# --- the values of a leaf -------------------------------------------------------------------


def filled(names: Any, arrays: Mapping[str, Any], codec_of: Mapping[str, Any]) -> Any:
    """A leaf of a layout with arrays in place of their names.

    **Arguments:**

    - `names`: the leaf.
    - `arrays`: arrays by name, read or not.
    - `codec_of`: the codecs of the program, by their code.
    """
    leaf = jax.tree.map(arrays.__getitem__, names)
    if is_encoded(leaf) and isinstance(leaf.codec, str):
        codec = codec_of[leaf.codec] if leaf.codec in codec_of else _codec(leaf.codec)
        leaf = Encoded(leaf.arrays, codec, *leaf.form[1:])
    return leaf


def read(leaf: Any) -> Any:
    """A leaf whose arrays are in memory."""
    return jax.tree.map(lambda x: x.read() if isinstance(x, Unread) else x, leaf)


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
        return form(leaf) == form(jax.eval_shape(leaf.encode, like))
    except (TypeError, ValueError):
        return False


def _codec(code: str) -> Any:
    """The codec of Slalom with this code, or the code. Nothing else is made of a file's text."""
    try:
        call = ast.parse(code, mode="eval").body
        if not isinstance(call, ast.Call):
            return code
        cls = getattr(codecs, ast.unparse(call.func).removeprefix("sl.codecs."), None)
        if not (isinstance(cls, type) and issubclass(cls, codecs.AbstractCodec)):
            return code
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        codec = cls(*map(ast.literal_eval, call.args), **options)
    except (RecursionError, SyntaxError, TypeError, ValueError):
        return code
    return codec if repr(codec) == code else code
