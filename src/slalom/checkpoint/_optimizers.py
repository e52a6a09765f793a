"""Which transform and parameter each array of an optimizer belongs to, as a file records it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core.encoded import is_encoded
from .._core.slots import Slot, slots
from .._core.walk import parts
from .._optimizer.optimizer import Optimizer
from .._optimizer.rebind import Side, transfer
from .._paths import dotted, example, leaf_paths
from ._leaves import kind


class Layout(NamedTuple):
    """The places of an optimizer's arrays, by name. Its count has none."""

    params: list[str]
    """The paths of the trainable parameters."""
    rules: dict[str, Slot]
    """The arrays of the transform: hyperparameters above all."""
    state: dict[str, Slot]
    codecs: dict[str, str]
    """The codec of each array that is encoded."""

    @classmethod
    def of(cls, opt: Optimizer) -> "Layout":
        """The layout of an optimizer."""
        binding = opt.binding
        transform, (state, _) = example(binding.structure)
        params = leaf_paths(example(binding.params))
        places: dict[int, Slot] = {}
        for part in parts(transform):
            # The innermost part that holds a leaf comes last.
            for key_path, i in jax.tree_util.tree_leaves_with_path(part.module):
                rule, local = type(part.module).__name__, dotted(key_path)
                places[i] = Slot(part.name, rule, local, None, (part.name, ""), "", None)
        places |= zip(jax.tree.leaves(state), slots(transform, state, params), strict=True)
        statics = {i for i, _, _ in binding.statics}
        arrays = [places[i] for i in sorted(places) if i not in statics]
        named = list(zip(binding.names, arrays, strict=False))  # the last name is the count's
        leaves = jax.tree.leaves(state, is_leaf=is_encoded)
        codecs = {i: repr(x.codec) for x in leaves if is_encoded(x) for i in jax.tree.leaves(x)}
        numbers = [i for i in sorted(places) if i not in statics]
        return cls(
            params,
            dict(named[: binding.rules]),
            dict(named[binding.rules :]),
            {n: codecs[i] for n, i in zip(binding.names, numbers, strict=False) if i in codecs},
        )

    def to_json(self) -> dict[str, Any]:
        """The layout as JSON."""
        return {
            "params": self.params,
            "rules": {name: _slot_to_json(slot) for name, slot in self.rules.items()},
            "state": {name: _slot_to_json(slot) for name, slot in self.state.items()},
            "codecs": self.codecs,
        }

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> "Layout":
        """The layout that `to_json` gave."""
        rules = {name: _slot_from_json(slot) for name, slot in known["rules"].items()}
        state = {name: _slot_from_json(slot) for name, slot in known["state"].items()}
        return cls(known["params"], rules, state, known["codecs"])

    def stores_like(self, other: "Layout") -> bool:
        """Whether the state rests in the same codecs."""
        alike = self.codecs == other.codecs
        return alike and _is_stored(self.state) == _is_stored(other.state)


def _is_stored(state: Mapping[str, Slot]) -> bool:
    return any(slot.rule == "Store" for slot in state.values())


def _slot_to_json(slot: Slot) -> dict[str, Any]:
    known = slot._asdict() | {"node": slot.node[1]}  # its first entry is the owner
    # An empty parameter is the path of a model that is one array.
    return {name: x for name, x in known.items() if x or (name == "param" and x is not None)}


def _slot_from_json(known: Mapping[str, Any]) -> Slot:
    owner = known.get("owner", "")
    given = {field: known.get(field, "") for field in ("rule", "local", "field", "half")}
    node = (owner, known.get("node", ""))
    return Slot(owner=owner, mark=known.get("mark"), node=node, param=known.get("param"), **given)


class Match(NamedTuple):
    """What an optimizer takes from a file, by its own names."""

    sources: dict[str, str]
    """The name in the file of each array that corresponds to one of the optimizer."""
    held: set[str]
    """Those of them that fit, but are not taken, because others of the same parameter do not."""
    gathered: dict[str, Any]
    """Values put together from several arrays of the file, such as the ages of the parameters."""
    used: set[str]
    """The names in the file that these take into account."""


def match(own: Layout, arrays: Mapping[str, Any], saved: Layout, given: Mapping[str, Any]) -> Match:
    """Matches the arrays of an optimizer with those of a file, by the rules of `opt.rebind`.

    **Arguments:**

    - `own`, `arrays`: the layout of the optimizer, and its arrays by name.
    - `saved`, `given`: the layout in the file, and its arrays by name.
    """
    found = Match({}, set(), {}, set())
    pairs = ((saved.rules, own.rules), (saved.state, own.state))
    for before, after in pairs:
        olds, news = [name for name in before if name in given], list(after)
        old = Side.at([before[n] for n in olds], [given[n] for n in olds], saved.params)
        new = Side.at(list(after.values()), [arrays[n] for n in news], own.params)
        for i in new.entries:
            if isinstance(new.leaves[i], jax.ShapeDtypeStruct):
                new.leaves[i] = np.zeros(new.leaves[i].shape, new.leaves[i].dtype)
        fitting = transfer(old, new, _same_kind)
        for i, j in fitting.origins.items():
            found.sources[news[i]] = olds[j]
            if i not in fitting.fits and _same_kind(old.leaves[j], new.leaves[i]):
                found.held.add(news[i])
        found.gathered.update({news[i]: value for i, value in fitting.gathered.items()})
        found.used.update(olds[j] for j in {*fitting.used, *fitting.origins.values()})
    return found


def _same_kind(old: Any, new: Any) -> bool:
    return old.shape == new.shape and kind(old) == kind(new)
