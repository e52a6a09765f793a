"""The best model so far, and when to stop."""

import math
from typing import Any, Generic, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ... import tree
from ..._core.text.messages import check_bool, check_int
from ..._core.text.printing import AbstractPrinted, Call
from ...tree.dtypes import nearest_float
from ...tree.packed import Packed, pack, unpack
from ...tree.paths import first_difference, leaf_paths
from ...tree.sharding import to_device
from ...tree.types import Scalar, Tracer
from ..binding.model import Model, strong
from ..programs.program import Program


class _UpdateInputs(NamedTuple):
    """The inputs of an update's program."""

    best: tuple[list[Any], Any, Any]
    """The arrays of the best model, its value and the number of stale updates."""
    min_delta: float
    minimize: bool
    new: list[Any]
    value: Any


class KeepBest(AbstractPrinted, Generic[Model]):
    """Keeps the best model of a run, and says when to stop.

    ```python
    >>> model = {"w": jnp.zeros(2)}
    >>> best = sl.KeepBest(model, patience=2)
    >>> for w, loss in [(1.0, 0.5), (2.0, 0.3), (3.0, 0.4), (4.0, jnp.nan)]:
    ...     model = {"w": jnp.full(2, w)}
    ...     best = best.update(model, loss)
    >>> best.model
    {'w': Array([2., 2.], dtype=float32)}
    >>> best
    KeepBest(patience=2, value=0.3, stale=2, stop=True)

    ```

    A value is better if it is finite and

        value < best − min_delta,   or with `minimize=False`   value > best + min_delta

    All other values, NaN among them, count as stale. Until the first finite value, the best model
    is the one that was passed first.

    A training step returns the loss of the model that went *in*. After
    `new, opt, loss = step(model, opt, batch)` write `best = best.update(model, loss)`, or compute a
    validation loss of `new`.

    All leaves are arrays, and everything else, such as activation functions, is static. So a
    `jax.lax.scan` can carry it, `jax.jit` takes and returns it, and under `vmap` each run keeps its
    own best model. Arrays keep their shardings. The model is copied, so steps with `donate="all"`
    are safe.

    **Arguments:**

    - `model`: the model to start from: any tree, such as `(model, state)`.
    - `patience`: after how many stale values in a row `stop` is true, an int ≥ 1. Defaults to
        never.
    - `min_delta`: how much a value must improve to count, a float ≥ 0.
    - `minimize`: whether lower values are better.
    """

    arrays: Packed
    """The arrays of the best model. Everything else is its structure."""
    value: Scalar
    """The best value. Infinite before the first finite one."""
    stale: Int[Array, "*runs"]
    """The number of updates since the best value."""
    patience: int | None = eqx.field(static=True)
    min_delta: float = eqx.field(static=True)
    minimize: bool = eqx.field(static=True)

    def __init__(
        self,
        model: Model,
        patience: int | None = None,
        *,
        min_delta: float | int = 0.0,
        minimize: bool = True,
    ):
        if patience is not None:
            check_int("KeepBest.patience", patience, 1, " or None")
        if not isinstance(min_delta, int | float) or isinstance(min_delta, bool):
            raise TypeError(f"KeepBest.min_delta must be a number, got {min_delta!r}.")
        least = nearest_float(min_delta)
        if not 0 <= least < math.inf:
            raise ValueError(f"KeepBest.min_delta must be in [0, inf), got {least}.")
        check_bool("KeepBest.minimize", minimize)
        self.patience, self.min_delta, self.minimize = patience, least, minimize
        self.arrays = jax.tree.map(lambda x: jnp.copy(strong(x)), pack(model))
        self.value = jnp.array(math.inf if minimize else -math.inf, tree.canonical_float())
        self.stale = tree.fresh_count()

    @property
    def model(self) -> Model:
        """The best model so far. Its arrays are copies, which a later step may donate."""
        return unpack(jax.tree.map(jnp.copy, self.arrays))

    @property
    def stop(self) -> Bool[Array, "*runs"]:
        """Whether the last `patience` values were all stale."""
        if self.patience is None:
            return jnp.zeros(self.stale.shape, bool)
        return self.stale >= self.patience

    def update(self, model: Model, value: Any) -> "KeepBest[Model]":
        """Compares a model with the best one so far.

        **Arguments:**

        - `model`: a model with the structure, shapes and dtypes of the first one.
        - `value`: its loss or another measure, a real scalar.

        **Returns:** a new `KeepBest`. This one stays valid.

        **Raises:** `ValueError` or `TypeError` for another model, or for a value that is not a real
        scalar.
        """
        value = _checked_value(value)
        new = self._checked_arrays(model)
        # Without the rest of the model, which the program would keep.
        best = self.arrays.arrays, self.value, self.stale
        inputs = _UpdateInputs(best, self.min_delta, self.minimize, new, value)
        arrays, *rest = _program(inputs)[0].best
        replaced = (Packed(arrays, self.arrays.rest), *rest)
        return eqx.tree_at(lambda x: (x.arrays, x.value, x.stale), self, replaced)

    def _checked_arrays(self, model: Any) -> list[Any]:
        """The arrays of a model. Raises an error if it is not like the first one."""
        who = "KeepBest.update takes a model like the one that it was created with"
        packed = pack(model)
        if packed.rest[0] != self.arrays.rest[0]:
            names = ("this model", "the first one")
            raise ValueError(f"{who}: {first_difference(model, unpack(self.arrays), names)}.")
        leaves = map(jax.tree.leaves, (model, unpack(self.arrays)))
        for path, x, y in zip(leaf_paths(model), *leaves, strict=True):
            if tree.is_array(x) and tree.is_array(y):
                # The dtypes of keys have no canonical form.
                dtype = x.dtype if isinstance(x, jax.Array) else tree.canonical(x.dtype)
                if np.shape(x) != np.shape(y) or dtype != y.dtype:
                    raise ValueError(f"{who}, but '{path}' was {_kind(y)} and is now {_kind(x)}.")
            elif type(x) is not type(y) or (x is not y and x != y):
                was, now = ("an array" if tree.is_array(z) else repr(z) for z in (y, x))
                raise ValueError(
                    f"{who}, but '{path}' was {was} and is now {now}. Pass the model as it was, "
                    "for example before `eqx.nn.inference_mode`."
                )
        return packed.arrays

    def _code(self) -> Call:
        defaults = {"patience": None, "min_delta": 0.0, "minimize": True}
        options = {n: getattr(self, n) for n, x in defaults.items() if getattr(self, n) != x}
        state: dict[str, Any] = {"value": self.value, "stale": self.stale}
        if self.patience is not None and not isinstance(self.stale, Tracer):
            state["stop"] = self.stop if self.stop.ndim else bool(self.stop)
        return Call("KeepBest", (), options | state)


