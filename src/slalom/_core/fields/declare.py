"""Declares the fields of transforms and schedules.

The declaration decides what a field is, never the type of its value. A field is a real number that
may be traced and scheduled (`hyperparameter`), a number of steps (`steps`), or structure
(`eqx.field(static=True)`). The fields of states are marked with the functions in `marks.py`.
"""

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...tree.dtypes import canonical_float, is_array, nearest_float
from ...tree.types import Hyperparameter, Tracer, is_function
from ...where.layout import as_layout, check_layout
from ..protocol.parts import CHECK
from ..text.messages import check_int, series
from ..text.printing import code, shortest
from .schedule import (
    HYPERPARAMETER,
    KIND,
    STEPS,
    AbstractSchedule,
    AbstractStatefulSchedule,
    as_schedule,
)

if not TYPE_CHECKING:
    Number: TypeAlias = Hyperparameter
    OptionalNumber: TypeAlias = Hyperparameter | None
else:

    class Number:
        """The type of a field that is declared with `hyperparameter`.

        It takes a `Hyperparameter`. For a type checker it is an array when it is read, as in the
        phases of a rule.
        """

        def __get__(self, instance: object, owner: object) -> Array: ...
        def __set__(self, instance: object, value: Hyperparameter) -> None: ...

    class OptionalNumber:
        """A `Number`, or `None`."""

        def __get__(self, instance: object, owner: object) -> Any: ...
        def __set__(self, instance: object, value: Hyperparameter | None) -> None: ...


_UNLISTED = "unlisted"
_MISSING = dataclasses.MISSING


# --- declarations ---------------------------------------------------------------------------


def checked_field(
    check: Callable[[str, Any], None], default: object = _MISSING, kind: str = "", **options: Any
) -> Any:
    """Declares a field with a check.

    **Arguments:**

    - `check`: a function of the full name of the field and its value, which raises an error. It is
        not called for `None` where that is the default.
    - `default`: the default value. The field is required if there is none.
    - `kind`: what is traced in the field. Without a kind the field is static by default.
    - `options`: further options of `eqx.field`.
    """
    if default is not _MISSING:
        options["default"] = default
    options.setdefault("static", not kind)
    return eqx.field(metadata={KIND: kind, CHECK: check}, **options)


