"""Links that watch updates: measurements for `opt.metrics`, and a check for finite numbers."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from ... import fields, tree
from ..._core.fields.declare import checked_field
from ..._core.protocol.parts import Part
from ..._core.protocol.writer import RETURN
from ..._core.text.calls import call
from ..._core.text.messages import listed
from ..._core.text.printing import Call, code, constructor_call
from ...tree.paths import leaf_paths
from ...tree.types import Params, Updates, is_function
from .._base import AbstractTransform


def _check_measure(name: str, measure: object) -> None:
    if not is_function(measure):
        raise TypeError(
            f"{name} must be a function of the updates, such as `sl.tree.global_norm`, got "
            f"{measure!r} of type {type(measure).__name__}."
        )


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r} of type {type(value).__name__}.")


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
    measure: Callable[[Updates], Any] = checked_field(_check_measure)

    def __check_init__(self):
        _check_name("Snapshot.measure_name", self.measure_name)

    def init(self, params: Params) -> PyTree:
        return _empty(self.measure, params, lambda leaf_dtype: leaf_dtype)

    def update(self, updates, state, params=None, context=None):
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

    measure: Callable[[Updates], Any] = checked_field(_check_measure)
    decay: fields.Number = fields.hyperparameter(within="[0, 1)")
    debias: bool = eqx.field(default=True, static=True)
    accumulator_dtype: np.dtype | None = fields.dtype_field()

    def init(self, params: Params) -> MeasureWithEmaState:
        def dtype(d: np.dtype) -> np.dtype:
            if self.accumulator_dtype is not None:
                return tree.storage_dtype(d, self.accumulator_dtype)
            return tree.accumulation_dtype(d if jnp.issubdtype(d, jnp.inexact) else jnp.float32)

        return MeasureWithEmaState(tree.fresh_count(), _empty(self.measure, params, dtype))

    def update(self, updates, state, params=None, context=None):
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
        if not isinstance(measures, Mapping):
            raise TypeError(
                "Monitor takes a mapping from names to measures, such as "
                f"`{{'norm': sl.tree.global_norm}}`, got {measures!r}."
            )
        for name in measures:
            _check_name("The name of a measure", name)
        self.names = tuple(measures)
        self.measures = tuple(
            m if isinstance(m, MeasureWithEma) else Snapshot("", m) for m in measures.values()
        )

    def init(self, params: Params) -> tuple[Any, ...]:
        return tuple(measure.init(params) for measure in self.measures)

    def update(self, updates, state, params=None, context=None):
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


def _empty(measure: Callable[[Updates], Any], params: Params, dtype: Callable[..., Any]) -> PyTree:
    """Zeros like the measurement of updates of these parameters."""
    tree.check_inexact(params)

    def measured(params: Params) -> PyTree:
        # Between links updates flow in the accumulation dtype.
        wide = jax.tree.map(lambda p: jnp.asarray(p, tree.accumulation_dtype(p.dtype)), params)
        measurement = jax.tree.map(jnp.asarray, _called(measure, wide))
        return jax.tree.map(lambda x: jnp.asarray(x, dtype(x.dtype)), measurement)

    return tree.zeros_of(jax.eval_shape(measured, params), params)


def _measured(measure: Callable[[Updates], Any], updates: Updates, like: PyTree) -> PyTree:
    """A measurement in the dtypes of the state."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), _called(measure, updates), like)


def _called(measure: Callable[[Updates], Any], updates: Updates) -> PyTree:
    """A measurement. Raises an error for anything but a tree of arrays and numbers."""
    measurement = call("A measure", measure, updates=updates)
    if measurement is None:
        raise TypeError(
            f"The measure {code(measure)} returned None. Does the function end with `return`?"
        )
    for x in jax.tree.leaves(measurement):
        if not tree.is_array(x) and not isinstance(x, bool | int | float | complex):
            raise TypeError(
                f"The measure {code(measure)} must return an array or a tree of arrays, got {x!r} "
                f"of type {type(x).__name__}."
            )
    return measurement


def by_name(name: str, measurement: PyTree) -> dict[str, Array]:
    """The leaves of a measurement by name."""
    leaves = zip(leaf_paths(measurement), jax.tree.leaves(measurement), strict=True)
    return {".".join(filter(None, (name, path))): leaf for path, leaf in leaves}