def _update(inputs: _UpdateInputs) -> tuple[list[Any], None]:
    old, best, stale = inputs.best
    value = jnp.asarray(inputs.value, best.dtype)
    margin = jnp.asarray(inputs.min_delta, value.dtype)
    lower = value < best - margin if inputs.minimize else value > best + margin
    is_better = jnp.isfinite(value) & lower
    pairs = zip(inputs.new, old, strict=True)
    new = [x.astype(y.dtype) if x.dtype != y.dtype else x for x, y in pairs]
    # A conditional leaves the model alone where a selection would read and write all of it.
    arrays = jax.lax.cond(is_better, lambda new, _: new, lambda _, old: old, to_device(new), old)
    stale = jnp.where(is_better, 0, tree.increment(stale))
    return [*arrays, jnp.where(is_better, value, best), stale], None


_program = Program(_update, lambda inputs, at: dict.fromkeys(jax.tree.leaves(at.best)))


def _kind(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, np.shape(x)))}]"


def _checked_value(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not tree.is_array(value):
        raise TypeError(
            "KeepBest.update takes a model and its loss, a real scalar, got a "
            f"{type(value).__name__} in place of the loss."
        )
    value = jnp.asarray(value, tree.canonical_float()) if is_number else value
    real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if np.shape(value) != () or not real:
        raise ValueError(
            f"KeepBest.update takes the loss as a real scalar, got {_kind(value)}. Average it, for "
            "example with `jnp.mean`. For several runs at once, call it under `jax.vmap`."
        )
    return value
