"""Values by their paths, as a mapping that also takes unambiguous suffixes."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from .._paths import candidates, has_suffix
from .printing import shortest


@jax.tree_util.register_pytree_node_class
class ByPath(dict[str, Any]):
    """A flat dict of values by path; any unambiguous suffix of a path works as a key."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(the_path(name, list(self)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "What is read here cannot be written: an optimizer is immutable. For hyperparameters "
            "write `opt = opt.with_hyperparams(learning_rate=1e-4)`."
        )

    if not TYPE_CHECKING:  # to a type checker a dict has these
        __setitem__ = __delitem__ = __ior__ = _refuse
        update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return ByPath, (dict(self),)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{k!r}: {shortest(v)}" for k, v in self.items()) + "}"

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Iterable[Any]) -> "ByPath":
        return cls(zip(paths, values, strict=True))


def the_path(name: str, known: Sequence[str]) -> str:
    """The one path that a name means: itself, or the path that it is an unambiguous suffix of."""
    found = [name] if name in known else [path for path in known if has_suffix(path, name)]
    if len(found) != 1:
        what = "is ambiguous" if found else "is not known"
        raise KeyError(f"'{name}' {what}. Candidates: {candidates(name, found or known)}.")
    return found[0]
