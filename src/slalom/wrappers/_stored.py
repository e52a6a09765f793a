"""How a transform runs whose state has encoded leaves.

Compositions run as always, with `Coded` in the place of their parts, so that leaves are decoded
inside of conditionals. Elementwise rules, also several links of a chain together, run leaf by leaf
and piece by piece. Any other rule runs on decoded leaves.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from .. import tree
from .._core.chain import Chain
from .._core.context import Context
from .._core.declared import Part
from .._core.encoded import decoded, encoded_again, encoded_like, has_encoded, is_encoded, seed_of
from .._core.manual_axes import refuse_parts
from .._core.marks import PARAM_LIKE, PER_LEAF, marks, params_like_fields
from .._core.pieces import in_pieces, last_of
from .._core.stateless import AbstractStatelessTransform
from .._core.traits import AbstractTraits
from .._core.transform import AbstractTransform, pair
from .._core.wrapper import AbstractWrapper
from .._core.write import ADD, RETURN, Writer
from .._paths import leaf_paths
from .._types import Params, under_jit
from ..where.resolve import mask
from .every_k import EveryK
from .mask import Mask


class Coded(AbstractWrapper[Any]):
    """A part of a stored transform, in the place of which it runs.

    **Arguments:**

    - `inner`: the part.
    - `clock`: the number of steps, for stochastic rounding.
    - `structure`: that of its state, with encoded leaves.
    """

    nameless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    needs_whole_params: ClassVar[bool | None] = False

    inner: AbstractTransform
    clock: Int[Array, "*runs"]
    structure: Any = eqx.field(static=True)

    def init(self, params: Params) -> Any:
        like, structure = jax.tree.flatten(
            self.structure.unflatten(range(self.structure.num_leaves)), is_leaf=is_encoded
        )
        fresh = structure.flatten_up_to(self.inner.init(params))
        pairs = zip(like, fresh, strict=True)
        return structure.unflatten(
            [encoded_like(x, e.codec, e.nonnegative) if is_encoded(e) else x for e, x in pairs]
        )

    def inner_state(self, state: Any) -> Any:
        return state

    def run(
        self,
        write: Writer,
        updates: PyTree,
        state: Any,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, Any]:
        part = self.inner_part(state, context, params)
        return run_stored(part, write, updates, self.clock)

    def has_updated(self, state: Any) -> Bool[Array, "*runs"] | bool:
        return self.inner.has_updated(state)


def run_stored(part: Part, write: Writer, updates: PyTree, clock: Any) -> tuple[Any, Any]:
    """The result of a transform and its new state, where encoded leaves stay encoded.

    **Arguments:**

    - `part`: the transform and what it sees.
    - `write`: as for `AbstractTransform.run`.
    - `updates`: the gradients, which may have encoded leaves.
    - `clock`: the number of steps, for stochastic rounding.
    """
    if isinstance(part.module, Coded) or not has_encoded((part.state, updates)):
        return part.run(write, updates)
    if isinstance(part.module, Chain):
        return _run_chain(part, write, updates, clock)
    links = _leafwise(part, _shapes(updates))
    if links is not None:
        result, states = _run_leaves(links, part, write, updates, clock)
        return result, _nested(part.module, iter(states))
    children = [
        child
        for child in part.module.children(part.state, part.context, part.params)
        if isinstance(child.module, AbstractTraits)
    ]
    if children:
        return _run_around(part, children, write, updates, clock)
    result, state = part._replace(state=decoded(part.state)).run(write, decoded(updates))
    return result, encoded_again(part.state, state, clock, part.name)


def _run_around(
    part: Part, children: list[Part], write: Writer, updates: PyTree, clock: Any
) -> tuple[Any, Any]:
    """Runs a transform that is made of others."""
    coded = [Coded(c.module, clock, jax.tree.structure(c.state)) for c in children]
    module = eqx.tree_at(lambda outer: [c.get(outer) for c in children], part.module, coded)
    if isinstance(module, EveryK):
        # It accumulates in pieces, and hands on what it has accumulated as it rests.
        return part._replace(module=module).run(write, decoded(updates))
    own = [] if any(c.state is part.state for c in children) else params_like_fields(part.state)
    names = [name for name in own if has_encoded(getattr(part.state, name))]
    plain = _with_fields(part.state, {n: decoded(getattr(part.state, n)) for n in names})
    result, new = part._replace(module=module, state=plain).run(write, decoded(updates))
    again = {
        n: encoded_again(getattr(part.state, n), getattr(new, n), clock, f"{part.name}.{n}")
        for n in names
    }
    return result, _with_fields(new, again)


def _run_chain(part: Part, write: Writer, updates: Any, clock: Any) -> tuple[Any, Any]:
    """Runs a chain: neighbors that work leaf by leaf together."""
    links = part.module.children(part.state, part.context, part.params)
    states: list[Any] = []
    while len(states) < len(links):
        start = len(states)
        factors = _factors(links[start], updates)
        stop, group = start + bool(factors), []
        while stop < len(links):
            found = _leafwise(links[stop], _shapes(updates))
            if found is None:
                break
            group += found
            stop += 1
        if has_encoded((updates, [link.part.state for link in group])) and group:
            own = write if stop == len(links) else RETURN
            updates, new = _run_leaves(group, part, own, updates, clock, factors, start > 0)
            flat = iter(new)
            states += [None] * bool(factors)
            states += [_nested(link.module, flat) for link in links[len(states) : stop]]
            continue
        own = write if start + 1 == len(links) else RETURN
        updates, new = run_stored(links[start], own, updates, clock)
        states.append(new)
    return updates, tuple(states)


def _factors(link: Part, updates: Any) -> tuple[Any, ...]:
    """The numbers that a link multiplies all updates by, if this is all it does."""
    if not isinstance(link.module, AbstractStatelessTransform):
        return ()
    with jax.named_scope("/".join(link.path)):
        factors = link.module.factors(decoded(updates), link.context)
    if factors and not link.module.elementwise:
        refuse_parts(type(link.module).__name__, updates, link.params)
    return factors


# --- leaf by leaf ---------------------------------------------------------------------------


class _Link(NamedTuple):
    """An elementwise rule that runs leaf by leaf."""

    part: Part
    leaves: tuple[int, ...]
    """The positions of the leaves that it acts on, among those of the updates."""


def _shapes(updates: PyTree) -> PyTree:
    """The updates without their values."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), updates, is_leaf=is_encoded
    )


