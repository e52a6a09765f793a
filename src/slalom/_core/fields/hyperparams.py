"""Hyperparameters by their paths: read, replaced, and as arrays."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey
from jaxtyping import PyTree

from ... import tree
from ...tree.paths import candidates, children_of, glob_pattern, named, not_one
from ...tree.types import Tracer, is_function
from ..protocol.context import Context
from ..protocol.parts import CHECK, AbstractDeclared, Part, parts
from ..protocol.transform import AbstractTransform
from ..text import notebook
from ..text.calls import call, renamed
from ..text.printing import shortest
from .declare import check_dtype
from .schedule import AbstractSchedule, AbstractStatefulSchedule, hyperparameter_fields, read_number


def bind_numbers(transform: PyTree, dtype: Any | None = None) -> PyTree:
    """A transform with its numbers as strongly typed arrays.

    Floats become float32 (float64 under x64) and ints int32. Arrays are copied, since two
    optimizers must not share a buffer that one of them may donate, and keep their dtype unless
    `dtype` is passed. Anything else is returned unchanged.
    """
    leaves, structure = jax.tree.flatten(transform)
    leaves = [_bind_array(x, dtype) if tree.is_array(x) else x for x in leaves]
    numbers = {
        i: _bind_number(x, dtype) for i, x in enumerate(leaves) if isinstance(x, int | float)
    }
    # One compiled call for all of them takes less time than one `jnp.array`.
    for i, array in zip(numbers, _as_arrays(list(numbers.values())), strict=True):
        leaves[i] = array
    return structure.unflatten(leaves)


_as_arrays = jax.jit(lambda numbers: numbers, inline=True)


def _bind_number(value: int | float, dtype: Any | None) -> np.ndarray:
    if isinstance(value, float):
        return np.asarray(value, tree.canonical_float() if dtype is None else dtype)
    return np.asarray(value, np.bool_ if isinstance(value, bool) else np.int32)


def _bind_array(value: Any, dtype: Any | None) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jnp.copy(value)
    new_dtype = value.dtype
    if jnp.issubdtype(new_dtype, jnp.floating):
        weak = getattr(value, "weak_type", False)
        new_dtype = dtype if dtype is not None else (tree.canonical_float() if weak else new_dtype)
    return jnp.array(value, jax.dtypes.canonicalize_dtype(new_dtype))


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
        if not isinstance(name, str) or not named(name, list(self)):
            return False
        return bool(the_path(name, list(self)))  # which refuses an ambiguous name

    def get(self, name: str, default: object = None) -> Any:
        if name in self:
            return self[name]
        return default

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{k!r}: {shortest(v)}" for k, v in self.items()) + "}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Readings, (dict(self.items()),)

    @staticmethod
    def refuse(*_: object, **__: object) -> NoReturn:
        """Raises an error: the mapping is read-only."""
        raise TypeError(
            "This mapping is read-only, since an optimizer is immutable. To change "
            "hyperparameters, write `opt = opt.with_hyperparams(learning_rate=1e-4)`, or with "
            "Optax `state = sl.interop.with_hyperparams(state, learning_rate=1e-4)`."
        )

    if not TYPE_CHECKING:  # to a type checker a dict has these
        __setitem__ = __delitem__ = __ior__ = refuse
        update = setdefault = pop = popitem = clear = refuse


jax.tree_util.register_pytree_with_keys(
    Readings,
    lambda readings: (tuple((DictKey(k), x) for k, x in readings.items()), tuple(readings)),
    lambda paths, values: Readings(zip(paths, values, strict=True)),
)


def _plain(value: Any) -> object:
    """A Python number with the fewest digits that identify the value in its dtype."""
    if value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return float(shortest(value))
    return value.tolist()


def the_path(name: str, paths: Sequence[str], if_several: str = "") -> str:
    """The path of a name: the name itself, or the only path that it is a suffix of."""
    meant = named(name, paths)
    # `learning_rate` means that of the optimizer inside `.outer`, not the outer one.
    meant = [path for path in meant if "outer.optimizer." not in path] or meant
    if len(meant) != 1:
        ends = [".".join(path.split(".")[-n:]) for path in paths for n in (1, 2)]
        raise not_one(name, meant, paths, advice=if_several if meant else renamed(name, ends))
    return meant[0]


Target: TypeAlias = tuple[Part, dataclasses.Field[Any]]
"""The module that has a number, as a part of the transform, and the field."""


def all_targets(transform: AbstractTransform[Any]) -> dict[str, Target]:
    """Every hyperparameter, and every number of a schedule, by path."""
    by_path: dict[str, Target] = {}
    for part in parts(transform):
        by_path |= _targets_of(part, part.path)
    return by_path


def _targets_of(part: Part, path: tuple[str, ...]) -> dict[str, Target]:
    """The numbers of a module, and those of schedules in its fields, such as `….left.peak_value`
    and `….schedules.0.peak_value`."""
    module, numbers = part.module, hyperparameter_fields(part.module)
    by_path: dict[str, Target] = {}
    for field in dataclasses.fields(module) if isinstance(module, AbstractSchedule) else numbers:
        at, held = (*path, field.name), getattr(module, field.name)
        if field in numbers:
            by_path[".".join(at)] = part, field
        many = isinstance(held, tuple)
        for i, schedule in enumerate(held if many else (held,)):
            if isinstance(schedule, AbstractSchedule):

                def get(root: PyTree, name: str = field.name, i: int | None = i if many else None):
                    value = getattr(part.get(root), name)
                    return value if i is None else value[i]

                inner = part._replace(module=schedule, get=get)
                by_path |= _targets_of(inner, (*at, str(i)) if many else at)
    return by_path


def targets(transform: AbstractTransform[Any], name: str) -> dict[str, Target]:
    """The hyperparameters that a path, suffix or glob names."""
    by_path = all_targets(transform)
    if not isinstance(name, str) or "*" not in name:
        path = the_path(name, list(by_path), f" For all of them, write '**.{name}'.")
        return {path: by_path[path]}
    chosen = {path: x for path, x in by_path.items() if glob_pattern(name).fullmatch(path)}
    if not chosen:
        raise KeyError(f"'{name}' matches no hyperparameter. Known: {candidates(name, by_path)}.")
    return chosen


def _replacement(
    path: str,
    field: dataclasses.Field[Any],
    old: Any,
    value: Any,
    replace_schedules: bool,
    runs: tuple[int, ...],
) -> object:
    """A new value, converted to replace the old leaf."""
    if isinstance(old, AbstractStatefulSchedule):
        raise ValueError(
            f"'{path}' is driven by {old!r}, so a number would have no effect. Change "
            "one of the schedule's own numbers by its name, or bind a transform without `.drive` "
            "to the model with `opt.rebind`."
        )
    if is_function(value) and not isinstance(value, AbstractSchedule) and not tree.is_array(value):
        value = call(f"The function for '{path}'", value, old=old)
    new = field.metadata["converter"](value)
    # An optimizer created under `vmap` has a number for each run.
    each = tree.is_array(new) and () != runs == new.shape
    numbers = jnp.ravel(new) if each else (new,)
    for number in numbers:
        field.metadata[CHECK](path, number)
    if isinstance(new, AbstractSchedule):
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, runs + x.shape) if tree.is_array(x) else x,
            bind_numbers(new),
        )
    if isinstance(old, AbstractSchedule) and not replace_schedules:
        raise ValueError(
            f"'{path}' is the schedule {old!r}. To replace it by the number {shortest(new)}, pass "
            "`replace_schedules=True`; the next step then recompiles once. To change one of its "
            f"numbers, use '{path}.<field>'."
        )
    if isinstance(old, AbstractSchedule) or old is None:
        return None if new is None else jnp.broadcast_to(bind_numbers(new), runs)
    cast = jnp.asarray(new, old.dtype)
    for number in numbers:
        _check_rounding(path, field, number, jnp.asarray(number, old.dtype))
    # A copy: several places may be given one array, and none may be donated twice.
    new = jnp.array(jnp.broadcast_to(cast, old.shape), copy=True)
    placed = isinstance(old, jax.Array) and not isinstance(old, Tracer) and old.committed
    return jax.device_put(new, old.sharding) if placed else new


def read(transform: AbstractTransform[Any], state: PyTree, context: Context | None) -> Readings:
    """The value of each hyperparameter in the next update."""
    values = {}
    for part in parts(transform, state, context):
        if isinstance(part.module, AbstractStatefulSchedule):
            continue  # the hyperparameter that it drives is listed at its own path
        for field in hyperparameter_fields(part.module):
            if isinstance(part.module, AbstractTransform):
                value = part.module.reading(field.name, part.state, part.context)
            else:
                value = read_number(part.module, field.name, part.context)
            if value is not None:
                values[".".join((*part.path, field.name))] = value
    return Readings(values)


def replace(
    transform: AbstractTransform[Any],
    values: Mapping[str, Any],
    replace_schedules: bool,
    runs: tuple[int, ...],
) -> AbstractTransform[Any]:
    """The transform with other hyperparameters, as `Optimizer.with_hyperparams` returns it, for
    optimizers of this shape."""
    for name, value in values.items():
        for path, (part, field) in targets(transform, name).items():
            old = getattr(part.module, field.name)
            new = _replacement(path, field, old, value, replace_schedules, runs)
            transform = with_field(transform, part, field, new)
    return transform


def bound(transform: AbstractTransform[Any], dtype: Any | None) -> AbstractTransform[Any]:
    """The transform with its numbers as arrays. Raises an error for invalid fields.

    Modules check their fields when they are created, but `eqx.tree_at` bypasses these checks.
    """
    if dtype is not None:
        check_dtype("`hyperparam_dtype`", dtype)
    for old in _declared(transform):
        AbstractDeclared.__check_init__(old)
    result = bind_numbers(transform, dtype)
    for old, new in zip(_declared(transform), _declared(result), strict=True):
        for field in hyperparameter_fields(old):
            path = f"{type(old).__name__}.{field.name}"
            _check_rounding(path, field, getattr(old, field.name), getattr(new, field.name))
    return result


def _check_rounding(path: str, field: dataclasses.Field[Any], old: Any, new: Any) -> None:
    """Raises an error for a number that leaves its interval, or becomes 0, when it is rounded."""
    if not isinstance(new, jax.Array) or isinstance(new, Tracer):
        return
    try:
        field.metadata[CHECK](path, new)
        # As XLA compares: numbers too small for the precision of a dtype are 0 there.
        lost = bool(new == 0) and bool(old != 0)
    except ValueError:
        lost = True
    if lost:
        # Processors compute with subnormal numbers as with 0.
        small = abs(np.asarray(new, np.float64)) < float(jnp.finfo(new.dtype).tiny)
        raise ValueError(
            f"{path} is {shortest(old)}, which {new.dtype} can only keep as "
            f"{'0.0' if small else shortest(new)}. "
            "Choose another number or a dtype with more precision."
        )


def _declared(node: object) -> Iterator[Any]:
    """All transforms, schedules and conditions in a tree."""
    if isinstance(node, AbstractDeclared):
        yield node
    for _, child in children_of(node)[0]:
        yield from _declared(child)


def with_field(
    transform: AbstractTransform[Any], part: Part, field: dataclasses.Field[Any], value: object
) -> AbstractTransform[Any]:
    """The transform with another value, not converted, in a field of one of its parts."""
    old = getattr(part.module, field.name)
    return eqx.tree_at(
        lambda t: getattr(part.get(t), field.name),
        transform,
        value,
        is_leaf=lambda x: x is None or x is old,
    )
