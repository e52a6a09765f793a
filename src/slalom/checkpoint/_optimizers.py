"""Which transform and parameter each leaf of an optimizer belongs to, as a file records it."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import codecs
from .._core.engine.encoded import Encoded, is_encoded
from .._core.state.marks import PER_LEAF
from .._core.state.slots import Slot, slots
from .._core.state.walk import parts
from .._loop.binding.optimizer import Optimizer
from .._loop.reports.rebind import Side, clocks_of, in_form_of, transfer
from ..tree.paths import dotted, example, leaf_paths
from ..wrappers.scope.store import Store
from ._file import Unread
from ._leaves import kind


class Leaf(NamedTuple):
    """One leaf of an optimizer: an array, or the arrays of an encoded one."""

    slot: Slot
    arrays: tuple[str, ...]
    """The names of its arrays in the optimizer."""
    parts: tuple[str, ...] = ()
    """Their names in its codec, if it is encoded."""
    codec: str = ""
    """The code of that codec."""
    shape: tuple[int, ...] = ()
    """The shape, the dtype and the sign that an encoded leaf has when it is decoded."""
    dtype: str = ""
    nonnegative: bool = False


class Layout(NamedTuple):
    """The leaves of an optimizer. Its count is not among them."""

    params: tuple[str, ...]
    """The paths of the trainable parameters."""
    rules: tuple[Leaf, ...]
    """The arrays of the transform: hyperparameters above all."""
    state: tuple[Leaf, ...]

    @classmethod
    def of(cls, opt: Optimizer) -> "Layout":
        """The layout of an optimizer."""
        binding = opt.binding
        transform, (state, _) = example(binding.structure)
        params = leaf_paths(example(binding.params))
        statics = {i for i, _, _ in binding.statics}
        arrays = (i for i in range(binding.structure.num_leaves) if i not in statics)
        names = dict(zip(arrays, binding.names, strict=True))
        places: dict[int, Slot] = {}
        for part in parts(transform):
            # The innermost part that holds a leaf comes last.
            for key_path, i in jax.tree_util.tree_leaves_with_path(part.module):
                rule, local = type(part.module).__name__, dotted(key_path)
                places[i] = Slot(part.name, rule, local, None, (part.name, ""), "", None)
        rules = [Leaf(places[i], (names[i],)) for i in sorted(places) if i in names]
        # An encoded leaf is one leaf, with its own path.
        leaves, structure = jax.tree.flatten(state, is_leaf=is_encoded)
        found = slots(transform, structure.unflatten(range(len(leaves))), params)
        own = [
            _leaf(slot, x, names)
            for slot, x in zip(found, leaves, strict=True)
            if is_encoded(x) or x in names
        ]
        return cls(tuple(params), tuple(rules), tuple(own))

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON."""
        return {
            "params": self.params,
            "rules": [_leaf_to_json(leaf) for leaf in self.rules],
            "state": [_leaf_to_json(leaf) for leaf in self.state],
        }

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> "Layout":
        """The layout that `to_json` gave."""
        rules, state = (tuple(map(_leaf_from_json, known[part])) for part in ("rules", "state"))
        return cls(tuple(known["params"]), rules, state)

    @property
    def rule_arrays(self) -> tuple[str, ...]:
        """The names of the arrays of the transform."""
        return tuple(name for leaf in self.rules for name in leaf.arrays)


def _leaf(slot: Slot, x: Any, names: Mapping[int, str]) -> Leaf:
    if not isinstance(x, Encoded):
        return Leaf(slot, (names[x],))
    arrays = tuple(names[i] for i in x.arrays.values())
    parts = tuple(x.arrays)
    return Leaf(slot, arrays, parts, repr(x.codec), x.shape, x.dtype.name, x.nonnegative)


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    slot = leaf.slot._asdict() | {"node": leaf.slot.node[1]}  # its first entry is the owner
    known = leaf._asdict() | {"slot": _given(slot, Slot._field_defaults)}
    return _given(known, Leaf._field_defaults)


def _given(known: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in known.items() if x != defaults.get(name, "")}


def _leaf_from_json(known: Mapping[str, Any]) -> Leaf:
    given = dict(known["slot"])
    owner = given.get("owner", "")
    fields: dict[str, Any] = dict.fromkeys(Slot._fields, "") | given
    fields["node"] = (owner, given.get("node", ""))
    slot = Slot(**fields)
    rest: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in known.items()}
    rest["slot"] = slot
    leaf = Leaf(**rest)
    texts = (*given.values(), *leaf.arrays, *leaf.parts, leaf.codec, leaf.dtype)
    if not all(isinstance(x, str) or x is None for x in texts):
        raise TypeError("a name that is not a string")
    if not leaf.arrays or (leaf.codec and len(leaf.parts) != len(leaf.arrays)):
        raise ValueError(f"a leaf with the arrays {leaf.arrays} and the parts {leaf.parts}")
    if leaf.codec:
        np.empty(0, leaf.dtype).reshape(0, *leaf.shape)
    return leaf