def _leafwise(
    part: Part, shapes: PyTree, leaves: tuple[int, ...] | None = None
) -> list[_Link] | None:
    """A transform as rules that can run leaf by leaf, one after the other, or `None`."""
    if leaves is None:
        leaves = tuple(range(len(jax.tree.leaves(shapes))))
    if not leaves:
        return None
    if isinstance(part.module, Mask):
        if part.params is None:
            return None
        keep = mask(part.module.where, part.params)
        (inner,) = part.module.children(part.state, part.context, part.params)
        inner = inner._replace(path=part.path + inner.path)
        kept = tuple(i for i, k in zip(leaves, keep, strict=True) if k)
        return _leafwise(inner, tree.cut(shapes, keep), kept)
    if isinstance(part.module, Chain):
        found: list[_Link] = []
        for link in part.module.children(part.state, part.context, part.params):
            own = _leafwise(link._replace(path=part.path + link.path), shapes, leaves)
            if own is None:
                return None
            found += own
        return found
    rule = part.module
    alone = rule.elementwise and not rule.per_example and not rule.children(part.state)
    if not alone or "key" in rule.needs or not _is_by_leaf(part.state, len(leaves)):
        return None
    return [_Link(part, leaves)]


def _nested(module: Any, states: Iterator[Any]) -> Any:
    """The states of the rules that `_leafwise` found, as that of the transform."""
    if isinstance(module, Mask):
        return _nested(module.inner, states)
    if isinstance(module, Chain):
        return tuple(_nested(link, states) for link in module.links)
    return next(states)


