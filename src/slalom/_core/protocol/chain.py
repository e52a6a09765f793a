"""Transforms in sequence."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Bool, PyTree

from ...tree.types import Params, Updates
from ..engine.encoded import is_encoded
from ..engine.run import RuleAt, run_rules
from ..text.printing import Call, Infix
from .bases import AbstractParameterWriter, AbstractRunTransform, AbstractStatelessTransform
from .context import Context
from .parts import MIXED, Part, keeps_zeros, segments, transforms
from .rule import AbstractRule
from .transform import AbstractTransform, require_transform
from .writer import Writer


class Identity(AbstractStatelessTransform):
    """Returns the updates unchanged: a chain without links."""

    keeps_zeros: ClassVar[bool] = True
    over: ClassVar[str] = "number"

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        return updates


class Chain(AbstractRunTransform[tuple[Any, ...]]):
    """Applies transforms in sequence: the updates of each are passed to the next.

    Returned by `|`, `sl.chain` and `sl.named_chain`. Access links by position, name or class:
    `tx[0]`, `tx["clip"]`, `tx[sl.ScaleByAdam]`.

    **Arguments:**

    - `links`: the transforms, first to last.
    - `names`: the name of each link, or `None` for its class name in snake case.
    """

    in_sequence: ClassVar[bool] = True
    over: ClassVar[str] = "number"
    reads_encoded: ClassVar[tuple[str, ...]] = ("state", "updates")

    links: tuple[AbstractTransform, ...]
    names: tuple[str | None, ...] = eqx.field(static=True)

    def __check_init__(self):
        if not self.links:
            raise ValueError("A chain has at least one link; `sl.Identity()` does nothing.")
        for i, (link, name) in enumerate(zip(self.links, self.names, strict=True)):
            require_transform(f"Link {i if name is None else repr(name)}", link)
            who = name or type(link).__name__
            for part in transforms(link):
                is_last = i == len(self.links) - 1
                if isinstance(part.module, AbstractParameterWriter) and not is_last:
                    raise ValueError(
                        f"{who} writes the parameters itself, so nothing may follow it: make it "
                        "the last link of the chain."
                    )
                if i == 0 or not part.module.computes_gradient:
                    continue
                if "residuals" in part.module.needs:
                    raise ValueError(
                        f"{who} computes its updates from the residuals of the loss, so the links "
                        "before it would have no effect. Write them after it, or remove them. For "
                        "smaller steps, raise its `damping`."
                    )
                raise ValueError(
                    f"{who} computes a gradient of its own, on which the links before it would "
                    "have no effect. Write them inside, as in `(clip | adam).sam(0.05)`."
                )

    @classmethod
    def join(cls, *links: AbstractTransform) -> AbstractTransform:
        """A chain of these links. Nested chains are flattened. A single link is returned as is."""
        flat: list[tuple[str | None, AbstractTransform]] = []
        for i, link in enumerate(links):
            require_transform(f"Link {i}", link)
            if isinstance(link, Chain):
                flat += zip(link.names, link.links, strict=True)
            else:
                flat.append((None, link))
        stated = [name for name, _ in flat if name is not None]
        for name in stated:
            if stated.count(name) > 1:
                raise ValueError(f"Two links of this chain are named '{name}'; names must differ.")
        if not flat:
            return Identity()
        if len(flat) == 1 and flat[0][0] is None:
            return flat[0][1]
        return cls(tuple(link for _, link in flat), tuple(name for name, _ in flat))

    def init(self, params: Params) -> tuple[Any, ...]:
        return tuple(link.init(params) for link in self.links)

    def run(self, here: Part, write: Writer, updates: PyTree) -> tuple[Any, tuple[Any, ...]]:
        links = here.children()
        states: list[Any] = []
        while len(states) < len(links):
            rest = links[len(states) :]
            group = _leafwise(rest, updates)
            inner_write = write if len(rest) == max(1, len(group)) else write.returning
            if not group:
                updates, state = rest[0].run(inner_write, updates)
                states.append(state)
                continue
            updates, new = run_rules(group, inner_write, updates, here)
            states += new
        return updates, tuple(states)

    def leafwise(self, here: Part, leaves: tuple[int, ...]) -> PyTree | None:
        links = tuple(
            link.module.leafwise(link._replace(path=here.path + link.path), leaves)
            for link in here.children()
        )
        return None if any(link is None for link in links) else links

    def children(self, here: Part) -> tuple[Part, ...]:
        states = (None,) * len(self.links) if here.state is None else here.state
        if not isinstance(states, tuple | list) or len(states) != len(self.links):
            raise TypeError(
                f"The state of this chain is a tuple of {len(self.links)}, which `init` or the "
                f"last `update` returned, got something of type {type(states).__name__}. The order "
                "is `tx.update(grads, state, params)`."
            )
        taken = {name for name in self.names if name is not None}
        parts: list[Part] = []
        for i, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            if name is None:
                (kind,) = segments(link) or ("chain",)
                numbered = itertools.chain([kind], (f"{kind}_{n}" for n in itertools.count(2)))
                name = next(n for n in numbered if n not in taken)
                taken.add(name)
            parts.append(here.child((name,), link, lambda chain, i=i: chain.links[i], states[i]))
        return tuple(parts)

    def has_updated(self, state: PyTree) -> Bool[Array, "*runs"] | bool:
        # The zeros of an idle link stay zeros through links such as Scale, but Adam turns them into
        # nonzero updates. `some` is about the leaves whose learning rate is in a mask.
        wrote: Array | bool = True
        some: Array | bool = False
        for link, link_state in zip(self.links, state, strict=True):
            did = link.has_updated(link_state)
            keeps = keeps_zeros(link)
            if link.descends_partly:
                some = some | (did & wrote if keeps else did)
            else:
                wrote, some = (wrote & did, some & did) if keeps else (did, did)
        return some if any(link.descends_partly for link in self.links) else wrote

    def signs(self, params: Params) -> tuple[int | None, ...]:
        columns = zip(*(link.signs(params) for link in self.links), strict=True)
        return tuple(_sign_of_product(column) for column in columns)

    def _at_position(self, which: int) -> AbstractTransform:
        return self.links[which]

    def __len__(self) -> int:
        return len(self.links)

    def _code(self) -> Infix | Call:
        """The links; runs of named ones as calls of `sl.named_chain`."""
        pieces: list[Any] = []
        for named, run in itertools.groupby(
            zip(self.names, self.links, strict=True), lambda link: link[0] is not None
        ):
            if named:
                pieces.append(Call("sl.named_chain", (), {str(name): link for name, link in run}))
            else:
                pieces += [link for _, link in run]
        return Infix("|", pieces, one_per_line=True) if len(pieces) > 1 else pieces[0]


def _leafwise(links: Sequence[Part], updates: PyTree) -> list[PyTree]:
    """The first of these links, as far as they can run together leaf by leaf."""
    leaves = tuple(range(len(jax.tree.leaves(updates, is_leaf=is_encoded))))
    first, rest = [], links
    # Only the first one may measure the updates that come in: no rule before it changes them leaf
    # by leaf.
    rule = links[0].module
    leads = isinstance(rule, AbstractRule) and not (rule.reduces or rule.refreshes)
    if leads and rule.over in ("number", "sums"):
        links[0].refuse_parts(updates)
        first, rest = [RuleAt(links[0], leaves)], links[1:]
    others = (link.module.leafwise(link, leaves) for link in rest)
    return [*first, *itertools.takewhile(lambda group: group is not None, others)]


def first_link(transform: AbstractTransform) -> AbstractTransform:
    """The transform that receives the gradients: the first link of a chain, or the transform."""
    while isinstance(transform, Chain) and transform.links:
        transform = transform.links[0]
    return transform


def last_link(transform: AbstractTransform) -> AbstractTransform:
    """The transform that returns the updates: the last link of a chain, or the transform."""
    while isinstance(transform, Chain):
        transform = transform.links[-1]
    return transform


def chain(*links: AbstractTransform) -> AbstractTransform:
    """Applies transforms in sequence, as `|` does.

    **Arguments:**

    - `links`: the transforms, first to last. Chains among them are flattened.

    **Returns:** a chain, or `sl.Identity()` if there are no links.

    ```python
    >>> sl.chain(sl.ClipByGlobalNorm(1.0), sl.Scale(-0.1))
    sl.ClipByGlobalNorm(1.0) | sl.Scale(-0.1)

    ```
    """
    return Chain.join(*links)


def named_chain(**links: AbstractTransform) -> AbstractTransform:
    """Applies transforms in sequence, under the given names.

    **Arguments:**

    - `links`: the transforms by name, first to last. The names appear in all paths.

    **Returns:** a chain, or `sl.Identity()` if there are no links.

    ```python
    >>> tx = sl.named_chain(clip=sl.ClipByGlobalNorm(1.0), rule=sl.sgd(0.1))
    >>> tx["clip"]
    sl.ClipByGlobalNorm(1.0)

    ```
    """
    return Chain(tuple(links.values()), tuple(links)) if links else Identity()


def _sign_of_product(signs: tuple[int | None, ...]) -> int | None:
    """The sign after several links. Two flips count as one, because the second is deliberate."""
    return next((sign for sign in (0, -1, MIXED, None) if sign in signs), 1)
