"""Binding a transform to parameters: what is refused, where it lives, what it is made of."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .. import tree
from .._core.chain import Chain, first_link
from .._core.declared import Part
from .._core.messages import uncalled, warn
from .._core.printing import operand
from .._core.traits import MIXED
from .._core.transform import AbstractTransform
from .._core.walk import inner_transforms, keeps_zeros, transforms
from .._core.wrapper import AbstractPacedTransform
from .._paths import example, leaf_paths
from .._types import Params, Tracer
from ..where.resolve import Where, check_matches
from .names import names_of


@dataclasses.dataclass(frozen=True)
class Binding:
    """What an optimizer is beside its arrays."""

    structure: Any
    """The tree of (transform, (state, count)), leaves being arrays."""
    rules: int
    """How many of the leaves, the first ones, belong to the transform."""
    statics: tuple[tuple[int, type, Any], ...]
    """Leaves that are no arrays, such as the functions in a learned optimizer's network."""
    trainable: Where | None
    params: Any
    """The structure of the trainable parameters at binding."""

    @functools.cached_property
    def guarded(self) -> bool:
        """Whether some transform may forbid a step, which the host must check before each."""
        transform, _ = example(self.structure)
        return any(part.module.guard is not None for part in transforms(transform))

    @functools.cached_property
    def readings(self) -> dict[Any, Any]:
        """The programs of what was read from optimizers of this structure, by name."""
        return {}

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The full path of each array."""
        transform, (state, _) = example(self.structure)
        statics = {i for i, _, _ in self.statics}
        names = names_of(transform, state, self.structure.num_leaves)
        return tuple(name for i, name in enumerate(names) if i not in statics)

    def __reduce__(self) -> Any:
        # JAX does not pickle the structure of a tree of modules, but any tree that has it can be.
        rest = (self.rules, self.statics, self.trainable)
        return _unpickle, (example(self.structure), example(self.params), *rest)


def _unpickle(made: PyTree, params: PyTree, *rest: Any) -> Binding:
    rules, statics, trainable = rest
    structure, bound = jax.tree.structure(made), jax.tree.structure(params)
    return Binding(structure, rules, statics, trainable, bound)


def bind(made: Any, trainable: Where | None, params: Any) -> tuple[tuple[Any, ...], Binding]:
    """Takes (transform, (state, count)) apart into arrays and the rest."""
    leaves, structure = jax.tree.flatten(made)
    statics = tuple((i, type(x), x) for i, x in enumerate(leaves) if not tree.is_array(x))
    skip = {i for i, _, _ in statics}
    arrays = tuple(x for i, x in enumerate(leaves) if i not in skip)
    total = jax.tree.structure(made[0]).num_leaves
    rules = total - sum(i < total for i in skip)
    return arrays, Binding(structure, rules, statics, trainable, params)


def is_abstract(model: PyTree) -> bool:
    """Whether a model has shapes and dtypes in place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model))


def abstract_optimizer(make: Callable[[PyTree], Any], model: PyTree) -> Any:
    """An optimizer for an abstract model: shapes, dtypes and shardings in place of arrays."""
    return eqx.filter_eval_shape(make, model)


def no_transform(given: Any, model: PyTree) -> str:
    """The message for something else in the transform's place."""
    message = "An optimizer takes a transform such as `sl.adam(1e-3)`, got "
    if isinstance(model, AbstractTransform):
        kind = type(given).__name__
        return f"{message}a {kind}. The transform comes first: `sl.Optimizer(tx, model)`."
    return f"{message}{given!r}.{uncalled(given)}"


