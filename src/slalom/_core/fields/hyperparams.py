"""Reading and replacing hyperparameters by their paths."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import tree
from ...tree.paths import candidates, glob_pattern
from ...tree.types import Tracer, is_function
from ..protocol.context import Context
from ..protocol.parts import CHECK, AbstractDeclared, Part
from ..protocol.transform import AbstractTransform
from ..state.walk import parts
from ..text.printing import shortest
from .bind_numbers import bind_numbers
from .declare import hyperparameter_fields
from .readings import Readings, the_path
from .schedule import AbstractSchedule, AbstractStatefulSchedule, read_number


def all_targets(
    transform: AbstractTransform[Any],
) -> dict[str, tuple[str, Part, dataclasses.Field[Any]]]:
    """Every hyperparameter, and every number of a schedule, by path."""
    known: dict[str, tuple[str, Part, Any]] = {}
    for part in parts(transform):
        for field in hyperparameter_fields(part.module):
            path = ".".join((*part.path, field.name))
            known[path] = (path, part, field)
            known |= _inside_schedule(path, part, field)
    return known


def targets(
    transform: AbstractTransform[Any], name: str
) -> list[tuple[str, Part, dataclasses.Field[Any]]]:
    """The hyperparameters that a path, suffix or glob names."""
    known = all_targets(transform)
    if not isinstance(name, str) or "*" not in name:
        return [known[the_path(name, list(known))]]
    found = [path for path in known if glob_pattern(name).fullmatch(path)]
    if not found:
        raise KeyError(f"'{name}' matches no hyperparameter. Known: {candidates(name, known)}.")
    return [known[path] for path in found]


def _inside_schedule(path: str, part: Part, field: Any) -> dict[str, tuple[str, Any, Any]]:
    """The numbers of a schedule, reached as `….learning_rate.peak_value`.

    Those of schedules inside it are reached through its fields: `….left`, `….schedules.0`.
    """
    held = getattr(part.module, field.name)
    many = isinstance(held, tuple)
    known: dict[str, tuple[str, Any, Any]] = {}
    for i, schedule in enumerate(held if many else (held,)):
        if not isinstance(schedule, AbstractSchedule):
            continue

        def get(transform: Any, i: int = i) -> Any:
            value = getattr(part.get(transform), field.name)
            return value[i] if many else value

        inner = part._replace(module=schedule, get=get)
        prefix = f"{path}.{i}" if many else path
        numbers = {f.name for f in hyperparameter_fields(schedule)}
        for inside in dataclasses.fields(schedule):
            name = f"{prefix}.{inside.name}"
            if inside.name in numbers:
                known[name] = (name, inner, inside)
            known |= _inside_schedule(name, inner, inside)
    return known


def _replacement(path: str, field: Any, old: Any, value: Any, replace_schedules: bool) -> Any:
    """A new value, converted to replace the old leaf."""
    if isinstance(old, AbstractStatefulSchedule):
        raise ValueError(
            f"'{path}' is driven by {old!r}, so a number would have no effect. Change "
            "one of the schedule's own numbers by its name, or bind a transform without `.drive` "
            "to the model with `opt.rebind`."
        )
    if is_function(value) and not isinstance(value, AbstractSchedule) and not tree.is_array(value):
        value = value(old)
    new = field.metadata["converter"](value)
    # An optimizer created under `vmap` has a number for each run.
    each = tree.is_array(new) and tree.is_array(old) and () != old.shape == new.shape
    numbers = jnp.ravel(new) if each else (new,)
    for number in numbers:
        field.metadata[CHECK](path, number)
    if isinstance(new, AbstractSchedule):
        return bind_numbers(new)
    if isinstance(old, AbstractSchedule) and not replace_schedules:
        raise ValueError(
            f"'{path}' is the schedule {old!r}. To replace it by the number {shortest(new)}, pass "
            "`replace_schedules=True`; the next step then recompiles once. To change one of its "
            f"numbers, use '{path}.<field>'."
        )
    if isinstance(old, AbstractSchedule) or old is None:
        return bind_numbers(new)
    cast = jnp.asarray(new, old.dtype)
    for number in numbers:
        _check_rounding(path, field, number, jnp.asarray(number, old.dtype))
    # A copy: several places may be given one array, and none may be donated twice.
    new = jnp.array(jnp.broadcast_to(cast, old.shape), copy=True)
    placed = isinstance(old, jax.Array) and not isinstance(old, Tracer) and old.committed
    return jax.device_put(new, old.sharding) if placed else new


def read(transform: AbstractTransform[Any], state: Any, context: Context | None) -> Readings:
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
    transform: AbstractTransform[Any], values: Mapping[str, Any], replace_schedules: bool
) -> AbstractTransform[Any]:
    """The transform with other hyperparameters, as `Optimizer.with_hyperparams` returns it."""
    for name, value in values.items():
        for path, part, field in targets(transform, name):
            old = getattr(part.module, field.name)
            new = _replacement(path, field, old, value, replace_schedules)
            transform = with_field(transform, part, field, new)
    return transform


def bound(transform: AbstractTransform[Any], dtype: Any | None) -> AbstractTransform[Any]:
    """The transform with its numbers as arrays. Raises an error for invalid fields.

    Modules check their fields when they are created, but `eqx.tree_at` bypasses these checks.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`hyperparam_dtype` must be a floating dtype, got {dtype!r}.")
    for given in _declared(transform):
        AbstractDeclared.__check_init__(given)
    result = bind_numbers(transform, dtype)
    for given, kept in zip(_declared(transform), _declared(result), strict=True):
        for field in hyperparameter_fields(given):
            path = f"{type(given).__name__}.{field.name}"
            _check_rounding(path, field, getattr(given, field.name), getattr(kept, field.name))
    return result


def _check_rounding(path: str, field: Any, given: Any, kept: Any) -> None:
    """Raises an error for a number that leaves its interval, or becomes 0, when it is rounded."""
    if not isinstance(kept, jax.Array) or isinstance(kept, Tracer):
        return
    try:
        field.metadata[CHECK](path, kept)
        lost = bool(kept == 0) and bool(given != 0)
    except ValueError:
        lost = True
    if lost:
        # Processors compute with subnormal numbers as with 0.
        small = abs(np.asarray(kept, np.float64)) < float(jnp.finfo(kept.dtype).tiny)
        raise ValueError(
            f"{path} is {shortest(given)}, which {kept.dtype} can only keep as "
            f"{'0.0' if small else shortest(kept)}. "
            "Choose another number or a dtype with more precision."
        )


def _declared(node: Any) -> Iterator[Any]:
    """All transforms, schedules and conditions in a tree."""
    if isinstance(node, AbstractDeclared):
        yield node
    inner = jax.tree.leaves(
        node, is_leaf=lambda x: x is not node and isinstance(x, AbstractDeclared)
    )
    for child in inner:
        if isinstance(child, AbstractDeclared):
            yield from _declared(child)


def with_field(
    transform: AbstractTransform[Any], part: Part, field: dataclasses.Field[Any], value: Any
) -> AbstractTransform[Any]:
    """The transform with another value, not converted, in a field of one of its parts."""
    old = getattr(part.module, field.name)
    return eqx.tree_at(
        lambda t: getattr(part.get(t), field.name),
        transform,
        value,
        is_leaf=lambda x: x is None or x is old,
    )
