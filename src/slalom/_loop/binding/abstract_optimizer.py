"""The properties and reports of an optimizer."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..._core.fields.hyperparams import Readings, read
from ..._core.protocol.bases import AbstractParameterWriter
from ..._core.protocol.context import Context
from ..._core.protocol.loss import loss_of
from ..._core.protocol.parts import find, parts
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.calls import advise_positions
from ..._core.text.printing import AbstractPrinted, Call
from ...tree.packed import holds_arrays, unpack
from ...tree.sharding import to_device, to_memory_of
from ...tree.types import PyTree, Tracer
from ..programs.compiled import StepInputs, compiled_evaluation, reading
from ..reports.describe import Description, as_html, describe, metrics, summary
from ..reports.plots import plot_schedules
from .binding import Arrays, Binding
from .loop_warnings import note_scale_is_read
from .model import Model, Split, check_bound, split
from .stepping import check_arrays, check_readable, sampled_params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Not `Self`, which beartype does not find in a method that jaxtyping wraps.
_Self = TypeVar("_Self", bound="AbstractOptimizer")


class AbstractOptimizer(AbstractPrinted):
    """The fields of an `Optimizer`, and everything that reads them."""

    arrays: Arrays
    binding: Binding = eqx.field(static=True)

    @classmethod
    def _from_fields(cls: type[_Self], arrays: Arrays, binding: Binding) -> _Self:
        # As JAX unflattens it: `__init__` binds a transform to a model.
        self = object.__new__(cls)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "binding", binding)
        return self

    def _with_arrays(self: _Self, arrays: Arrays) -> _Self:
        return self._from_fields(arrays, self.binding)

    @property
    def transform(self) -> AbstractTransform[Any]:
        """The transform, with its hyperparameters as arrays."""
        return unpack(self.arrays.transform)

    @property
    def state(self) -> Any:
        """The state of the transform."""
        return unpack(self.arrays.state)

    @property
    def count(self) -> Int[Array, "*runs"]:
        """The number of calls of `step` or `update` so far: the outermost clock."""
        check_readable(self)
        return self.arrays.count

    def state_of(self, which: str | type[AbstractTransform[Any]]) -> Any:
        """The state of one part of the transform.

        **Arguments:**

        - `which`: its path, such as `"scale_by_adam"` or `"partition.disc.scale_by_adam"`, any
            unambiguous suffix of it, or its class.

        **Returns:** its state.

        **Raises:** `KeyError` for an unknown or ambiguous path, with the candidates; `ValueError`
        for an optimizer that was donated.
        """
        check_readable(self)
        note_scale_is_read(self.binding)
        return find(self.transform, which, self.state).state

    @property
    @reading
    def has_updated(self) -> Bool[Array, "*runs"]:
        """Whether the last step updated any parameter. False before the first step."""
        return jnp.logical_and(self.transform.has_updated(self.state), self.arrays.count > 0)

    @property
    def loss_scale(self) -> Float[Array, "*runs"]:
        """The factor to multiply the loss of the next step by, before it is differentiated.

        This is the scale of `.scale_loss()`, and 1 for all other optimizers. `sl.train_step`
        multiplies the loss itself.
        """
        note_scale_is_read(self.binding)
        return _loss_scale(self)

    # --- the next step and the last one -----------------------------------------------------

    @property
    @reading
    def hyperparams(self) -> Readings:
        """The value that the *next* step uses for each hyperparameter, by path.

        Schedules are evaluated at the step count of the transform that they belong to. Any
        unambiguous suffix of a path works as a key: `opt.hyperparams["learning_rate"]`.
        `.to_dict()` returns all of them as Python numbers. For an optimizer created under `vmap`,
        each value is an array with one entry per run.
        """
        return read(self.transform, self.state, Context(step=self.arrays.count))

    @property
    def metrics(self) -> Readings:
        """The metrics of the last step: scalars by path, such as `if_finite.notfinite_count`.

        Any unambiguous path suffix works as a key. `.to_dict()` returns all of them as Python
        numbers.
        """
        note_scale_is_read(self.binding)
        return Readings(_metrics(self), "metrics", _record_advice)

    # --- parameters -------------------------------------------------------------------------

    @advise_positions("The optimizer does not hold the model: write `opt.eval_params(model)`.")
    def eval_params(self, model: Model, *, full_precision: bool = False) -> Model:
        """Returns the model to evaluate.

        This is the slow weights under `.lookahead` and `.outer`, the averaged weights under
        `.average` and `.schedule_free`, and the model itself for all other transforms.

        **Arguments:**

        - `model`: the bound model, as the last step returned it.
        - `full_precision`: whether to return each parameter in the precision in which the
            optimizer keeps it: float32 under `.average` and `.lookahead`, and under the
            policies of `.write` that keep more than a half-precision parameter can hold.

        **Returns:** the model, every leaf in its own dtype unless `full_precision`.
        """
        check_arrays(self)
        self._split(model)
        if not any(isinstance(p.module, AbstractParameterWriter) for p in parts(self.transform)):
            return model
        inputs = StepInputs(None, {"full_precision": full_precision}, model, self)
        return compiled_evaluation(inputs)[0].model

    def sample_params(self, model: Model, key: Any = None) -> Model:
        """Returns the model with parameters that are drawn from the posterior of `sl.contrib.ivon`.

        ```python
        >>> model = {"w": jnp.zeros(2)}
        >>> opt = sl.Optimizer(sl.contrib.ivon(0.1, ess=100), model)
        >>> opt.sample_params(model, jax.random.key(0))["w"].shape
        (2,)

        ```

        **Arguments:**

        - `model`: the bound model, as the last step returned it.
        - `key`: a PRNG key. Defaults to the key of the next step, whose gradient must be taken at
            the model that this returns. `sl.train_step` does so itself; in a loop of your own,
            write `grads = eqx.filter_grad(loss_fn)(opt.sample_params(model), x, y)`.

        **Returns:** the model, every leaf in its own dtype.

        **Raises:** `ValueError` for an optimizer without a posterior.
        """
        if "sampled parameters" not in loss_of(self.transform).askers:
            raise ValueError(
                "This optimizer has no posterior to draw parameters from. Train with "
                "`sl.contrib.ivon`."
            )
        check_arrays(self)
        whole = self._split(model)
        params = to_device(whole.params)
        loss = loss_of(self.transform, to_device(self.state), Context(step=self.count), params)
        drawn = to_memory_of(whole.params, sampled_params(loss, params, key))
        return whole.join(drawn)

    def _split(self, model: PyTree) -> Split:
        """Splits the bound model. Raises an error for another one, or a donated optimizer."""
        whole = split(model, self.binding.trainable)
        check_bound(whole.params, self.binding.params)
        check_readable(self)
        return whole

    def _map_state(
        self: _Self, function: Callable[[Any], Any], other: Callable[[Any], Any] | None
    ) -> _Self:
        """This optimizer with another state, and with `other` at all other arrays."""
        leaves, structure = jax.tree.flatten(self.state)
        pairs = zip(leaves, structure.flatten_up_to(function(self.state)), strict=True)
        mapped = [new for x, new in pairs if holds_arrays(x)]
        state = jax.tree.structure(self.arrays.state).unflatten(mapped)
        transform, _, count = self.arrays
        if other is not None:
            transform, count = jax.tree.map(other, (transform, count))
        return self._with_arrays(Arrays(transform, state, count))

    # --- inspection -------------------------------------------------------------------------

    @advise_positions("The optimizer does not hold the model: write `opt.describe(model)`.")
    def describe(self, model: PyTree) -> Description:
        """Describes how each parameter is optimized.

        **Arguments:**

        - `model`: the bound model.

        **Returns:** a table with the group, learning rate, weight decay, state and transforms of
        each array, and their totals. It prints as plain text, and shows as HTML in a notebook.
        `.show()` prints it with rich, if it is installed, to a terminal. `.to_dict()` returns the
        rows, and `.totals` the sums.
        """
        return describe(self, self._split(model))

    @advise_positions("Write `opt.plot_schedules(1000)` for the first 1000 steps.")
    def plot_schedules(self, steps: int) -> "Figure":
        """Plots the schedules of all hyperparameters with matplotlib.

        The horizontal axis counts the updates of the transform that a schedule belongs to. Inside
        `.every_k(k)`, these are fewer than the calls of `opt.step`. If the optimizer has taken
        steps already, a dashed line marks the next one.

        **Arguments:**

        - `steps`: the number of values of each schedule, an int ≥ 1.

        **Returns:** a `matplotlib.figure.Figure` with one axes for each schedule.
        `.savefig(path)` saves it, and a notebook shows it.

        **Raises:** `ImportError` without matplotlib; `ValueError` for an optimizer without
        schedules, and for stateful schedules, whose values depend on the losses of the run.
        """
        return plot_schedules(self, steps)

    def _repr_html_(self) -> str:
        count = self.arrays.count
        concrete = isinstance(count, jax.Array) and not isinstance(count, Tracer)
        values = self.hyperparams if concrete and not count.is_deleted() else {}
        return as_html(self, values)

    def _code(self) -> Call:
        return summary(self)


@reading
def _loss_scale(opt: AbstractOptimizer) -> Any:
    for part in loss_of(opt.transform, opt.state).askers.get("scaled loss", ()):
        return part.state.scale
    return jnp.float32(1)


@reading
def _metrics(opt: AbstractOptimizer) -> Readings:
    return Readings(metrics(opt.transform, opt.state))


_RECORDED = ("grad_norm", "update_norm", "param_norm", "lost_updates")


def _record_advice(name: str) -> str:
    """The advice for a metric that `.record()` would report."""
    return " Write `tx.record()` to report norms." if name in _RECORDED else ""
