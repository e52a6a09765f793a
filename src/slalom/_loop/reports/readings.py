"""Numbers that are read from an optimizer by name, and computed when they are read.

A training loop reads one number per step. Rebuilding the transform and its state for it, and
computing all the others, would take longer than a small step. So the program of each reading is
derived once per structure. Most numbers are arrays of the optimizer. A schedule is a function of a
few of them, which is compiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jaxtyping import Array

from ..._core.fields.by_path import AbstractByPath, ByPath, the_path
from ..._core.text import notebook
from ..._core.text.printing import shortest
from ..binding.arrays import Arrays, check_not_donated

if TYPE_CHECKING:
    _Numbers = Mapping[str, Array]
else:
    _Numbers = Mapping  # with its parameters, a run-time type check would compute a number


class Reading(NamedTuple):
    """One number of an optimizer as a function of some of its arrays."""

    path: str
    positions: tuple[int, ...]
    """The positions of the arrays that it depends on."""
    kinds: tuple[Any, ...]
    """Their shapes and dtypes."""
    compute: Callable[..., Any] | None
    """The compiled function; `None` for the array itself."""


@jax.tree_util.register_pytree_with_keys_class
class Readings(AbstractByPath, _Numbers):
    """Numbers of an optimizer by path. Any unambiguous suffix of a path works as a key.

    Each number is computed when it is read. `.to_dict()` returns all of them as Python numbers.
    """

    def __init__(
        self,
        arrays: Arrays,
        kind: str,
        compute: Callable[[Any], Mapping[str, Any]],
        *,
        copies: bool,
        advice: Callable[[str], str] = lambda name: "",
    ):
        self._arrays = arrays
        self._kind = kind
        self._compute = compute
        self._copies = copies
        self._advice = advice

    def __getitem__(self, name: str) -> Array:
        table = self._table()
        if name not in table:
            try:
                path = the_path(name, [path for path, r in table.items() if r.path == path])
            except KeyError as error:
                raise KeyError(f"{error.args[0]}{self._advice(name)}") from None
            table[name] = table[path]  # so that the next look-up is fast
        reading = table[name]
        leaves = self._arrays.leaves
        used = [leaves[i] for i in reading.positions]
        check_not_donated(used)
        if tuple(map(_kind_of, used)) != reading.kinds:
            # Ages become vectors when some parameters are reset.
            del self._arrays.binding.readings[self._key]
            return self[name]
        if reading.compute is not None:
            return reading.compute(*used)
        return _copy(*used) if self._copies else used[0]

    if not TYPE_CHECKING:  # a type checker would otherwise accept every name

        def __getattr__(self, name: str) -> Any:
            advice = "" if name[0] == "_" else f' Write `opt.{self._kind}["{name}"]`.'
            raise AttributeError(f"'Readings' object has no attribute '{name}'.{advice}", name=name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, reading in self._table().items() if reading.path == name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def to_dict(self) -> dict[str, Any]:
        """All of them as plain Python numbers, in one transfer, for loggers and JSON.

        **Returns:** a dict from paths to floats, ints and bools. For an optimizer created under
        `vmap`, each value is a list with an entry for each run.
        """
        names = list(self)
        values = jax.device_get([self[name] for name in names])  # of a dict, it sorts the keys
        return {name: _plain(value) for name, value in zip(names, values, strict=True)}

    def _repr_html_(self) -> str:
        rows = [(name, shortest(value)) for name, value in self.items()]
        return notebook.document(notebook.table(("name", "value"), rows, "", ("value",)))

    def __setitem__(self, name: str, value: Any) -> None:
        ByPath.refuse()

    @property
    def _key(self) -> tuple[str, int]:
        return self._kind, jnp.ndim(self._arrays.leaves[-1])

    # No property: `__getattr__` would hide an `AttributeError` inside it.
    def _table(self) -> dict[str, Reading]:
        known = self._arrays.binding.readings
        if self._key not in known:
            known[self._key] = self._make_table()
        return known[self._key]

    def _make_table(self) -> dict[str, Reading]:
        leaves, names = self._arrays.leaves, []

        def of_leaves(*leaves: Any) -> list[Any]:
            values = self._compute(leaves)
            names[:] = values
            return list(values.values())

        # An optimizer created under `vmap` has a count for each run.
        of_runs = jax.vmap(of_leaves) if jnp.ndim(leaves[-1]) else of_leaves
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        closed = jax.make_jaxpr(of_runs)(*structs)
        return {name: _reading(name, closed, i, leaves) for i, name in enumerate(names)}


def _reading(name: str, closed: Any, i: int, leaves: Sequence[Any]) -> Reading:
    """The i-th result of a program as a function of the arrays that it depends on."""
    total = len(closed.jaxpr.outvars)
    own, used = partial_eval.dce_jaxpr(closed.jaxpr, [j == i for j in range(total)])
    positions = tuple(n for n, u in enumerate(used) if u)
    kinds = tuple(_kind_of(leaves[n]) for n in positions)
    if not own.eqns and own.outvars[0] in own.invars:
        return Reading(name, positions, kinds, None)

    @jax.jit
    def compute(*arrays: Any) -> Any:
        (value,) = jax.core.eval_jaxpr(own, closed.consts, *arrays)
        return value

    return Reading(name, positions, kinds, compute)


def _plain(value: Any) -> Any:
    """A Python number with the fewest digits that identify the value in its dtype."""
    if value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return float(shortest(value))
    return value.tolist()


def _kind_of(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype


# Copied, because the next step may donate the state.
_copy = jax.jit(jnp.copy)