def _is_by_leaf(state: Any, number: int) -> bool:
    """Whether all of a state belongs to one leaf or another."""
    if not jax.tree.leaves(state):
        return True
    known = marks(state)
    for name, child in _fields(state):
        leaves = jax.tree.leaves(child, is_leaf=is_encoded)
        if known.get(name) == PARAM_LIKE:
            if len(leaves) not in (0, number):
                return False
        elif leaves and (known.get(name) != PER_LEAF or any(x.ndim > 1 for x in leaves)):
            return False
    return True


def _fields(state: Any) -> list[tuple[str, Any]]:
    """The children of a state with the names of their fields."""
    children, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
    return [(getattr(path[0], "name", "") if path else "", child) for path, child in children]


def _with_fields(state: Any, new: dict[str, Any]) -> Any:
    """A state with other values in some fields. The constructor would convert and check them."""
    if not new:
        return state
    children, structure = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: x is not state
    )
    return structure.unflatten([new.get(path[0].name, child) for path, child in children])


def _at_leaf(state: Any, n: int) -> Any:
    """The part of a state that belongs to the leaf at this position."""
    known = marks(state)
    new: dict[str, Any] = {}
    for name, child in _fields(state) if known else ():
        leaves = jax.tree.leaves(child, is_leaf=is_encoded)
        if known.get(name) == PARAM_LIKE and leaves:
            new[name] = leaves[n]
        elif known.get(name) == PER_LEAF and leaves and leaves[0].ndim == 1:
            new[name] = leaves[0][n : n + 1]
    return _with_fields(state, new)


def _of_leaves(state: Any, parts: Sequence[Any]) -> Any:
    """Undoes `_at_leaf`, for the new states of all leaves."""
    known = marks(state)
    new: dict[str, Any] = {}
    for name, child in _fields(state) if known else ():
        leaves, structure = jax.tree.flatten(child, is_leaf=is_encoded)
        if not leaves:
            continue
        own = [getattr(part, name) for part in parts]
        if known.get(name) == PARAM_LIKE:
            new[name] = structure.unflatten(own)
        else:
            new[name] = jnp.concatenate(own) if leaves[0].ndim == 1 else own[0]
    return _with_fields(state, new)


def _split(state: Any) -> tuple[list[Any], list[Any], Any, list[bool]]:
    """The parameter-shaped leaves of a leaf's state, its others, its structure, and which is
    which."""
    known = marks(state)
    flags = [
        known.get(name) == PARAM_LIKE
        for name, child in _fields(state)
        for _ in jax.tree.leaves(child, is_leaf=is_encoded)
    ]
    leaves, structure = jax.tree.flatten(state, is_leaf=is_encoded)
    shaped = [x for x, flag in zip(leaves, flags, strict=True) if flag]
    others = [x for x, flag in zip(leaves, flags, strict=True) if not flag]
    return shaped, others, structure, flags


def _joined(shaped: Any, others: Any, structure: Any, flags: list[bool]) -> Any:
    """Undoes `_split`, with iterators over the leaves."""
    return structure.unflatten([next(shaped if flag else others) for flag in flags])