def check_transform(transform: AbstractTransform[Any], params: Params) -> None:
    """Refuses, before anything is computed, a transform that these parameters would suffer from."""
    for part in transforms(transform):
        for where in part.module.selectors():
            check_matches(where, params)
        if part.module.per_example and part.module is not first_link(transform):
            raise ValueError(
                f"'{part.name}' takes a gradient for each example and gives their sum, so it must "
                "be the very first link, with nothing around it. Write "
                f"`{operand(part.module)} | rest`, with wrappers around the rest only."
            )
    _warn_of_idle_steps(transform)
    _warn_of_two_rates(transform, params)
    signs = transform.signs(params)
    if 1 in signs and -1 in signs:
        raw = [path for path, s in zip(leaf_paths(params), signs, strict=True) if s == 1]
        listed = ", ".join(f"'{path}'" for path in raw[:3]) + (", …" if len(raw) > 3 else "")
        # Parts come depth first, so the last one that mixes is the innermost.
        *_, culprit = (
            part
            for part in transforms(transform, params=params)
            if {1, -1}.issubset(part.module.signs(part.params))
        )
        raise ValueError(
            f"Raw gradients would be added to {listed}, which would climb: '{culprit.name}' lets "
            "them pass through there, and turns them into descending steps elsewhere. To leave "
            "those parameters alone, write `.only(where)` instead of `.mask(where)`, or in a "
            "partition give them `sl.SetToZero()`. To train them too, mask links further left and "
            "let the last one, with the learning rate, act on all."
        )
    if MIXED in signs:
        *_, culprit = (
            part
            for part in transforms(transform, params=params)
            if MIXED in part.module.signs(part.params)
        )
        raise ValueError(
            f"Raw gradients would be added wherever the condition of '{culprit.name}' does not "
            "hold, which would climb: it lets them pass through then, and turns them into "
            "descending steps otherwise. To leave the parameters alone then, write "
            '`.when(condition, otherwise="zero")`. To descend then too, put `.when` on links '
            "further left and let the last one, with the learning rate, act always."
        )


def _warn_of_idle_steps(transform: AbstractTransform[Any]) -> None:
    """Warns of links that move parameters on the steps on which a link before them is held back."""
    for outer in transforms(transform):
        if not isinstance(outer.module, Chain):
            continue
        paced: Part | None = None
        for part in outer.module.children():
            part = part._replace(path=outer.path + part.path)
            link = part.module
            if paced is not None and not keeps_zeros(link):
                inner = inner_transforms(paced.module)[0]
                how = repr(paced.module).removeprefix(operand(inner))
                warn(
                    f"'{paced.name}' hands on zeros in the steps that it holds back, and "
                    f"'{part.name}' after it makes updates of them: parameters would move in those "
                    f"steps too. Move it inside: `(... | {operand(link)}){how}`."
                )
                paced = None
            paced = _held_back(part) or paced


def _warn_of_two_rates(transform: AbstractTransform[Any], params: Params) -> None:
    """Warns of two links that each descend, and climb together."""
    for outer in transforms(transform, params=params):
        if not isinstance(outer.module, Chain):
            continue
        descending: dict[int, str] = {}
        for part in outer.module.children(params=outer.params):
            part = part._replace(path=outer.path + part.path)
            if not any(inner.module.sets_learning_rate for inner in transforms(part.module)):
                continue  # another link with a negative factor was given it to climb
            for i, sign in enumerate(part.module.signs(part.params)):
                if sign == -1 and i in descending:
                    warn(
                        f"'{descending[i]}' and '{part.name}' both turn updates around to descend, "
                        "and together they climb. Keep one learning rate; for another factor write "
                        "`sl.Scale`."
                    )
                    return
                if sign == -1:
                    descending[i] = part.name


def _held_back(part: Part) -> Part | None:
    """What, at or inside a link, makes its result zeros in some steps."""
    if isinstance(part.module, AbstractPacedTransform):
        return part
    paced: Part | None = None
    for inner in part.module.children():
        if not isinstance(inner.module, AbstractTransform):
            continue
        inner = inner._replace(path=part.path + inner.path)
        if isinstance(part.module, Chain) and not keeps_zeros(inner.module):
            paced = None
        paced = _held_back(inner) or paced
    return paced


def at_home(made: PyTree, params: Params) -> PyTree:
    """Everything on the devices of the parameters: what is not parameter-shaped, replicated."""
    first = next((p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)), None)
    if first is None or isinstance(first, Tracer) or not first.committed:
        return made
    home = first.sharding
    if isinstance(home, jax.sharding.NamedSharding):
        home = jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())

    def put(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        there = x.committed and x.sharding.device_set == home.device_set
        return x if there else jax.device_put(x, home)

    return jax.tree.map(put, made)
