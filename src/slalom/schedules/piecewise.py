"""Values that are scaled at given steps."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .._core.fields import Hyperparameter, check_number, check_step, hyperparameter
from .._core.printing import AbstractPrinted, Entries
from .._core.schedule import AbstractSchedule
from .._types import Scalar, Step
from ..tree.dtypes import as_canonical
from ._common import check_shape, through, ticks


class Jumps(AbstractPrinted):
    """A dict from steps to factors whose steps are leaves too: as keys they would be structure."""

    boundaries: tuple[Any, ...]
    scales: tuple[Any, ...]

    def _code(self) -> Entries:
        return Entries(tuple(zip(self.boundaries, self.scales, strict=True)))


def _as_jumps(given: Mapping[int, Hyperparameter] | Jumps | None) -> Jumps:
    if isinstance(given, Jumps):
        return given
    name = "boundaries_and_scales"
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict from steps to factors, got {given!r}.")
    given = {} if given is None else given
    whole = {check_step(f"each step of {name}", step): step for step in given}
    boundaries = tuple(sorted(whole))
    return Jumps(
        boundaries,
        tuple(check_number(f"{name}[{b}]", given[whole[b]], "[0, inf)") for b in boundaries),
    )


class piecewise_constant(AbstractSchedule):
    """A value that is multiplied by a factor at each of some steps.

        s(n) = init_value · Π {scale of b : b ≤ n}

    **Arguments:**

    - `init_value`: the value before the first boundary.
    - `boundaries_and_scales`: a dict from steps, ≥ 0, to factors, ≥ 0, in any order.

    ```python
    >>> sl.schedules.piecewise_constant(1.0, {2: 0.5, 3: 0.1}).values(5)
    Array([1.  , 1.  , 0.5 , 0.05, 0.05], dtype=float32)

    ```
    """

    init_value: Hyperparameter = hyperparameter()
    boundaries_and_scales: Jumps = eqx.field(default=None, converter=_as_jumps)

    def __call__(self, step: Step) -> Scalar:
        step, value = ticks(step), as_canonical(self.init_value)
        jumps = self.boundaries_and_scales
        for boundary, scale in zip(jumps.boundaries, jumps.scales, strict=True):
            value = jnp.where(step < ticks(boundary), value, value * as_canonical(scale))
        return value


class piecewise_interpolate(AbstractSchedule):
    """From one value to the next, each the one before times a factor.

    At a boundary the value is `init_value` times all factors up to there; between boundaries, and
    from step 0 to the first, it goes straight or along half a cosine wave.

    **Arguments:**

    - `interpolate_type`: `"linear"` or `"cosine"`.
    - `init_value`: the value at step 0.
    - `boundaries_and_scales`: a dict from steps, ≥ 0, to factors, ≥ 0, in any order.

    ```python
    >>> sl.schedules.piecewise_interpolate("linear", 1.0, {2: 0.5, 4: 0.0}).values(6)
    Array([1.  , 0.75, 0.5 , 0.25, 0.  , 0.  ], dtype=float32)

    ```
    """

    interpolate_type: str = eqx.field(static=True)
    init_value: Hyperparameter = hyperparameter()
    boundaries_and_scales: Jumps = eqx.field(default=None, converter=_as_jumps)

    def __check_init__(self):
        name = "piecewise_interpolate.interpolate_type"
        check_shape(name, self.interpolate_type, "linear", "cosine")

    def __call__(self, step: Step) -> Scalar:
        value = as_canonical(self.init_value)
        points: list[tuple[Any, Any]] = [(0, value)]
        jumps = self.boundaries_and_scales
        for boundary, scale in zip(jumps.boundaries, jumps.scales, strict=True):
            value = value * as_canonical(scale)
            points.append((boundary, value))
        return through(points, step, self.interpolate_type)