# --- matching -------------------------------------------------------------------------------


class Match(NamedTuple):
    """What an optimizer takes from a file, by its own names."""

    sources: dict[str, str]
    """The name in the file of each array that corresponds to one of the optimizer."""
    made: dict[str, Any]
    """Values made from arrays of the file: ages of some parameters, and other encodings."""
    recoded: list[str]
    """The leaves whose values are in another codec or dtype than in the file."""
    reshaped: dict[str, tuple[str, str]]
    """Encoded leaves of another shape, by their first array."""
    retyped: dict[str, tuple[str, str]]
    """Encoded leaves that cannot be decoded, likewise."""
    restarted: list[str]
    """The leaves that would fit, but start anew with the others of their parameter."""
    kept: set[str]
    """The arrays that keep their value, and need no report of their own."""
    used: set[str]
    """The names in the file that all of this takes into account."""


def match(
    opt: Optimizer,
    own: Layout,
    arrays: Mapping[str, Any],
    saved: Layout,
    given: Mapping[str, Any],
) -> Match:
    """Matches the arrays of an optimizer with those of a file, by the rules of `opt.rebind`.

    **Arguments:**

    - `opt`, `own`, `arrays`: the optimizer, its layout and its arrays by name.
    - `saved`, `given`: the layout in the file, and its arrays by name.
    """
    found = Match({}, {}, [], {}, {}, [], set(), set())
    _match_rules(own, arrays, saved, given, found)
    olds = [leaf for leaf in saved.state if all(name in given for name in leaf.arrays)]
    encoded = filter(is_encoded, jax.tree.leaves(opt.state, is_leaf=is_encoded))
    known = {repr(x.codec): x.codec for x in encoded}
    old = _side(olds, given, saved.params, known)
    new = _side(own.state, arrays, own.params, known)
    for i in new.entries:
        if isinstance(new.leaves[i], jax.ShapeDtypeStruct):
            new.leaves[i] = np.zeros(new.leaves[i].shape, new.leaves[i].dtype)
    moved = transfer(old, new, _can_follow)
    clocks = clocks_of(old, new, moved)
    for i, j in sorted(moved.origins.items()):
        if i not in clocks:
            _pair(own.state[i], new.leaves[i], olds[j], old.leaves[j], i in moved.fits, found)
    for i, value in moved.gathered.items():
        found.made[own.state[i].arrays[0]] = value
    for j in moved.used:
        found.used.update(olds[j].arrays)
    for i, j in clocks.items():
        found.sources[own.state[i].arrays[0]] = "count" if j is None else olds[j].arrays[0]
    _set_aside(own.state, new, olds, old, {*moved.origins, *moved.gathered, *clocks}, found)
    return found


def _match_rules(
    own: Layout, arrays: Mapping[str, Any], saved: Layout, given: Mapping[str, Any], found: Match
) -> None:
    olds = [leaf for leaf in saved.rules if leaf.arrays[0] in given]
    old = _side(olds, given, saved.params, {})
    new = _side(own.rules, arrays, own.params, {})
    for i, j in transfer(old, new, _is_alike).origins.items():
        found.sources[own.rules[i].arrays[0]] = olds[j].arrays[0]
        found.used.update(olds[j].arrays)


def _side(
    leaves: Sequence[Leaf], arrays: Mapping[str, Any], params: Sequence[str], known: Mapping
) -> Side:
    return Side.at(
        [leaf.slot for leaf in leaves], [_value(x, arrays, known) for x in leaves], list(params)
    )


