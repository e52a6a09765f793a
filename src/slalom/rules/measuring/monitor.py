"""Links that measure the updates that pass through them, for `opt.metrics`."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ... import fields, tree
from ..._core.protocol.parts import Part
from ..._core.protocol.writer import RETURN
from ..._core.text.printing import Call, constructor_call
from ...tree.paths import leaf_paths
from ...tree.types import Params, Updates, is_function
from .._base import AbstractTransform, Context


class _AbstractMonitor(AbstractTransform):
    """A link that passes updates through unchanged."""

    keeps_zeros: ClassVar[bool] = True


class Snapshot(_AbstractMonitor):
    """Measures the updates at this place in a chain; `opt.metrics` has the last measurement.

    ```python
    >>> watch = sl.Snapshot("norm_before", sl.tree.global_norm)
    >>> tx = watch | sl.ClipByGlobalNorm(1.0) | sl.sgd(0.1)
    >>> model = {"w": jnp.zeros(2)}
    >>> opt = sl.Optimizer(tx, model)
    >>> model, opt = opt.step(model, {"w": jnp.array([3.0, 4.0])})
    >>> opt.metrics["norm_before"]
    Array(5., dtype=float32)

    ```

    **Arguments:**

    - `measure_name`: the measurement's name in `opt.metrics`.
    - `measure`: a function of the updates that returns an array, or a tree of arrays, whose paths
        `opt.metrics` then contains. The measurement is 0 before the first step.
    """

    measure_name: str = eqx.field(static=True)
    measure: Callable[[Updates], Any] = eqx.field(static=True)

    def __check_init__(self):
        _check_measure("Snapshot", self.measure)

    def init(self, params: Params) -> PyTree:
        return _empty(self.measure, params, lambda leaf_dtype: leaf_dtype)

    def update(
        self,
        updates: Updates,
        state: PyTree,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, PyTree]:
        return updates, _measured(self.measure, updates, state)

    def metrics(self, state: PyTree) -> dict[str, Array]:
        return by_name(self.measure_name, state)


class MeasureWithEmaState(eqx.Module):
    """The state of `MeasureWithEma`."""

    age: Int[Array, ""]
    """The number of measurements."""
    ema: PyTree
    """Their mean."""


class MeasureWithEma(_AbstractMonitor):
    """Measures the updates; `opt.metrics` has an exponential moving average of the measurements.

        mₜ = mₜ₋₁ + wₜ·(measure(gₜ) − mₜ₋₁),   m₀ = 0

    with wₜ = (1 − d) / (1 − dᵗ), or wₜ = 1 − d with `debias=False`. A measurement that is not
    finite is left out. Use it as a link of a chain or as a measure of a `Monitor`.

    **Arguments:**

    - `measure`: a function of the updates that returns an array or a tree of arrays; bools count
        as 0 and 1.
    - `decay`: d, in [0, 1).
    - `debias`: whether to correct the bias towards the start at 0.
    - `accumulator_dtype`: the floating dtype in which m is stored; complex measurements use its
        complex counterpart. Defaults to the dtype of the measurement, but at least float32.
    """

    measure: Callable[[Updates], Any] = eqx.field(static=True)
    decay: fields.Number = fields.hyperparameter(within="[0, 1)")
    debias: bool = eqx.field(default=True, static=True)
    accumulator_dtype: np.dtype | None = fields.dtype_field()

    def __check_init__(self):
        _check_measure("MeasureWithEma", self.measure)

    def init(self, params: Params) -> MeasureWithEmaState:
        def dtype(d: np.dtype) -> np.dtype:
            if self.accumulator_dtype is not None:
                return tree.storage_dtype(d, self.accumulator_dtype)
            return tree.accumulation_dtype(d if jnp.issubdtype(d, jnp.inexact) else jnp.float32)

        return MeasureWithEmaState(tree.fresh_count(), _empty(self.measure, params, dtype))

    def update(
        self,
        updates: Updates,
        state: MeasureWithEmaState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, MeasureWithEmaState]:
        now = self.at(context)
        age = tree.increment(state.age)
        now.weight = tree.newest_weight(now.decay, age) if self.debias else 1 - now.decay
        new = _measured(self.measure, updates, state.ema)

        def rule(now, mean, new):
            return tree.moved(mean, new, now.weight)

        ema = tree.cast_like(tree.map_leaves(rule, (state.ema, new), now), state.ema)
        measured = MeasureWithEmaState(age, ema)
        good = tree.all_finite(new)
        return updates, jax.tree.map(lambda new, old: jnp.where(good, new, old), measured, state)

    def metrics(self, state: MeasureWithEmaState) -> dict[str, Array]:
        return by_name("", state.ema)


class Monitor(_AbstractMonitor):
    """Takes several measurements of the updates; `opt.metrics` has them by name.

    ```python
    >>> def too_long(updates):
    ...     return sl.tree.global_norm(updates) > 1.0
    >>> watch = sl.Monitor(
    ...     {"norm": sl.tree.global_norm, "clipped": sl.MeasureWithEma(too_long, decay=0.9)}
    ... )
    >>> tx = watch | sl.ClipByGlobalNorm(1.0) | sl.sgd(0.1)

    ```

    **Arguments:**

    - `measures`: a mapping from names to functions of the updates, as for `Snapshot`, or to
        `MeasureWithEma` transforms.
    """

    names: tuple[str, ...] = eqx.field(static=True)
    measures: tuple[_AbstractMonitor, ...]

    def __init__(self, measures: Mapping[str, Callable[[Updates], Any] | MeasureWithEma]):
        self.names = tuple(measures)
        self.measures = tuple(
            m if isinstance(m, MeasureWithEma) else Snapshot("", m) for m in measures.values()
        )

    def init(self, params: Params) -> tuple[Any, ...]:
        return tuple(measure.init(params) for measure in self.measures)

    def update(
        self,
        updates: Updates,
        state: tuple[Any, ...],
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, tuple[Any, ...]]:
        new = []
        for part in self.children(Part.root(self, state, context, params)):
            new.append(part.run(RETURN, updates)[1])
        return updates, tuple(new)

    def children(self, here: Part) -> tuple[Part, ...]:
        states = (None,) * len(self.names) if here.state is None else here.state
        return tuple(
            here.child((name,), measure, lambda outer, i=i: outer.measures[i], s)
            for i, (name, measure, s) in enumerate(
                zip(self.names, self.measures, states, strict=True)
            )
        )

    def _code(self) -> Call:
        measures = (m.measure if isinstance(m, Snapshot) else m for m in self.measures)
        return constructor_call(self, measures=dict(zip(self.names, measures, strict=True)))


def _check_measure(who: str, measure: object) -> None:
    if not is_function(measure):
        raise TypeError(
            f"{who}.measure must be a function of the updates, such as `sl.tree.global_norm`, got "
            f"{measure!r} of type {type(measure).__name__}."
        )


def _empty(measure: Callable[[Updates], Any], params: Params, dtype: Callable[..., Any]) -> PyTree:
    """Zeros like the measurement of updates of these parameters."""
    tree.check_inexact(params)

    def measured(params: Params) -> PyTree:
        # Between links updates flow in the accumulation dtype.
        wide = jax.tree.map(lambda p: jnp.asarray(p, tree.accumulation_dtype(p.dtype)), params)
        measurement = jax.tree.map(jnp.asarray, measure(wide))
        return jax.tree.map(lambda x: jnp.asarray(x, dtype(x.dtype)), measurement)

    return tree.zeros_of(jax.eval_shape(measured, params), params)


def _measured(measure: Callable[[Updates], Any], updates: Updates, like: PyTree) -> PyTree:
    """A measurement in the dtypes of the state."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), measure(updates), like)


def by_name(name: str, measurement: PyTree) -> dict[str, Array]:
    """The leaves of a measurement by name."""
    leaves = zip(leaf_paths(measurement), jax.tree.leaves(measurement), strict=True)
    return {".".join(filter(None, (name, path))): leaf for path, leaf in leaves}