def _run_leaves(
    links: list[_Link],
    outer: Part,
    write: Writer,
    updates: PyTree,
    clock: Any,
    factors: tuple[Any, ...] = (),
    computed: bool = False,
) -> tuple[Any, list[Any]]:
    """Runs rules leaf by leaf.

    **Arguments:**

    - `links`: the rules, first to last.
    - `outer`: the parameters and the context that they see.
    - `write`, `updates`, `clock`: as for `run_stored`.
    - `factors`: numbers to multiply the updates by before.
    - `computed`: whether other links compute the updates. They then do so leaf by leaf, too.

    **Returns:** the result of `write`, and the new states of the links.
    """
    leaves, structure = jax.tree.flatten(updates, is_leaf=is_encoded)
    params, context = outer.params, outer.context
    adds = write is ADD and params is not None
    own_params = [None] * len(leaves) if params is None else structure.flatten_up_to(params)
    given = _given(context, structure)
    base = None
    if context is not None:
        base = context.replace(grad=None, per_param=None, value_fn=None)

    def at_leaf(active, g, p, states, given, seeds, after):
        split = [_split(state) for state in states]
        old = [x for shaped, *_ in split for x in shaped]
        ages = [x for _, others, *_ in split for x in others]
        also, entries = jax.tree.flatten(given)

        def rule(read, written):
            u, *also = read
            target, *shaped = written
            own_p = target if adds else (None if p is None else also.pop(0))
            seen = base if base is None else base.replace(**entries.unflatten(also))
            shaped, others = iter(shaped), iter(ages)
            new_shaped, new_ages = [], []
            u = functools.reduce(tree.scale, factors, u)
            for k, (_, _, form, flags) in zip(active, split, strict=True):
                link = links[k].part
                state = _joined(shaped, others, form, flags)
                with jax.named_scope("/".join(link.path)):
                    u, new = pair(link.module, link.module.update(u, state, own_p, seen))
                new_shaped += _split(new)[0]
                new_ages += _split(new)[1]
            return [tree.add(own_p, u) if adds else u, *new_shaped], new_ages

        read = [g, *([] if adds or p is None else [p]), *also]
        target: Any = p
        if not adds:
            arrays = decoded((read, [jnp.zeros(()), *old]))
            result = jax.eval_shape(lambda: rule(*arrays)[0][0])
            target = jnp.zeros(result.shape, result.dtype)
        new, new_ages = in_pieces(rule, read, [target, *old], [None, *seeds], after)
        result, shaped, others = new[0], iter(new[1:]), iter(new_ages)
        return result, [_joined(shaped, others, form, flags) for _, _, form, flags in split]

    # As in `tree.map_leaves`: leaves of equal shape share one trace.
    if any(under_jit(x) for x in jax.tree.leaves((updates, [link.part.state for link in links]))):
        at_leaf = jax.jit(at_leaf, static_argnums=0)
    results, states = [], [[] for _ in links]
    after = jnp.zeros((), jnp.float32)
    for i, (path, g) in enumerate(zip(leaf_paths(_shapes(updates)), leaves, strict=True)):
        active = tuple(k for k, link in enumerate(links) if i in link.leaves)
        own = [_at_leaf(links[k].part.state, links[k].leaves.index(i)) for k in active]
        seeds = [
            seed_of(f"{links[k].part.name}.{n}.{path}", clock) if is_encoded(x) else None
            for k, state in zip(active, own, strict=True)
            for n, x in enumerate(_split(state)[0])
        ]
        g = tree.after(g, after) if computed else g
        result, new = at_leaf(active, g, own_params[i], own, given[i], seeds, after)
        results.append(result)
        # Not of the parameters: in a branch of a conditional, XLA would copy them for it.
        coded = [x for x in jax.tree.leaves((new, result), is_leaf=is_encoded) if is_encoded(x)]
        after = last_of(coded[0] if coded else result, after)
        for k, state in zip(active, new, strict=True):
            states[k].append(state)
    result = structure.unflatten(results)
    if write is not ADD and write is not RETURN:
        result = write(params, result)
    merged = [_of_leaves(link.part.state, own) for link, own in zip(links, states, strict=True)]
    return result, merged


def _given(context: Context | None, structure: Any) -> list[dict[str, Any]]:
    """For each leaf the entries of the context that are shaped like the parameters."""
    entries: list[dict[str, Any]] = [{} for _ in range(structure.num_leaves)]
    if context is not None and context.grad is not None:
        for entry, x in zip(entries, structure.flatten_up_to(context.grad), strict=True):
            entry["grad"] = x
    for name, trees in (context.per_param or {}).items() if context is not None else ():
        for entry, x in zip(entries, structure.flatten_up_to(trees), strict=True):
            entry.setdefault("per_param", {})[name] = x
    return entries
