"""How a transform, its state and a schedule declare their fields.

The declaration decides what a field is, never the type of the value it was given: a field is a
real number that may be traced and scheduled (`hyperparameter`), a number of steps (`steps`),
structure (`eqx.field(static=True)`), or, in a state, parameter-shaped (`param_like`).
"""

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Real

from .._types import Tracer
from ..tree.dtypes import canonical_float
from .declared import CHECK
from .printing import code, shortest
from .schedule import AbstractSchedule, AbstractStatefulSchedule, as_schedule

Hyperparameter: TypeAlias = (
    float | int | np.number | Real[Array, ""] | Real[np.ndarray, ""] | Callable[..., Any]
)
"""What a real-valued field takes: a number, a 0-d array, or a schedule, that is an
`sl.schedules` module or any function of the step."""

_KIND = "slalom.kind"
_HYPERPARAMETER, _STEPS = "hyperparameter", "steps"
PARAM_LIKE, PER_PARAM, PER_LEAF = "param_like", "per_param", "per_leaf"
UNTIL_RESET = "until_reset"
_MISSING = dataclasses.MISSING
_State = TypeVar("_State")


# --- declarations ---------------------------------------------------------------------------


def hyperparameter(
    default: Any = _MISSING,
    *,
    within: str = "(-inf, inf)",
    optional: bool = False,
    kw_only: bool = False,
) -> Any:
    """Declares a real-valued field: a number, a 0-d array, or a schedule.

    An unbound transform keeps a Python float here, and binding makes it a strongly typed 0-d
    array: a changed value never recompiles. A plain function of the step becomes a schedule.

    **Arguments:**

    - `default`: the default; without one the field must be given.
    - `within`: the interval of allowed values, such as `"[0, 1)"`. Numbers are checked when the
        transform is made; traced values and schedules are not.
    - `optional`: whether `None` is a value too, as it is where it is the default.
    - `kw_only`: whether it is passed by its name only.

    **Returns:** a field for the body of a transform or schedule class.

    ```python
    >>> class ScaleByHalfLife(sl.AbstractTransform):
    ...     half_life: sl.Hyperparameter = sl.hyperparameter(10.0, within="(0, inf)")
    ...     def init(self, params):
    ...         return None
    ...     def update(self, updates, state, params=None, context=None):
    ...         now = self.at(context)
    ...         return jax.tree.map(lambda u: u * 0.5 ** (1 / now.half_life), updates), state
    >>> ScaleByHalfLife(half_life=-1.0)
    Traceback (most recent call last):
    ValueError: ScaleByHalfLife.half_life must be in (0, inf), got -1.0.

    ```
    """
    check = functools.partial(_check_hyperparameter, _Interval(within), optional=optional)
    return _declare(_HYPERPARAMETER, default, _as_hyperparameter, check, kw_only)


def steps(default: Any = _MISSING, *, within: str = "[0, inf)") -> Any:
    """Declares a number of steps: an integer leaf of a schedule, traced like a hyperparameter."""
    check = functools.partial(_check_steps, _Interval(within))
    return _declare(_STEPS, default, _as_steps, check)


def count_field(default: Any = _MISSING, *, least: int = 1) -> Any:
    """Declares a number of steps that is part of the structure: a Python int."""
    check = functools.partial(_check_count, least)
    options: dict[str, Any] = {} if default is _MISSING else {"default": default}
    return eqx.field(static=True, converter=_as_steps, metadata={CHECK: check}, **options)


def choice_field(default: str, *others: str) -> Any:
    """Declares one of some words, which is part of the structure."""
    check = functools.partial(_check_choice, (default, *others))
    return eqx.field(default=default, static=True, metadata={CHECK: check})


def param_like() -> Any:
    """Declares that a state field is shaped as the parameters: a tree with a leaf per parameter.

    Inspection, sharding, precision and `sl.map_params` act on what is marked.

    **Returns:** a field for the body of a state class.
    """
    return _declare(PARAM_LIKE)


def per_param() -> Any:
    """Declares that a state field has something for each parameter, of other shapes than it.

    A tree like the parameters, with an array, or a tree of arrays, in the place of each leaf.

    **Returns:** a field for the body of a state class.
    """
    return _declare(PER_PARAM)


def per_leaf() -> Any:
    """Declares that a state field has an entry for each parameter leaf, or one for all of them.

    **Returns:** a field for the body of a state class.
    """
    return _declare(PER_LEAF)


def until_reset() -> Any:
    """Declares a state field that starts again when the state of all parameters does.

    It belongs to no parameter alone: a reset of some parameters keeps it.
    """
    return _declare(UNTIL_RESET)


def dtype_field(*, kw_only: bool = False) -> Any:
    """Declares a dtype that may be `None`; kept as `numpy.dtype`, so that equal ones are equal."""
    return eqx.field(
        default=None,
        static=True,
        converter=_as_dtype,
        kw_only=kw_only,
        metadata={CHECK: _check_dtype},
    )


