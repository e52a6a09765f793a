"""The inputs of one step other than the gradients."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .. import tree
from .._types import Params, Step, Updates

_OTHER = ("extra", "shardings")
"""The fields that are not inputs by name."""


class Context(eqx.Module):
    """The inputs of one step other than the gradients.

    **Arguments:**

    - `step`: the number of steps so far, at which schedules are evaluated.
    - `value`: the loss, a scalar.
    - `grad`: the gradient of the loss, before any transform.
    - `value_fn`: the loss as a function of the parameters.
    - `key`: a PRNG key for this step.
    - `weight`: the weight of this mini-batch in a mean over several, a scalar.
    - `per_param`: parameter-shaped trees by name. Masks and partitions restrict them to the leaves
        that they select.
    - `extra`: inputs that custom transforms declare in `needs`, by name.
    - `shardings`: where each parameter is on a mesh with automatic axes, in the order of the
        leaves. `opt.step` passes it.
    """

    step: Step | None = None
    value: Any = None
    grad: Updates | None = None
    value_fn: Callable[[Params], Any] | None = None
    key: Any = None
    weight: Any = None
    per_param: Mapping[str, PyTree] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shardings: tuple[NamedSharding | None, ...] = eqx.field(default=(), static=True)

    def has(self, name: str) -> bool:
        """Whether this step knows `name`."""
        fields = [field.name for field in dataclasses.fields(self) if field.name not in _OTHER]
        known = getattr(self, name) if name in fields else self.extra.get(name)
        return known is not None

    def replace(self, **changes: Any) -> "Context":
        """This context with some entries changed.

        A wrapper that gives its inner transform a clock of its own replaces `step`.
        """
        return dataclasses.replace(self, **changes)

    def cut(self, keep: tuple[bool, ...], params: Params) -> "Context":
        """This context for a transform that acts on some of the parameters only.

        The loss becomes a function of those parameters; the others are held constant.
        """
        per_param = self.per_param and {k: tree.cut(v, keep) for k, v in self.per_param.items()}
        grad = None if self.grad is None else tree.cut(self.grad, keep)
        value_fn = None if self.value_fn is None else _with_rest(self.value_fn, keep, params)
        places = zip(self.shardings, keep, strict=False)
        shardings = tuple(place for place, kept in places if kept)
        changes = {"per_param": per_param, "grad": grad, "value_fn": value_fn}
        return dataclasses.replace(self, shardings=shardings, **changes)


def _with_rest(
    of_all: Callable[[Params], Any], keep: tuple[bool, ...], params: Params
) -> Callable[[Params], Any]:
    """A function of all parameters as a function of those that are kept."""
    rest = tree.cut(params, tuple(not k for k in keep))

    def of_kept(kept: Params) -> Any:
        return of_all(tree.merge(jax.tree.structure(params), keep, kept, rest))

    return of_kept