class CheckFiniteState(eqx.Module):
    """The state of `CheckFinite`."""

    count: Int[Array, "*runs"]
    """The number of steps."""
    first: Int[Array, "*runs"]
    """The first step with values that are not finite, or −1."""
    loss: Bool[Array, "*runs"]
    """Whether the loss was finite in that step."""
    grads: Bool[Array, "*runs leaves"]
    """Whether each gradient was."""
    params: Bool[Array, "*runs leaves"]
    """Whether each parameter was finite before that step."""
    paths: tuple[str, ...] = eqx.field(static=True)
    """The paths of the parameters."""


class CheckFinite(AbstractTransform[CheckFiniteState]):
    """Raises an error that names the first values of a run that are not finite.

    It passes the updates through. In the step after a NaN or an infinity in the loss, a gradient
    or a parameter, `opt.step` or the training step raises a `FloatingPointError` that names the
    step, which of the three it was, and the parameters. Put it first in a chain:
    `sl.CheckFinite() | tx`.

    The check reads every gradient and every parameter once. Each step waits for the previous one,
    so it is for debugging. Inside an outer `jit` or `scan` the error is raised afterwards, by the
    next step outside. The loss is checked if it is passed, as `sl.train_step` does.

    ```python
    >>> model = {"w": jnp.zeros(2)}
    >>> opt = sl.Optimizer(sl.CheckFinite() | sl.sgd(0.1), model)
    >>> model, opt = opt.step(model, {"w": jnp.array([1.0, jnp.nan])})
    >>> opt.step(model, {"w": jnp.ones(2)})
    Traceback (most recent call last):
        ...
    FloatingPointError: In step 0 the gradient was not finite at 'w'. ...

    ```
    """

    keeps_zeros: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("params",)

    def init(self, params: Params) -> CheckFiniteState:
        paths = tuple(leaf_paths(params))
        return CheckFiniteState(
            count=tree.fresh_count(),
            first=jnp.array(-1, jnp.int32),
            loss=jnp.array(True),
            grads=jnp.ones(len(paths), bool),
            params=jnp.ones(len(paths), bool),
            paths=paths,
        )

    def update(self, updates, state, params=None, context=None):
        params = self.demand("params", params)
        value = None if context is None else context.value
        loss = jnp.array(True) if value is None else jnp.isfinite(value)
        grads, before = _finite(updates), _finite(params)
        is_first = (state.first < 0) & ~(loss & jnp.all(grads) & jnp.all(before))

        def kept(new: Array, old: Array) -> Array:
            return jnp.where(is_first, new, old)

        return updates, CheckFiniteState(
            count=tree.increment(state.count),
            first=kept(state.count, state.first),
            loss=kept(loss, state.loss),
            grads=kept(grads, state.grads),
            params=kept(before, state.params),
            paths=state.paths,
        )

    def guard(self, name: str, state: CheckFiniteState) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  # a method is such a function
        first, loss, grads, params = jax.device_get(
            (state.first, state.loss, state.grads, state.params)
        )
        if np.max(first, initial=-1) < 0:
            return
        step = int(np.min(first[first >= 0]))
        bad_grads, bad_params = _bad(grads, state.paths), _bad(params, state.paths)
        faults = [f"the parameters were not finite at {bad_params}"] if bad_params else []
        faults += ["the loss was not finite"] if not np.all(loss) else []
        faults += [f"the gradient was not finite at {bad_grads}"] if bad_grads else []
        if bad_params:
            why = (
                "The update of the previous step caused this: look at the learning rate and the "
                "transforms."
            )
        elif not np.all(loss):
            why = "The parameters were finite, so look at the loss and at this batch."
        else:
            why = (
                "Look for a derivative that is infinite, such as that of `jnp.sqrt` or "
                "`jnp.linalg.norm` at 0, or that overflows."
            )
        raise FloatingPointError(f"In step {step} {', '.join(faults)}. {why}")


def _finite(arrays: PyTree) -> Bool[Array, " leaves"]:
    """Whether all numbers of each array are finite."""
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(arrays)]
    return jnp.stack(leaves) if leaves else jnp.ones(0, bool)


def _bad(finite: np.ndarray, paths: tuple[str, ...]) -> str:
    """The names of the arrays that are not finite, in any of several runs."""
    per_leaf = np.all(finite.reshape(-1, len(paths)), axis=0)
    names = [f"'{path}'" for path, ok in zip(paths, per_leaf, strict=True) if not ok]
    return listed(names, 3)