def _declare(
    kind: str,
    default: Any = _MISSING,
    converter: Callable[[Any], Any] | None = None,
    check: Callable[[str, Any], None] | None = None,
    kw_only: bool = False,
) -> Any:
    options: dict[str, Any] = {} if default is _MISSING else {"default": default}
    metadata: dict[str, Any] = {} if check is None else {CHECK: check}
    if kw_only:
        options["kw_only"] = True
    if converter is not None:
        options["converter"] = converter
    metadata = {_KIND: kind} if check is None else {_KIND: kind, CHECK: check}
    return eqx.field(metadata=metadata, **options)


def _as_dtype(dtype: Any) -> Any:
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError:
        return dtype  # left for the check to refuse, which knows the name of the field


# --- conversion and validation --------------------------------------------------------------


def _as_hyperparameter(value: Any) -> Any:
    # What is not a number, an array or a function is left for the check to refuse, which knows
    # the name of the field. Modules are asked before callables: models are callable.
    if isinstance(value, bool | np.bool_) or value is None:
        return value
    if isinstance(value, int | float | np.integer | np.floating):
        return float(value)
    if isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating):
        return float(value)
    if isinstance(value, jax.Array | np.ndarray):
        # A real number that was written as an integer: kept as one, it could not be set to 0.1.
        whole = jnp.issubdtype(value.dtype, jnp.integer)
        return value.astype(canonical_float()) if whole else value
    return as_schedule(value) if callable(value) else value


def _as_steps(value: Any) -> Any:
    if isinstance(value, np.integer) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


class _Interval:
    """An interval as it is written: `"[0, 1)"`."""

    _FORM = re.compile(r"([\[(])\s*(\S+)\s*,\s*(\S+)\s*([\])])")

    def __init__(self, text: str):
        match = self._FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is no interval; write for example '[0, 1)'.")
        self.text = text
        left, low, high, right = match.groups()
        self.low, self.high = float(low), float(high)
        self.above = operator.ge if left == "[" else operator.gt
        self.below = operator.le if right == "]" else operator.lt

    def check(self, name: str, value: Any) -> None:
        # NaN is in no interval: it compares false.
        number = float(value)
        if not (self.above(number, self.low) and self.below(number, self.high)):
            raise ValueError(f"{name} must be in {self.text}, got {shortest(value)}.")


def _check_hyperparameter(within: _Interval, name: str, value: Any, optional: bool = False) -> None:
    if isinstance(value, AbstractSchedule) or (optional and value is None):
        return
    wanted = "a real number, a 0-d array or a schedule"
    if isinstance(value, AbstractStatefulSchedule):
        field = name.rpartition(".")[2]
        raise TypeError(
            f"{name} must be {wanted} without a memory, got {value!r}, whose state no field can "
            f"keep. Give the field a number and drive it: `tx.drive({{{field!r}: schedule}})`."
        )
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape != ():
            raise ValueError(
                f"{name} must be {wanted}, got an array of shape {value.shape}. For other values "
                "at other parameters use `.partition`; for several runs, `eqx.filter_vmap`."
            )
        real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        if not real:
            raise TypeError(f"{name} must be {wanted}, got an array of dtype {value.dtype}.")
    elif not isinstance(value, float):
        raise TypeError(f"{name} must be {wanted}, got {value!r} of type {type(value).__name__}.")
    if not isinstance(value, Tracer):
        within.check(name, value)


def _check_steps(within: _Interval, name: str, value: Any) -> None:
    if isinstance(value, jax.Array | np.ndarray):
        whole = value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
    else:
        whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole:
        raise TypeError(f"{name} must be a whole number of steps, got {value!r}.")
    if not isinstance(value, Tracer):
        within.check(name, value)
        if int(value) >= 2**31:
            raise ValueError(
                f"{name} must be less than 2**31, up to where the clock counts, got {value}."
            )


def _check_dtype(name: str, dtype: Any) -> None:
    if not isinstance(dtype, np.dtype) or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating dtype, got {code(dtype)}.")


def _check_count(least: int, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def _check_choice(known: tuple[str, ...], name: str, value: Any) -> None:
    if value not in known:
        *most, last = map(repr, known)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}.")


def check_number(name: str, value: Any, within: str = "(-inf, inf)") -> Any:
    """A number that stands inside another field, converted and checked; no schedule."""
    value = _as_hyperparameter(value)
    if isinstance(value, AbstractSchedule):
        raise TypeError(f"{name} must be a number, got the schedule {value!r}.")
    _check_hyperparameter(_Interval(within), name, value)
    return value


def check_step(name: str, value: Any, within: str = "[0, inf)") -> Any:
    """A number of steps that stands inside another field, converted and checked."""
    value = _as_steps(value)
    _check_steps(_Interval(within), name, value)
    return value


