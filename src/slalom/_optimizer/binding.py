"""Binds a transform to parameters: checks the pair, and splits it into arrays and static data."""

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
from .._core.traits import MIXED, AbstractTraits
from .._core.transform import AbstractTransform
from .._core.walk import inner_transforms, keeps_zeros, transforms
from .._core.wrapper import AbstractPacedTransform
from .._paths import example, leaf_paths
from .._types import Params, Tracer
from ..where.resolve import Where, check_matches
from .names import names_of


@dataclasses.dataclass(frozen=True)
class Binding:
    """The static part of an optimizer."""

    structure: Any
    """The structure of the tree (transform, (state, count))."""
    rules: int
    """The number of arrays that belong to the transform. They come first."""
    statics: tuple[tuple[int, type, Any], ...]
    """Leaves that are not arrays, such as the functions in a learned optimizer's network."""
    trainable: Where | None
    params: Any
    """The structure of the trainable parameters at binding."""

    @functools.cached_property
    def guarded(self) -> bool:
        """Whether a transform checks its state on the host before each step."""
        transform, _ = example(self.structure)
        return any(part.module.guard is not None for part in transforms(transform))

    @functools.cached_property
    def readings(self) -> dict[Any, Any]:
        """The compiled readings of optimizers with this structure, by name."""
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


def _unpickle(bound_tree: PyTree, params: PyTree, *rest: Any) -> Binding:
    rules, statics, trainable = rest
    structure, bound = jax.tree.structure(bound_tree), jax.tree.structure(params)
    return Binding(structure, rules, statics, trainable, bound)


def bind(bound_tree: Any, trainable: Where | None, params: Any) -> tuple[tuple[Any, ...], Binding]:
    """Splits (transform, (state, count)) into arrays and static data."""
    leaves, structure = jax.tree.flatten(bound_tree)
    statics = tuple((i, type(x), x) for i, x in enumerate(leaves) if not tree.is_array(x))
    skip = {i for i, _, _ in statics}
    arrays = tuple(x for i, x in enumerate(leaves) if i not in skip)
    total = jax.tree.structure(bound_tree[0]).num_leaves
    rules = total - sum(i < total for i in skip)
    return arrays, Binding(structure, rules, statics, trainable, params)


def is_abstract(model: PyTree) -> bool:
    """Whether a model has shapes and dtypes in place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model))


def abstract_optimizer(make: Callable[[PyTree], Any], model: PyTree) -> Any:
    """An optimizer for an abstract model: shapes, dtypes and shardings in place of arrays."""
    return eqx.filter_eval_shape(make, model)


def no_transform(given: Any, model: PyTree) -> str:
    """The message for a first argument that is not a transform."""
    message = "The first argument of an optimizer must be a transform such as `sl.adam(1e-3)`, got "
    if isinstance(model, AbstractTransform):
        kind = type(given).__name__
        return f"{message}a {kind}. Write `sl.Optimizer(tx, model)`."
    return f"{message}{given!r}.{uncalled(given)}"


def check_transform(transform: AbstractTransform[Any], params: Params) -> None:
    """Checks, before anything is computed, that a transform suits these parameters."""
    for part in transforms(transform):
        for where in part.module.selectors():
            check_matches(where, params)
        if part.module.per_example and part.module is not first_link(transform):
            raise ValueError(
                f"'{part.name}' aggregates per-example gradients, so it must be the first link of "
                "the chain, and must not be wrapped. Write "
                f"`{operand(part.module)} | rest`, and wrap only the rest."
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
            f"Raw gradients would be added to {listed}, so these parameters would ascend: "
            f"'{culprit.name}' passes their gradients through unchanged, and flips the sign of all "
            "others. To leave these parameters unchanged, use `.only(where)` instead of "
            "`.mask(where)`, or `sl.SetToZero()` in a partition. To train them too, mask only the "
            "links before the learning rate, and let the learning rate act on all parameters."
        )
    if MIXED in signs:
        *_, culprit = (
            part
            for part in transforms(transform, params=params)
            if MIXED in part.module.signs(part.params)
        )
        raise ValueError(
            "Raw gradients would be added in every step in which the condition of "
            f"'{culprit.name}' is false, so the parameters would ascend: it passes the gradients "
            "through unchanged in these steps, and flips their sign in all others. To leave the "
            'parameters unchanged in these steps, use `.when(condition, otherwise="zero")`. To '
            "descend in these steps too, apply `.when` only to the links before the learning rate."
        )


def _warn_of_idle_steps(transform: AbstractTransform[Any]) -> None:
    """Warns of links that update parameters in the idle steps of a link before them."""
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
                    f"'{paced.name}' returns zeros in its idle steps, and '{part.name}' after it "
                    "turns them into nonzero updates, so the parameters change in idle steps too. "
                    f"Move it inside: `(... | {operand(link)}){how}`."
                )
                paced = None
            paced = _idle_part(part) or paced


def _warn_of_two_rates(transform: AbstractTransform[Any], params: Params) -> None:
    """Warns of two links that both flip the sign of the updates."""
    for outer in transforms(transform, params=params):
        if not isinstance(outer.module, Chain):
            continue
        descending: dict[int, str] = {}
        for part in outer.module.children(params=outer.params):
            part = part._replace(path=outer.path + part.path)
            if not any(inner.module.sets_learning_rate for inner in transforms(part.module)):
                continue  # a negative factor of any other link is deliberate
            for i, sign in enumerate(part.module.signs(part.params)):
                if sign == -1 and i in descending:
                    warn(
                        f"'{descending[i]}' and '{part.name}' both flip the sign of the updates, "
                        "so together they ascend. Keep only one learning rate. For another factor, "
                        "use `sl.Scale`."
                    )
                    return
                if sign == -1:
                    descending[i] = part.name


def warn_of_ascent(transform: AbstractTransform[Any], params: Params) -> None:
    """Warns of a rule without a learning rate: a step adds what points along the gradients."""
    signs = set(transform.signs(params))
    inner = [part.module for part in transforms(transform) if not inner_transforms(part.module)]
    deliberate = any(type(link).signs is not AbstractTraits.signs for link in inner)
    if signs == {1} and not deliberate:
        names = [part.name for part in transforms(transform) if part.name]
        warn(
            f"A step of this optimizer ascends the loss: nothing in '{names[-1]}' flips the sign "
            "of the gradients. Add a learning rate, `tx | sl.ScaleByLearningRate(1e-3)`. To ascend "
            "on purpose, write `tx | sl.Scale(1.0)`."
        )


def _idle_part(part: Part) -> Part | None:
    """The part of a link, or the link itself, that makes its result zero in some steps."""
    if isinstance(part.module, AbstractPacedTransform):
        return part
    paced: Part | None = None
    for inner in part.module.children():
        if not isinstance(inner.module, AbstractTransform):
            continue
        inner = inner._replace(path=part.path + inner.path)
        if isinstance(part.module, Chain) and not keeps_zeros(inner.module):
            paced = None
        paced = _idle_part(inner) or paced
    return paced


def on_param_devices(bound_tree: PyTree, params: Params) -> PyTree:
    """Moves everything to the devices of the parameters.

    Leaves that are not parameter-shaped are replicated.
    """
    first = next((p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)), None)
    if first is None or isinstance(first, Tracer) or not first.committed:
        return bound_tree
    sharding = first.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())

    def put(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        in_place = x.committed and x.sharding.device_set == sharding.device_set
        return x if in_place else jax.device_put(x, sharding)

    return jax.tree.map(put, bound_tree)