def _value(leaf: Leaf, arrays: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """The value of a leaf. An encoded one stays encoded."""
    if leaf.codec:
        codec = known[leaf.codec] if leaf.codec in known else _codec(leaf.codec)
        values = {part: arrays[name] for part, name in zip(leaf.parts, leaf.arrays, strict=True)}
        return Encoded(values, codec, leaf.shape, np.dtype(leaf.dtype), leaf.nonnegative)
    value = arrays[leaf.arrays[0]]
    # Ages are put together from single entries, so they are read.
    is_read = leaf.slot.mark == PER_LEAF and isinstance(value, Unread)
    return value.read() if is_read else value


def _is_alike(old: Any, new: Any) -> bool:
    return tuple(old.shape) == tuple(new.shape) and kind(old) == kind(new)


def _can_follow(old: Any, new: Any) -> bool:
    """Whether the value of an old leaf can be stored as the new one."""
    if tuple(old.shape) != tuple(new.shape):
        return False
    if is_encoded(old) and is_encoded(new) and old.form == new.form:
        return True
    if is_encoded(old) and not _is_decodable(old):
        return False
    before, after = (x.dtype.name if is_encoded(x) else kind(x) for x in (old, new))
    if before == after:
        return True
    if "key<" in before + after:
        return False
    families = jnp.floating, jnp.complexfloating
    return any(all(jnp.issubdtype(x, f) for x in (before, after)) for f in families)


def _pair(own: Leaf, new: Any, other: Leaf, old: Any, fits: bool, found: Match) -> None:
    """Notes what becomes of a leaf that the file has a counterpart of."""
    found.used.update(other.arrays)
    alike = _is_same_form(new, old)
    if fits and alike:
        found.sources.update(zip(own.arrays, other.arrays, strict=True))
    elif fits:
        made = in_form_of(new, _read(old))
        arrays = made.arrays.values() if is_encoded(made) else [made]
        found.made.update(zip(own.arrays, arrays, strict=True))
        found.recoded.append(own.slot.name)
    elif _can_follow(old, new):
        found.restarted.append(own.slot.name)
        found.kept.update(own.arrays)
    elif not is_encoded(new) and not is_encoded(old):
        found.sources[own.arrays[0]] = other.arrays[0]
    else:
        found.kept.update(own.arrays)
        if tuple(old.shape) != tuple(new.shape):
            found.reshaped[own.arrays[0]] = str(tuple(old.shape)), str(tuple(new.shape))
        else:
            found.retyped[own.arrays[0]] = _storage(other, old), _storage(own, new)


def _set_aside(
    leaves: Sequence[Leaf],
    new: Side,
    olds: Sequence[Leaf],
    old: Side,
    paired: Iterable[int],
    found: Match,
) -> None:
    """Notes the leaves without a value in the file for which this is no difference."""
    paired = set(paired)
    for i, leaf in enumerate(leaves):
        if i in paired:
            continue
        if leaf.slot.rule == Store.__name__:
            # The number of steps for which it was stored.
            if isinstance(new.leaves[i], jax.ShapeDtypeStruct):
                found.made[leaf.arrays[0]] = np.zeros(new.leaves[i].shape, new.leaves[i].dtype)
            else:
                found.kept.update(leaf.arrays)
        if i in new.entries:
            like = (leaf.slot.rule, leaf.slot.local)
            same = [j for j in old.entries if (olds[j].slot.rule, olds[j].slot.local) == like]
            if same:
                # The ages of means that all start anew.
                found.restarted.append(leaf.slot.name)
                found.kept.update(leaf.arrays)
                found.used.update(name for j in same for name in olds[j].arrays)
    for leaf in olds:
        if leaf.slot.rule == Store.__name__:
            found.used.update(leaf.arrays)


def read_leaf(leaf: Leaf, arrays: Mapping[str, Any]) -> np.ndarray:
    """The value of a leaf of a file, decoded.

    **Arguments:**

    - `leaf`: the leaf.
    - `arrays`: the arrays in the file that are not read yet, by their names in the optimizer.
    """
    value = _value(leaf, arrays, {})
    if not is_encoded(value):
        return value.read() if isinstance(value, Unread) else value
    if not _is_decodable(value):
        raise ValueError(
            f"'{leaf.slot.local}' is stored in `{leaf.codec}`, which only an optimizer with this "
            "codec can decode. Load the checkpoint, remove the codec with `opt.rebind`, and save "
            "it again."
        )
    return np.asarray(_read(value).decode())


# --- other storage --------------------------------------------------------------------------


def _is_same_form(a: Any, b: Any) -> bool:
    if is_encoded(a) or is_encoded(b):
        return is_encoded(a) and is_encoded(b) and a.form == b.form and a.codec is not None
    return _is_alike(a, b)


def _storage(leaf: Leaf, value: Any) -> str:
    return leaf.codec or kind(value)


def _read(value: Any) -> Any:
    """A leaf of a file with its arrays in memory."""
    if is_encoded(value):
        arrays = {name: _read(x) for name, x in value.arrays.items()}
        return Encoded(arrays, *value.form)
    return jnp.asarray(value.read() if isinstance(value, Unread) else value)


def _is_decodable(value: Encoded) -> bool:
    """Whether the codec is known, and the arrays are what it would have made."""
    if value.codec is None:
        return False
    try:
        like = jax.ShapeDtypeStruct(value.shape, value.dtype)
        expected = jax.eval_shape(value.encode, like).arrays
    except (TypeError, ValueError):
        return False
    same = expected.keys() == value.arrays.keys()
    return same and all(_is_alike(x, value.arrays[name]) for name, x in expected.items())


def _codec(code: str) -> Any:
    """The codec of Slalom with this code, or `None`. Nothing else is ever made of a file's text."""
    try:
        call = ast.parse(code, mode="eval").body
        if not isinstance(call, ast.Call):
            return None
        made = getattr(codecs, ast.unparse(call.func).removeprefix("sl.codecs."), None)
        if not (isinstance(made, type) and issubclass(made, codecs.AbstractCodec)):
            return None
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        found = made(*map(ast.literal_eval, call.args), **options)
    except (RecursionError, SyntaxError, TypeError, ValueError):
        return None
    return found if repr(found) == code else None