def steps_in_order(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """Numbers of steps that stand inside another field, converted and checked, also in order."""
    anywhere = "(-inf, inf)"
    values = tuple(check_step(f"{name}[{i}]", v, anywhere) for i, v in enumerate(values))
    known = [int(value) for value in values if not isinstance(value, Tracer)]
    if any(b <= a for a, b in itertools.pairwise((-1, *known))):
        listed = ", ".join(map(shortest, values))
        raise ValueError(f"{name} must be increasing and not negative, got [{listed}].")
    return values


# --- binding --------------------------------------------------------------------------------


def bind_number(value: Any, dtype: Any | None = None) -> Any:
    """A leaf of a transform as a strongly typed array of its own.

    A float takes the canonical float (float32; float64 under x64) and an int int32. An array is
    copied, so that no two optimizers share a buffer that one of them may donate, and keeps its
    dtype unless `dtype` says otherwise. Whatever is no number is returned as it is.
    """
    if isinstance(value, bool | np.bool_):
        return jnp.array(value)
    if isinstance(value, int | np.integer):
        return jnp.array(value, jnp.int32)
    if isinstance(value, float | np.floating):
        return jnp.array(value, canonical_float() if dtype is None else dtype)
    if isinstance(value, jax.Array | np.ndarray):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return jnp.copy(value)
        own = value.dtype
        if jnp.issubdtype(own, jnp.floating):
            weak = getattr(value, "weak_type", False)
            own = dtype if dtype is not None else (canonical_float() if weak else own)
        return jnp.array(value, jax.dtypes.canonicalize_dtype(own))
    return value


# --- reading the declarations ---------------------------------------------------------------


def hyperparameter_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a class or instance that were declared real-valued, in order."""
    return [
        f for f in dataclasses.fields(cls) if f.metadata.get(_KIND) in (_HYPERPARAMETER, _STEPS)
    ]


def params_like_fields(state: Any) -> Iterator[str]:
    """The names of a state's parameter-shaped fields."""
    for field in _dataclass_fields(state):
        if field.metadata.get(_KIND) == PARAM_LIKE:
            yield field.name


def mark_of(state: Any, field: str) -> str | None:
    """What a state's field was declared as, if as anything."""
    for known in _dataclass_fields(state):
        if known.name == field:
            mark = known.metadata.get(_KIND)
            return mark if mark in (PARAM_LIKE, PER_PARAM, PER_LEAF, UNTIL_RESET) else None
    return None


def _dataclass_fields(node: Any) -> tuple[dataclasses.Field[Any], ...]:
    if isinstance(node, type) or not dataclasses.is_dataclass(node):
        return ()
    return dataclasses.fields(node)


def map_params(
    function: Callable[..., Any],
    state: _State,
    *rest: Any,
    other: Callable[[Any], Any] | None = None,
) -> _State:
    """Maps the parameter-shaped fields of a state, wherever they stand inside it.

    **Arguments:**

    - `function`: called as `function(leaf, *rest_leaves)` at each leaf of every field that was
        declared with `sl.param_like()`.
    - `state`: the state of any transform, or any tree that contains states.
    - `rest`: further trees shaped as the parameters, for `function`.
    - `other`: applied to every other leaf of the state; they are kept as they are without it.

    **Returns:** the state with those leaves replaced.

    ```python
    >>> params = {"w": jnp.ones(3), "b": jnp.ones(())}
    >>> state = sl.adam(1e-3).init(params)
    >>> sl.map_params(lambda leaf, p: p, state, params)[0].mu["w"]
    Array([1., 1., 1.], dtype=float32)

    ```
    """

    def has_marks(node: Any) -> bool:
        return any(True for _ in params_like_fields(node))

    def keep(leaf: Any) -> Any:
        return leaf if other is None else other(leaf)

    def rebuild(node: Any) -> Any:
        marked = set(params_like_fields(node))
        if not marked:
            return keep(node)
        # One level at a time, by flattening: going through the class would convert and check.
        children, structure = jax.tree_util.tree_flatten_with_path(
            node, is_leaf=lambda child: child is not node
        )
        return structure.unflatten(
            [
                jax.tree.map(function, child, *cut_as(child, rest))
                if path[0].name in marked
                else map_params(function, child, *rest, other=other)
                for path, child in children
            ]
        )

    return jax.tree.map(rebuild, state, is_leaf=has_marks)


def cut_as(marked: Any, trees: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parameter-shaped trees with the holes that masks left in a marked field."""
    leaves, structure = jax.tree.flatten(marked, is_leaf=lambda x: x is None)
    return tuple(
        structure.unflatten(
            [
                None if here is None else leaf
                for here, leaf in zip(leaves, structure.flatten_up_to(tree), strict=True)
            ]
        )
        for tree in trees
    )