def hyperparameter(
    default: object = _MISSING,
    *,
    within: str = "(-inf, inf)",
    optional: bool = False,
    kw_only: bool = False,
) -> Any:
    """Declares a real-valued field: a number, a 0-d array, or a schedule.

    Binding turns the number into a strongly typed 0-d array, so changing it never recompiles. A
    plain function of the step becomes a schedule.

    **Arguments:**

    - `default`: the default value. The field is required if there is none.
    - `within`: the interval of allowed values, such as `"[0, 1)"`. Numbers are checked when the
        transform is created. Traced values and schedules are not checked.
    - `optional`: whether `None` is allowed. It always is if it is the default.
    - `kw_only`: whether the field is a keyword-only argument.

    **Returns:** a field, for the body of a transform or schedule class.

    ```python
    >>> class ScaleByHalfLife(sl.AbstractTransform):
    ...     half_life: sl.fields.Number = sl.fields.hyperparameter(10.0, within="(0, inf)")
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
    return checked_field(
        check, default, HYPERPARAMETER, converter=_as_hyperparameter, kw_only=kw_only
    )


def steps(default: object = _MISSING, *, within: str = "[0, inf)") -> Any:
    """Declares a number of steps: an integer leaf of a schedule, traced like a hyperparameter."""
    check = functools.partial(_check_steps, _Interval(within))
    return checked_field(check, default, STEPS, converter=_as_steps)


def count_or_schedule(unit: str, default: object = _MISSING, *, listed: bool = True) -> Any:
    """Declares a traced number of steps of this unit: an int ≥ 1 or a schedule.

    `listed` says whether users read and replace it as a hyperparameter.
    """
    check = functools.partial(_check_count_or_schedule, unit)
    kind = STEPS if listed else _UNLISTED
    return checked_field(check, default, kind, converter=_as_count_or_schedule)


def count_field(default: object = _MISSING, *, least: int = 1, kw_only: bool = False) -> Any:
    """Declares a static whole number, such as a number of steps: a Python int.

    **Arguments:**

    - `default`: the default value. The field is required if there is none.
    - `least`: the smallest allowed value.
    - `kw_only`: whether the field is a keyword-only argument.

    **Returns:** a field, for the body of a transform class.
    """
    check = functools.partial(check_int, least=least)
    return checked_field(check, default, converter=_as_steps, kw_only=kw_only)


def choice_field(
    default: str | None, *others: str | None, required: bool = False, kw_only: bool = False
) -> Any:
    """Declares a static field that is one of several strings.

    **Arguments:**

    - `default`: the default value.
    - `others`: the other allowed values.
    - `required`: whether there is no default, and `default` is only the first allowed value.
    - `kw_only`: whether the field is a keyword-only argument.

    **Returns:** a field, for the body of a transform class.
    """
    check = functools.partial(_check_choice, (default, *others))
    return checked_field(check, _MISSING if required else default, kw_only=kw_only)


def layout_field() -> Any:
    """Declares the keyword `layout` of a rule, which takes the same values as `sl.where.matrix`.

    A rule with `over = "matrix"` then reads its leaves accordingly.

    **Returns:** a field, for the body of a transform class. Its default is `None`.
    """
    return checked_field(check_layout, None, converter=as_layout, kw_only=True)


def dtype_field(*, kw_only: bool = False) -> Any:
    """Declares an optional static dtype, kept as a `numpy.dtype` so that equal ones compare equal.

    **Arguments:**

    - `kw_only`: whether the field is a keyword-only argument.

    **Returns:** a field, for the body of a transform class. Its default is `None`.
    """
    return checked_field(_check_dtype, None, converter=_as_dtype, kw_only=kw_only)


# --- conversion and validation --------------------------------------------------------------


def _as_hyperparameter(value: object) -> object:
    # Anything else than a number, an array or a function is refused by the check, which knows the
    # name of the field.
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return nearest_float(value)
    if isinstance(value, jax.Array | np.ndarray):
        # An integer array could not be set to 0.1 later.
        whole = jnp.issubdtype(value.dtype, jnp.integer)
        return value.astype(canonical_float()) if whole else value
    return as_schedule(value) if is_function(value) else value


def _as_count_or_schedule(value: object) -> object:
    if is_function(value) and not is_array(value):
        return as_schedule(value)
    return int(value) if isinstance(value, np.integer) else value


def _as_dtype(dtype: Any) -> object:
    try:
        return None if dtype is None else np.dtype(dtype)
    except TypeError:
        return dtype  # refused by the check, which knows the name of the field


def _as_steps(value: object) -> object:
    if isinstance(value, np.integer) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value


class _Interval:
    """An interval as it is written: `"[0, 1)"`."""

    _FORM = re.compile(r"([\[(])\s*(\S+)\s*,\s*(\S+)\s*([\])])")

    def __init__(self, text: str):
        match = self._FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is not an interval such as '[0, 1)'.")
        self.text = text
        left, low, high, right = match.groups()
        self.low, self.high = float(low), float(high)
        self.above = operator.ge if left == "[" else operator.gt
        self.below = operator.le if right == "]" else operator.lt

    def check(self, name: str, value: float | int | Array | np.ndarray) -> None:
        # NaN is in no interval: it compares false.
        number = nearest_float(value)
        if not (self.above(number, self.low) and self.below(number, self.high)):
            raise ValueError(f"{name} must be in {self.text}, got {shortest(value)}.")


def _check_hyperparameter(
    within: _Interval, name: str, value: object, optional: bool = False
) -> None:
    if isinstance(value, AbstractSchedule) or (optional and value is None):
        return
    wanted = "a real number, a 0-d array or a schedule"
    if isinstance(value, AbstractStatefulSchedule):
        field = name.rpartition(".")[2]
        raise TypeError(
            f"{name} must be {wanted}, got {value!r}. A stateful schedule cannot be passed as a "
            f"hyperparameter. Pass a number and drive it: `tx.drive({{{field!r}: schedule}})`."
        )
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape != ():
            raise ValueError(
                f"{name} must be {wanted}, got an array of shape {value.shape}. To use "
                "different values for different parameters, use `.partition`. For several runs, "
                "use `eqx.filter_vmap`."
            )
        real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        if not real:
            raise TypeError(f"{name} must be {wanted}, got an array of dtype {value.dtype}.")
    elif not isinstance(value, float):
        several = " To use different values for different parameters, use `.partition`."
        raise TypeError(
            f"{name} must be {wanted}, got {value!r} of type {type(value).__name__}."
            f"{several * isinstance(value, Mapping)}"
        )
    if not isinstance(value, Tracer):
        within.check(name, value)


def _check_steps(within: _Interval, name: str, value: Any) -> None:
    if not _is_whole(value) or np.shape(value) != ():
        raise TypeError(f"{name} must be a whole number of steps, got {value!r}.")
    if not isinstance(value, Tracer):
        within.check(name, value)
        _check_range(name, value)


def _check_range(name: str, value: Any) -> None:
    if int(value) >= 2**31:
        raise ValueError(
            f"{name} must be less than 2**31, the range of the step count, got {value}."
        )


def _is_whole(value: object) -> bool:
    if isinstance(value, jax.Array | np.ndarray):
        return jnp.issubdtype(value.dtype, jnp.integer)
    return isinstance(value, int) and not isinstance(value, bool)


def check_dtype(name: str, dtype: object) -> None:
    """Raises an error for anything but a floating dtype or its name."""
    _check_dtype(name, _as_dtype(dtype))


def _check_dtype(name: str, dtype: object) -> None:
    if not isinstance(dtype, np.dtype) or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating dtype, got {code(dtype)}.")


def _check_count_or_schedule(unit: str, name: str, value: Any) -> None:
    if isinstance(value, AbstractSchedule):
        return
    if not _is_whole(value) or np.shape(value) != ():
        raise TypeError(
            f"{name} must be an int or a schedule, got {value!r} of type {type(value).__name__}."
        )
    if not isinstance(value, Tracer):
        if int(value) < 1:
            raise ValueError(f"{name} must be at least 1 {unit}, got {value}.")
        _check_range(name, value)


def _check_choice(choices: tuple[str | None, ...], name: str, value: object) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {series(map(repr, choices), 'or')}, got {value!r}.")


def check_number(name: str, value: object, within: str = "(-inf, inf)") -> Any:
    """A number inside another field, converted and checked. Schedules are refused."""
    value = _as_hyperparameter(value)
    if isinstance(value, AbstractSchedule):
        raise TypeError(f"{name} must be a number, got the schedule {value!r}.")
    _check_hyperparameter(_Interval(within), name, value)
    return value


def check_step(name: str, value: object, within: str = "[0, inf)") -> Any:
    """A number of steps inside another field, converted and checked."""
    value = _as_steps(value)
    _check_steps(_Interval(within), name, value)
    return value


def steps_in_order(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """Increasing numbers of steps inside another field, converted and checked."""
    anywhere = "(-inf, inf)"
    values = tuple(check_step(f"{name}[{i}]", v, anywhere) for i, v in enumerate(values))
    numbers = [int(value) for value in values if not isinstance(value, Tracer)]
    if any(b <= a for a, b in itertools.pairwise((-1, *numbers))):
        listed = ", ".join(map(shortest, values))
        raise ValueError(f"{name} must be non-negative and strictly increasing, got [{listed}].")
    return values
