"""Transforms for some of the leaves, and different ones for different leaves."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Bool

from ... import tree
from ..._core.methods.fluent import AbstractFluent
from ..._core.protocol.bases import AbstractRunTransform
from ..._core.protocol.parts import Part, segments, transforms
from ..._core.protocol.transform import AbstractTransform, require_transform
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer
from ..._core.text.calls import advise_positions
from ..._core.text.printing import Call, method_call
from ...tree.paths import candidates, leaf_paths
from ...tree.types import Gradients, Params, PyTree, WhereLike
from ...where.masks import labels, mask, selected_from
from ...where.resolve import Cases, Where, as_labels, as_where


class _AbstractCut(AbstractWrapper[Any]):
    """The base class of `Mask` and `Only`. The inner transform sees only the selected leaves."""

    over: ClassVar[str] = "tree"
    _passes_others: ClassVar[bool]
    """Whether the other leaves pass through, or else are not updated."""

    where: Where = eqx.field(static=True, converter=as_where)

    def inner_part(self, here: Part) -> Part:
        part = super().inner_part(here)
        return part if here.params is None else part.cut(mask(self.where, here.params))

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        keep = mask(self.where, selected_from(self.where, updates, here.params))
        inside, state = self.inner_part(here).run(write.cut(keep), tree.cut(updates, keep))
        others = tuple(not k for k in keep)
        rest = None if here.params is None else tree.cut(here.params, others)
        write, passed = write.cut(others), tree.cut(updates, others)
        if self._passes_others:
            outside = write(rest, passed)
        else:
            outside = write.idle(rest, jax.eval_shape(lambda: write(rest, passed)))
        pieces = ((keep, inside), (others, outside))
        return tree.merge(jax.tree.structure(updates), pieces), state

    def signs(self, params: Params) -> tuple[int | None, ...]:
        keep = mask(self.where, params)
        inner = iter(self.inner.signs(tree.cut(params, keep)))
        return tuple(next(inner) if k else int(self._passes_others) for k in keep)


class Mask(_AbstractCut):
    """Applies the inner transform to the selected leaves; the others pass through unchanged.

    Made by `tx.mask`, which describes the arguments.

    Use it for links of a chain. As a whole optimizer it would add raw gradients to the other
    parameters, so `sl.Optimizer` raises an error."""

    _passes_others: ClassVar[bool] = True

    @property
    def descends_partly(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on a field
        """Whether it has the learning rate of some leaves."""
        return any(part.module.sets_learning_rate for part in transforms(self.inner))

    def leafwise(self, here: Part, leaves: tuple[int, ...]) -> PyTree | None:
        if here.params is None:
            return None
        keep = mask(self.where, here.params)
        inner = self.inner_part(here)
        kept = tuple(i for i, k in zip(leaves, keep, strict=True) if k)
        inner = inner._replace(path=here.path + inner.path)
        return inner.module.leafwise(inner, kept) if kept else None

    def has_updated(self, state: PyTree) -> Bool[Array, "*runs"] | bool:
        # Before a learning rate for all leaves, the others always change.
        return self.inner.has_updated(state) if self.descends_partly else True


class Only(_AbstractCut):
    """Applies the inner transform to the selected leaves; the others are not updated.

    Made by `tx.only`, which describes the arguments.

    """

    passes_gradients: ClassVar[bool] = True
    _passes_others: ClassVar[bool] = False


REST = "rest"
"""The label of the leaves that no selector of `.partition({...})` matches."""


class PartitionState(eqx.Module):
    """The state of `Partition`."""

    groups: tuple[Any, ...]
    """The state of each group."""
    is_empty: tuple[bool, ...] = eqx.field(static=True)
    """Whether each group has no parameters."""


class Partition(AbstractRunTransform[PartitionState]):
    """Different transforms for different leaves. Each has state only for its own leaves.

    Made by `tx.partition` and `sl.partition`. Norms inside a group are norms of that group. To clip
    by the norm of all parameters, clip before the partition:
    `sl.ClipByGlobalNorm(1.0) | a.partition({where: b})`.

    **Arguments:**

    - `groups`: the transforms.
    - `names`: the label of each.
    - `labeling`: a tree, function or selectors that map each leaf to its label.
    """

    over: ClassVar[str] = "tree"

    groups: tuple[AbstractTransform, ...]
    names: tuple[Hashable, ...] = eqx.field(static=True)
    labeling: Where = eqx.field(static=True)

    def __check_init__(self):
        for name, group in zip(self.names, self.groups, strict=True):
            require_transform(f"Group {name!r} of a partition", group)
        for i, name in enumerate(self.names):
            if str(name) in map(str, self.names[:i]):
                raise ValueError(
                    f"Two groups of this partition have the name '{name}' in paths: their labels "
                    f"are {', '.join(repr(n) for n in self.names if str(n) == str(name))}. Write "
                    "labels that also differ as text."
                )

    @classmethod
    def by_cases(
        cls,
        rest: AbstractTransform,
        others: Mapping[WhereLike, AbstractTransform],
        names: tuple[Hashable, ...] | None,
    ) -> "Partition":
        """The result of `rest.partition(others, names)`."""
        _check_mapping("`.partition` takes a mapping from selectors to transforms", others)
        if names is None:
            names = tuple(range(len(others)))
        if len(names) != len(others) or len({*names, REST}) != len(others) + 1:
            raise ValueError(
                f"`names` must give a name to each of the {len(others)} groups, all different "
                f"and none of them {REST!r}, got {names!r}."
            )
        cases = tuple(zip(map(as_where, others), names, strict=True))
        return cls((*others.values(), rest), (*names, REST), Cases(cases, REST))

    def init(self, params: Params) -> PartitionState:
        parts = self.children(Part.root(self, params=params))
        states = tuple(part.module.init(part.params) for part in parts)
        return PartitionState(states, tuple(not jax.tree.leaves(part.params) for part in parts))

    def children(self, here: Part) -> tuple[Part, ...]:
        states = (None,) * len(self.groups) if here.state is None else here.state.groups
        parts = []
        for i, (name, group, state) in enumerate(zip(self.names, self.groups, states, strict=True)):
            path = (str(name), *segments(group))
            part = here.child(path, group, lambda outer, i=i: outer.groups[i], state)
            parts.append(part._replace(group=(str(name),)))
        if here.params is None:
            return tuple(parts)
        masks = self._masks(here.params)
        return tuple(part.cut(keep) for part, keep in zip(parts, masks, strict=True))

    def has_updated(self, state: PartitionState) -> Bool[Array, "*runs"] | bool:
        wrote: Array | bool = False
        for group, s, empty in zip(self.groups, state.groups, state.is_empty, strict=True):
            wrote = wrote | (not empty and group.has_updated(s))
        return wrote

    def signs(self, params: Params) -> tuple[int | None, ...]:
        masks = self._masks(params)
        signs = [
            iter(group.signs(tree.cut(params, keep)))
            for group, keep in zip(self.groups, masks, strict=True)
        ]
        return tuple(next(signs[column.index(True)]) for column in zip(*masks, strict=True))

    def warnings(self, params: Params) -> Iterator[str]:
        cases = self.labeling.cases if isinstance(self.labeling, Cases) else ()
        for where, name in cases:
            empty = jax.tree.leaves(params) and not any(mask(where, params))
            if where.unmatched_among is not None and empty:
                yield f"The group {name!r} is empty: {where!r} {where.unmatched_among}"

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, PartitionState]:
        masks = self._masks(selected_from(self.labeling, updates, here.params))
        results, states = [], []
        for part, keep in zip(self.children(here), masks, strict=True):
            result, new = part.run(write.cut(keep), tree.cut(updates, keep))
            results.append((keep, result))
            states.append(new)
        whole = tree.merge(jax.tree.structure(updates), results)
        return whole, PartitionState(tuple(states), here.state.is_empty)

    def _masks(self, params: Params) -> tuple[tuple[bool, ...], ...]:
        """A mask for each group."""
        label_of = labels(self.labeling, params)
        for path, label in zip(leaf_paths(params), label_of, strict=True):
            if label is None:
                raise ValueError(
                    f"The parameter '{path}' has no label. Give every leaf one, for example with "
                    "`sl.where.everything()` as the last case."
                )
            if label not in self.names:
                raise ValueError(
                    f"The parameter '{path}' has the label {label!r}, for which there is no "
                    f"transform. Labels with a transform: {candidates('', map(str, self.names))}."
                )
        return tuple(tuple(label == name for label in label_of) for name in self.names)

    def _code(self) -> Call:
        if isinstance(self.labeling, Cases) and self.labeling.rest == REST:
            *others, rest = self.groups
            pairs = zip(self.labeling.cases, others, strict=True)
            mapping = {where: group for (where, _), group in pairs}
            names = None if self.names[:-1] == tuple(range(len(others))) else self.names[:-1]
            return method_call(self, rest, AbstractFluent.partition, others=mapping, names=names)
        labeling = dict(self.labeling.cases) if isinstance(self.labeling, Cases) else self.labeling
        return Call("sl.partition", (dict(zip(self.names, self.groups, strict=True)), labeling))


def _check_mapping(takes: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{takes}, got {value!r} of type {type(value).__name__}.")


@advise_positions(
    "Write `sl.partition({'a': tx, 'b': other}, {where: 'a', ~where: 'b'})`, or "
    "`other.partition({where: tx})`."
)
def partition(transforms: Mapping[Hashable, AbstractTransform], labels: PyTree) -> Partition:
    """Applies a different transform for each label of the leaves.

    **Arguments:**

    - `transforms`: a mapping from labels, which are any hashable objects, to transforms.
    - `labels`: a tree of labels with the structure of the parameters, a prefix of such a tree, a
        function of the parameters that returns one, or a mapping from selectors to labels. If
        several selectors match a leaf, the first one is used.

    **Returns:** a transform.

    **Raises:** `ValueError`, when the state is initialized, for a leaf without a label or with a
    label that has no transform. Labels without leaves are allowed.

    ```python
    >>> tx = sl.partition({"g": sl.adam(0.1), "d": sl.adam(0.5)}, ("g", "d"))
    >>> generator, discriminator = jnp.ones(2), jnp.ones(3)
    >>> state = tx.init((generator, discriminator))

    ```
    """
    _check_mapping("sl.partition takes a mapping from labels to transforms", transforms)
    return Partition(tuple(transforms.values()), tuple(transforms), as_labels(labels))
