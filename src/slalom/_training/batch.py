"""The arguments of a loss that hold a batch, cut along their leading axis."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int

from .._paths import candidates, dotted
from ..tree import is_array


class Batch(NamedTuple):
    """The arguments of a loss, taken apart: which of their arrays hold a batch, and of what size.

    **Arguments:**

    - `leaves`, `structure`: the leaves and the structure of `(args, kwargs)`.
    - `cut`: for each leaf, whether its leading axis is the batch.
    - `size`: how many examples there are.
    """

    leaves: list[Any]
    structure: Any
    cut: tuple[bool, ...]
    size: int

    @property
    def arguments(self) -> Any:
        """The arguments as `(args, kwargs)`."""
        return self.structure.unflatten(self.leaves)

    def microbatch(self, i: Int[Array, ""], of: int) -> "Batch":
        """Every `of`-th example from the i-th on.

        Not a run of neighbours: a batch that is sharded over devices stays where it lies.
        """

        def cut(x: Any) -> Any:
            rows = x.reshape(x.shape[0] // of, of, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(rows, i, axis=1, keepdims=False)

        return self._with([cut(x) for x in self.arrays], self.size // of)

    @property
    def arrays(self) -> list[Any]:
        """The arrays that hold the batch."""
        return [x for x, c in zip(self.leaves, self.cut, strict=True) if c]

    def example(self, rows: list[Any]) -> "Batch":
        """One example, a batch of size 1, from a row of each of the arrays."""
        return self._with([x[None] for x in rows], 1)

    def _with(self, arrays: list[Any], size: int) -> "Batch":
        new = iter(arrays)
        leaves = [next(new) if c else x for x, c in zip(self.leaves, self.cut, strict=True)]
        return self._replace(leaves=leaves, size=size)


def batch_of(
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    chosen: tuple[int | str, ...] | None,
    what: str,
) -> Batch:
    """The batch among the arguments of a loss; refused where it cannot be cut.

    **Arguments:**

    - `loss_fn`: the loss, for the names of its arguments.
    - `args`, `kwargs`: what it is called with after the model.
    - `chosen`: the names or positions of the arguments to cut; all without it.
    - `what`: what it is cut into, in words.
    """
    names = _names(loss_fn)
    given: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)
    keys = list(given) if chosen is None else [_key(which, names, given) for which in chosen]
    leaves, structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
    cut, size, first = [], None, ""
    for (_, key, *rest), x in leaves:
        index = getattr(key, "idx", getattr(key, "key", None))
        cut.append(index in keys and is_array(x))
        if not cut[-1]:
            continue
        path = ".".join(filter(None, (_name(index, names), dotted(tuple(rest)))))
        advice = (
            "Name the arguments that hold the batch: `sl.train_step(loss_fn, ..., "
            "batch_args=('x', 'y'))`."
        )
        if x.ndim == 0:
            raise ValueError(
                f"The argument '{path}' has no leading axis, so it cannot be cut into {what}. "
                f"{advice}"
            )
        if size is None:
            size, first = x.shape[0], path
        if x.shape[0] != size:
            raise ValueError(
                f"The leading axis of the argument '{path}' has {x.shape[0]} entries and that of "
                f"'{first}' has {size}, so they are not cut into the same {what}. {advice}"
            )
    for key in keys if chosen is not None else ():
        if not any(map(is_array, jax.tree.leaves(given[key]))):
            raise TypeError(
                f"The argument '{_name(key, names)}' holds no array, so it cannot be cut into "
                f"{what}. Leave it out of `batch_args`."
            )
    if size is None:
        raise TypeError(
            f"There is no array among the arguments after `opt` that could be cut into {what}. "
            "Pass the batch to the step: `step(model, opt, x, y)`."
        )
    return Batch([x for _, x in leaves], structure, tuple(cut), size)


def _names(loss_fn: Callable[..., Any]) -> list[str]:
    """The names of a loss's positional arguments after the model, where they can be known."""
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional][1:]


def _name(key: Any, names: list[str]) -> str:
    """What an argument is called in messages."""
    return names[key] if isinstance(key, int) and key < len(names) else str(key)


def _key(which: int | str, names: list[str], given: Mapping[int | str, Any]) -> int | str:
    """How the argument was passed that a name or position means."""
    if which in given:
        return which
    other = _name(which, names) if isinstance(which, int) else None
    if isinstance(which, str) and which in names:
        other = names.index(which)
    if other is not None and other in given:
        return other
    known = candidates(str(which), [_name(key, names) for key in given])
    raise ValueError(
        f"`batch_args` names {which!r}, but the step was called without such an argument. "
        f"Arguments after `opt`: {known}."
    )
