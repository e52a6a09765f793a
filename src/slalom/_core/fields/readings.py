"""Numbers that are read from an optimizer, by their paths or unambiguous suffixes of these."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey

from ...tree.paths import named, not_one
from ..text import notebook
from ..text.advice import renamed
from ..text.printing import shortest


@jax.tree_util.register_pytree_with_keys_class
class Readings(dict[str, Any]):
    """Numbers of an optimizer by path. Any unambiguous suffix of a path works as a key.

    `.to_dict()` returns all of them as Python numbers.
    """

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]],
        kind: str = "hyperparams",
        advice: Callable[[str], str] = lambda name: "",
    ):
        super().__init__(values)
        self._kind = kind
        self._advice = advice

    def __getitem__(self, name: str) -> Any:
        try:
            return super().__getitem__(the_path(name, list(self)))
        except KeyError as error:
            raise KeyError(f"{error.args[0]}{self._advice(name)}") from None

    if not TYPE_CHECKING:  # a type checker would otherwise accept every name

        def __getattr__(self, name: str) -> Any:
            advice = "" if name[0] == "_" else f' Write `opt.{self._kind}["{name}"]`.'
            raise AttributeError(f"'Readings' object has no attribute '{name}'.{advice}", name=name)

    def to_dict(self) -> dict[str, Any]:
        """All of them as plain Python numbers, in one transfer, for loggers and JSON.

        **Returns:** a dict from paths to floats, ints and bools. For an optimizer created under
        `vmap`, each value is a list with an entry for each run.
        """
        values = jax.device_get(list(self.values()))  # of a dict, it sorts the keys
        return {name: _plain(value) for name, value in zip(self, values, strict=True)}

    def _repr_html_(self) -> str:
        rows = [(name, shortest(value)) for name, value in self.items()]
        return notebook.document(notebook.table(("name", "value"), rows, "", ("value",)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(matches(name, list(self)))

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return default

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{k!r}: {shortest(v)}" for k, v in self.items()) + "}"

    def __reduce__(self) -> Any:
        return Readings, (dict(self.items()),)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple((DictKey(path), x) for path, x in self.items()), tuple(self)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Iterable[Any]) -> "Readings":
        return Readings(zip(paths, values, strict=True))

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


def _plain(value: Any) -> Any:
    """A Python number with the fewest digits that identify the value in its dtype."""
    if value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return float(shortest(value))
    return value.tolist()


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
