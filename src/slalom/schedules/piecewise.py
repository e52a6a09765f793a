"""Schedules that scale a value at given steps."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._core.fields.declare import Number, check_number, check_step, hyperparameter
from .._core.fields.schedule import AbstractSchedule
from .._core.text.printing import AbstractPrinted, Entries
from ..tree.dtypes import as_canonical
from ..tree.types import Hyperparameter, Scalar, Step
from ._common import as_step, check_curve, interpolate_points


class BoundariesAndScales(AbstractPrinted):
    """A dict from steps to factors. Its steps are leaves; as dict keys they would be static."""

    boundaries: tuple[Any, ...]
    scales: tuple[Any, ...]

    def items(self) -> tuple[tuple[Any, Any], ...]:
        return tuple(zip(self.boundaries, self.scales, strict=True))

    def _code(self) -> Entries:
        return Entries(self.items())


def _converted(
    given: Mapping[int, Hyperparameter] | BoundariesAndScales | None,
) -> BoundariesAndScales:
    if isinstance(given, BoundariesAndScales):
        return given
    name = "boundaries_and_scales"
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict from steps to factors, got {given!r}.")
    given = {} if given is None else given
    whole = {check_step(f"each step of {name}", step): step for step in given}
    boundaries = tuple(sorted(whole))
    return BoundariesAndScales(
        boundaries,
        tuple(check_number(f"{name}[{b}]", given[whole[b]], "[0, inf)") for b in boundaries),
    )


class piecewise_constant(AbstractSchedule):
    """A piecewise constant value that is multiplied by a factor at each boundary.

        s(n) = init_value · Π {scale of b : b ≤ n}

    **Arguments:**

    - `init_value`: the value before the first boundary.
    - `boundaries_and_scales`: a dict from steps, ≥ 0, to factors, ≥ 0, in any order. Defaults to
        no boundary.

    ```python
    >>> sl.schedules.piecewise_constant(1.0, {2: 0.5, 3: 0.1}).values(5)
    Array([1.  , 1.  , 0.5 , 0.05, 0.05], dtype=float32)

    ```
    """

    init_value: Number = hyperparameter()
    boundaries_and_scales: BoundariesAndScales = eqx.field(default=None, converter=_converted)

    def __call__(self, step: Step) -> Scalar:
        step, value = as_step(step), as_canonical(self.init_value)
        for boundary, scale in self.boundaries_and_scales.items():
            value = jnp.where(step < as_step(boundary), value, value * as_canonical(scale))
        return value


class piecewise_interpolate(AbstractSchedule):
    """Interpolates between values, each of which is the previous one times a factor.

    At a boundary the value is `init_value` times the factors of all boundaries so far. In
    between, and from step 0 to the first boundary, it is interpolated.

    **Arguments:**

    - `interpolate_type`: `"linear"`, or `"cosine"` for half a cosine wave.
    - `init_value`: the value at step 0.
    - `boundaries_and_scales`: a dict from steps, ≥ 0, to factors, ≥ 0, in any order. Defaults to
        no boundary.

    ```python
    >>> sl.schedules.piecewise_interpolate("linear", 1.0, {2: 0.5, 4: 0.0}).values(6)
    Array([1.  , 0.75, 0.5 , 0.25, 0.  , 0.  ], dtype=float32)

    ```
    """

    interpolate_type: str = eqx.field(static=True)
    init_value: Number = hyperparameter()
    boundaries_and_scales: BoundariesAndScales = eqx.field(default=None, converter=_converted)

    def __check_init__(self):
        name = "piecewise_interpolate.interpolate_type"
        check_curve(name, self.interpolate_type, "linear", "cosine")

    def __call__(self, step: Step) -> Scalar:
        value = as_canonical(self.init_value)
        points: list[tuple[Any, Any]] = [(0, value)]
        for boundary, scale in self.boundaries_and_scales.items():
            value = value * as_canonical(scale)
            points.append((boundary, value))
        return interpolate_points(points, step, self.interpolate_type)
