"""The arguments of a loss: their states, and a batch that is divided along its leading axis."""

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
from jaxtyping import Array, Int

from ..._core.text.calls import signature_of
from ...tree import is_array
from ...tree.dtypes import is_key
from ...tree.paths import candidates, dotted, first_difference
from ...tree.types import PyTree
from ..binding.optimizer import Optimizer
from ..residual_losses import AbstractCurvatureLoss
from .options import Options


class TrainingInputs(NamedTuple):
    """The inputs of the program of a training step."""

    args: tuple[Any, ...]
    """The arguments of the loss after the model."""
    context: dict[str, Any]
    """The inputs of the transforms that the caller passed."""
    kwargs: dict[str, Any]
    """The keywords of the loss."""
    loss: Any
    """The loss as a tree."""
    model: PyTree
    opt: Optimizer
    options: Options
    scan: dict[str, Any] | None = None
    """The options of a scan, `None` for a single step."""
    model_state: PyTree = None
    """The state of the model at the start of a scan, if it has one."""


class _Place:
    """Takes the place of a state in `aux`."""


PLACE = _Place()


def is_state(x: Any) -> bool:
    """Whether this is the state of a model, or the place of one."""
    return isinstance(x, eqx.nn.State | _Place)


def states_of(tree: PyTree) -> list[Any]:
    """The states in a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]


def with_states(tree: PyTree, states: Sequence[Any]) -> PyTree:
    """The tree with other states in their places, in order."""
    rest = iter(states)
    return jax.tree.map(lambda x: next(rest) if is_state(x) else x, tree, is_leaf=is_state)


def check_state(new: PyTree, old: PyTree, argument: str) -> None:
    """Raises an error for a state that is not like the one that the loss got.

    `argument` names the argument that held the state, for the message.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        differ = first_difference(new, old, ("the state that the loss returned", argument))
        raise ValueError(f"The loss must return a state like {argument}: {differ}.")
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True)
    for (path, x), y in pairs:
        a, b = jax.typeof(x), jax.typeof(y)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"The loss must return a state like {argument}, but '{dotted(path)}' was "
                f"{b.str_short()} and is now {a.str_short()}."
            )


Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The positional and the keyword arguments of a loss after the model."""


class Role(enum.Enum):
    """The role of a leaf of the arguments when the batch is divided."""

    WHOLE = "passed whole to every part"
    ROWS = "divided along its leading axis"
    KEY = "a PRNG key, from which every part gets its own"
    PARTS = "an entry for each part"
    EXAMPLE_KEYS = "a PRNG key for each example"


class Batch(NamedTuple):
    """The arguments of a loss, with the role of each leaf.

    **Arguments:**

    - `arguments`: the arguments to call the loss with.
    - `roles`: a tree like them, of roles. A state has one role.
    - `sizes`: the numbers of examples: one, or several if the blocks of a loss differ. Of a batch
        that is split already, the number of its parts.
    """

    arguments: Arguments
    roles: PyTree
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of examples. Raises an error if there are several."""
        size, *others = self.sizes
        if others:
            raise ValueError(
                f"The blocks of this loss have {', '.join(map(str, self.sizes))} examples, so "
                "there are no gradients per example. Use one block, or a rule that does not need "
                "them."
            )
        return size

    def microbatch(self, i: Int[Array, ""], number: int) -> "Batch":
        """Part i of `number`: the examples i, i + number, i + 2·number, …

        These are not neighbors, so that a batch which is sharded over devices does not move. A
        batch that is split already has part i at its entry i.
        """

        def part(x: Any, role: Role) -> Any:
            if role is Role.PARTS:
                return x[i]
            if role is Role.WHOLE:
                return x
            rows = x.reshape(x.shape[0] // number, number, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(rows, i, axis=1, keepdims=False)

        return self.mapped(part, sizes=tuple(n // number for n in self.sizes))

    def with_keys(self, number: int, role: Role) -> "Batch":
        """The batch with each PRNG key split into this number of keys, which have a role."""

        def split(x: Any, r: Role) -> Any:
            return jax.random.split(x, number) if r is Role.KEY else x

        return self.mapped(split).with_role(role, Role.KEY)

    def with_role(self, role: Role, before: Role) -> "Batch":
        """The batch with one role in place of another."""
        return self._replace(roles=jax.tree.map(lambda r: role if r is before else r, self.roles))

    def mapped(self, function: Callable[[Any, Role], Any], **changes: Any) -> "Batch":
        """The batch with the result of a function of each leaf and its role, and other changes."""
        new = jax.tree.map(lambda role, x: function(x, role), self.roles, self.arguments)
        return self._replace(arguments=new, **changes)


def batch_of(inputs: TrainingInputs, parts: str) -> Batch:
    """The batch among the arguments of a loss. Raises an error if it cannot be divided.

    **Arguments:**

    - `inputs`: the inputs of the step.
    - `parts`: the name of the parts that the batch is divided into, for messages.
    """
    args, kwargs, batch_args = inputs.args, inputs.kwargs, inputs.options.batch_args
    names = _positional_names(inputs.loss)
    passed: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)
    if batch_args is None:
        keys = list(passed)
    else:
        keys = [_passed_as(which, names, passed) for which in batch_args]
    leaves, structure = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_state)
    axes: Any = None
    if isinstance(inputs.loss, AbstractCurvatureLoss):
        if batch_args is not None:
            raise ValueError(
                f"{type(inputs.loss).__name__} knows itself which arguments hold the batch. Remove "
                "`batch_args`."
            )
        axes = jax.tree.leaves(inputs.loss.axes(args, kwargs), is_leaf=is_state)
    roles, rows = [], []
    for i, ((_, key, *rest), x) in enumerate(leaves):
        index: Any = getattr(key, "idx", getattr(key, "key", None))
        holds_batch = index in keys if axes is None else bool(axes[i])
        if is_single_key(x):
            roles.append(Role.KEY)
        elif holds_batch and is_array(x):  # a state is none
            roles.append(Role.ROWS)
            path = ".".join(filter(None, (_name(index, names), dotted(tuple(rest)))))
            rows.append((axes[i] if axes else "", path, x))
        else:
            roles.append(Role.WHOLE)
    for key in keys if batch_args is not None else ():
        if not any(map(is_array, jax.tree.leaves(passed[key]))):
            raise TypeError(
                f"The argument '{_name(key, names)}' contains no arrays, so it cannot be divided "
                f"into {parts}. Remove it from `batch_args`."
            )
    if not rows:
        raise TypeError(
            f"There are no arrays among the arguments after `opt` to divide into {parts}. Pass the "
            "batch to the step: `step(model, opt, x, y)`."
        )
    return Batch((args, kwargs), structure.unflatten(roles), _sizes(rows, parts))


def _sizes(rows: list[tuple[str, str, Any]], parts: str) -> tuple[int, ...]:
    """The numbers of examples. Raises an error if the arrays of a block disagree.

    **Arguments:**

    - `rows`: the name of its block, the path and the array, for each array of the batch.
    - `parts`: the name of the parts that the batch is divided into, for messages.
    """
    advice = (
        "Name the arguments that hold the batch: `sl.train_step(loss_fn, ..., "
        "batch_args=('x', 'y'))`."
    )
    sizes: dict[str, tuple[int, str]] = {}
    for block, path, x in rows:
        if x.ndim == 0:
            raise ValueError(
                f"The argument '{path}' has no leading axis, so it cannot be divided into {parts}. "
                f"{advice}"
            )
        size, first = sizes.setdefault(block, (x.shape[0], path))
        if x.shape[0] != size:
            raise ValueError(
                f"The leading axis of the argument '{path}' has {x.shape[0]} entries and that of "
                f"'{first}' has {size}, so they cannot be divided into the same {parts}. {advice}"
            )
    return tuple(dict.fromkeys(size for size, _ in sizes.values()))


def is_single_key(x: Any) -> bool:
    """Whether a leaf is one PRNG key, which is split into one for every part or step."""
    return is_key(x) and x.ndim == 0


def _positional_names(loss_fn: Callable[..., Any]) -> list[str]:
    """The names of a loss's positional arguments after the model, if they can be known."""
    signature = signature_of(loss_fn, named=True)
    parameters = [] if signature is None else list(signature.parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional][1:]


def _name(key: int | str, names: list[str]) -> str:
    """An argument's name in messages."""
    return names[key] if isinstance(key, int) and key < len(names) else str(key)


def _passed_as(which: int | str, names: list[str], passed: Mapping[int | str, Any]) -> int | str:
    """The position or keyword by which the argument of this name or position was passed."""
    if which in passed:
        return which
    other = _name(which, names) if isinstance(which, int) else None
    if isinstance(which, str) and which in names:
        other = names.index(which)
    if other is not None and other in passed:
        return other
    passed_names = candidates(str(which), [_name(key, names) for key in passed])
    raise ValueError(
        f"`batch_args` names {which!r}, but the step was called without such an argument. "
        f"Arguments after `opt`: {passed_names}."
    )
