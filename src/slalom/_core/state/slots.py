"""The transform, field and parameter of each leaf of a state, and partial resets."""

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ...tree.paths import children_of, dotted, example, half_of, leaf_paths, whole
from ...tree.types import Params
from ..protocol.parts import Part, parts
from ..protocol.transform import AbstractTransform
from .marks import PARAM_LIKE, PER_LEAF, UNTIL_RESET, marks, stored_as


class Slot(NamedTuple):
    """The place of one leaf of a state."""

    owner: str
    """The path of the transform whose `init` created it."""
    rule: str
    """The name of that transform's class."""
    local: str
    """The path inside that transform's state."""
    node: tuple[str, str]
    """The state module with its field: owner, and path inside the owner's state."""
    mark: str | None = None
    """The mark of its field."""
    field: str = ""
    param: str | None = None
    """The parameter that it belongs to, if it belongs to only one."""
    half: str = ""
    """The part of a complex parameter that it belongs to, under `.split_complex()`."""
    stored: str = ""
    """The `stored` of its field, if it is marked."""

    @property
    def leaf(self) -> tuple[Any, ...]:
        """A key that the arrays of one encoded leaf share."""
        return self.node, self.field, self.param, self.half

    def param_among(self, params: Container[str]) -> str | None:
        """Its parameter, if this has one of these paths.

        `Flatten` keeps the state of large parameters under `apart`, beside that in buffers.
        """
        param = self.param or ""
        return next((p for p in (param, param.removeprefix("apart.")) if p in params), None)

    @property
    def name(self) -> str:
        """The full path."""
        return ".".join(filter(None, (self.owner, self.local)))


def slots(
    transform: AbstractTransform[Any],
    state: PyTree,
    params: Sequence[str],
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Slot]:
    """The place of each leaf of a state, in order.

    **Arguments:**

    - `transform`, `state`: the transform and its state, of which only the structure is used.
    - `params`: the paths of all parameters.
    - `is_leaf`: `is_encoded` to take the arrays of an encoded leaf for one.
    """
    leaves, structure = jax.tree.flatten(state, is_leaf=is_leaf)
    result: list[Any] = [None] * len(leaves)
    for part in parts(transform, example(structure)):
        # Parts come depth first, so the innermost owner of a leaf names it last.
        for key_path, i in jax.tree_util.tree_leaves_with_path(part.state):
            result[i] = _slot(part, key_path, params)
    return result


def rule_slots(transform: AbstractTransform[Any]) -> list[Slot]:
    """The place of each leaf of a transform itself, in order."""
    structure = jax.tree.structure(transform)
    result: list[Any] = [None] * structure.num_leaves
    for part in parts(example(structure)):
        for key_path, i in jax.tree_util.tree_leaves_with_path(part.module):
            owner, rule = part.name, type(part.module).__name__
            result[i] = Slot(owner, rule, dotted(key_path), (owner, ""))
    return result


def _slot(part: Part, key_path: tuple[Any, ...], params: Sequence[str]) -> Slot:
    owner, rule, node = part.name, type(part.module).__name__, part.state
    for depth, key in enumerate(key_path):
        field = getattr(key, "name", "")
        mark = marks(node).get(field)
        if mark is not None:
            inside, within = dotted(key_path[:depth]), key_path[depth + 1 :]
            apart = mark not in (PER_LEAF, UNTIL_RESET)
            param = None if not apart else _owner_of(dotted(whole(within)), mark, params)
            node_path, half = (owner, inside), half_of(within)
            stored = stored_as(node, field)
            local = dotted(key_path)
            return Slot(owner, rule, local, node_path, mark, field, param, half, stored)
        node = next(child for k, child in children_of(node)[0] if k == key)
    return Slot(owner, rule, dotted(key_path), (owner, ""))


def _owner_of(path: str, mark: str, params: Sequence[str]) -> str | None:
    """The parameter at this path of a marked field."""
    if mark == PARAM_LIKE:
        return path
    segments = path.split(".")
    before = (".".join(segments[:n]) for n in range(len(segments), -1, -1))
    return next((p for p in before if p in params), None)


def leaves_of(node: tuple[str, str], among: list[Slot]) -> list[tuple[str, str]]:
    """The parameters and halves that the entries of a per-leaf field belong to, in order."""
    of_fields: dict[str, dict[tuple[str, str], None]] = {}
    for s in among:
        if s.node == node and s.param is not None:
            of_fields.setdefault(s.field, {})[s.param, s.half] = None
    # Some fields lack parameters, such as those with arrays for matrices only.
    widest_first = sorted(of_fields.values(), key=len, reverse=True)
    return list(dict.fromkeys(leaf for leaves in widest_first for leaf in leaves))


# --- reset ----------------------------------------------------------------------------------


def reset(
    transform: AbstractTransform[Any],
    old: PyTree,
    fresh: PyTree,
    params: Params,
    chosen: Sequence[str],
) -> PyTree:
    """The old state, with the state of the chosen parameters taken from the fresh one."""
    paths = leaf_paths(params)
    places = slots(transform, old, paths)
    seen = {part.name: part.params for part in parts(transform, old, params=params)}
    leaves = []
    pairs = zip(places, jax.tree.leaves(old), jax.tree.leaves(fresh), strict=True)
    for slot, before, new in pairs:
        if slot.mark is None:
            leaves.append(before)
        elif len(chosen) == len(paths):
            leaves.append(new)
        elif slot.mark == UNTIL_RESET:
            leaves.append(before)
        elif slot.mark == PER_LEAF:
            names = leaves_of(slot.node, places) or _leaves(seen[slot.owner])
            leaves.append(_mixed([p in chosen for p, _ in names], before, new, slot))
        else:
            if slot.param not in paths:
                raise _shared_state_error(slot)
            leaves.append(new if slot.param in chosen else before)
    return jax.tree.structure(old).unflatten(leaves)


def _leaves(params: Params) -> list[tuple[str, str]]:
    """The parameters and halves, in order, that a transform sees."""
    key_paths = (key_path for key_path, _ in jax.tree_util.tree_leaves_with_path(params))
    return [(dotted(whole(key_path)), half_of(key_path)) for key_path in key_paths]


def _mixed(is_new: list[bool], before: Array, new: Array, slot: Slot) -> Array:
    """Per-leaf entries, new where `is_new`. A single number for all leaves becomes a vector."""
    if not any(is_new):
        return before
    if all(is_new):
        return new
    if {before.shape, new.shape} - {(), (len(is_new),)}:
        raise _shared_state_error(slot)
    shape = (len(is_new),)
    fresh, kept = jnp.broadcast_to(new, shape), jnp.broadcast_to(before, shape)
    return jnp.where(jnp.array(is_new), fresh, kept)


def _shared_state_error(slot: Slot) -> Exception:
    return ValueError(
        f"The state '{slot.name}' is shared by several parameters, so it cannot be reset for only "
        "some of them. Reset all of them with `opt.reset(model)`."
    )
