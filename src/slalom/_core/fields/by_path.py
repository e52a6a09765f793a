"""Values by their paths, as a mapping that also takes unambiguous suffixes."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import DictKey

from ...tree.paths import named, not_one
from ..text.advice import renamed
from ..text.printing import shortest


class AbstractByPath:
    """What mappings have in common whose keys are paths, and any unambiguous suffix of one.

    As trees they become a `ByPath` again.
    """

    # With `self: Any`, since a check of the type `Mapping[str, Array]` would compute a number.

    def __contains__(self: Any, name: object) -> bool:
        return isinstance(name, str) and bool(matches(name, list(self)))

    def get(self: Any, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return default

    def __repr__(self: Any) -> str:
        return "{" + ", ".join(f"{k!r}: {shortest(v)}" for k, v in self.items()) + "}"

    def __reduce__(self: Any) -> Any:
        return ByPath, (dict(self.items()),)

    def tree_flatten_with_keys(self: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple((DictKey(path), x) for path, x in self.items()), tuple(self)

    def tree_flatten(self: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Iterable[Any]) -> "ByPath":
        return ByPath(zip(paths, values, strict=True))


@jax.tree_util.register_pytree_with_keys_class
class ByPath(AbstractByPath, dict[str, Any]):
    """A flat dict of values by path; any unambiguous suffix of a path works as a key."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(the_path(name, list(self)))

    @staticmethod
    def refuse(*_: Any, **__: Any) -> Any:
        """Raises: nothing here can be written."""
        raise TypeError(
            "This mapping is read-only, since an optimizer is immutable. To change "
            "hyperparameters, write `opt = opt.with_hyperparams(learning_rate=1e-4)`, or with "
            "Optax `state = sl.interop.with_hyperparams(state, learning_rate=1e-4)`."
        )

    if not TYPE_CHECKING:  # to a type checker a dict has these
        __setitem__ = __delitem__ = __ior__ = refuse
        update = setdefault = pop = popitem = clear = refuse


def the_path(name: str, known: Sequence[str]) -> str:
    """The path of a name: the name itself, or the only path that it is a suffix of."""
    found = matches(name, known)
    if not found:
        advice = renamed(name, [path.rpartition(".")[2] for path in known])
        raise not_one(name, found, known, "is not known", advice)
    return found[0]


def matches(name: str, known: Sequence[str]) -> list[str]:
    """The path of a name, if there is one. An ambiguous name raises an error."""
    found = named(name, known)
    if len(found) > 1:
        # `learning_rate` means that of the optimizer inside `.outer`, not the outer one.
        found = [path for path in found if "outer.optimizer." not in path] or found
    if len(found) > 1:
        raise not_one(name, found, known)
    return found
