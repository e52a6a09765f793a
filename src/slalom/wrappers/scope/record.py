"""Records norms and hyperparameters."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import tree
from ..._core.fields.hyperparams import Readings, read
from ..._core.protocol.context import Context
from ..._core.protocol.parts import Part
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import Writer, measurements, without_measurements
from ...tree.types import Gradients, Params, PyTree, Scalar


class RecordState(eqx.Module):
    """The state of `Record`."""

    inner: PyTree
    """The inner transform's state."""
    grad_norm: Scalar
    update_norm: Scalar
    param_norm: Scalar
    lost_updates: Scalar
    hyperparams: Readings
    """The value of each hyperparameter, by path, that the last step used."""


class Record(AbstractWrapper[RecordState]):
    """Reports norms and hyperparameters of the inner transform in `opt.metrics`.

    Made by `tx.record`, which describes the arguments.

    The metrics are `grad_norm`, `update_norm` and `param_norm`, which are the global norms of the
    incoming gradients, the updates and the new parameters, computed in at least float32 (infinite
    where the sum of squares overflows), and the value of each hyperparameter in the last step, by
    path. In the idle steps of the inner transform, as under `.every_k`, the norm of the updates is
    0.

    `lost_updates` is the share of nonzero updates that changed nothing, because the sum was rounded
    back to the old parameter. If it is large for half-precision parameters, choose a policy with
    `.write`, which then counts the extra data of the policy too. Under `.write("stochastic")` these
    updates are made up for by others that were rounded up.

    Each norm requires an additional pass over its arrays, and measuring the updates requires a
    buffer for them. A policy of `.write` adds one for the parameters before the step.
    """

    over: ClassVar[str] = "sums"
    metric_fields: ClassVar[tuple[str, ...]] = (
        "grad_norm",
        "update_norm",
        "param_norm",
        "lost_updates",
    )

    def init(self, params: Params) -> RecordState:
        inner = self.inner.init(params)
        norm = jax.eval_shape(tree.squared_norm, params)
        hyperparams = self._hyperparams(inner, Context(step=jnp.zeros((), jnp.int32)))

        zeros = (jnp.zeros((), norm.dtype) for _ in self.metric_fields)
        return RecordState(inner, *zeros, hyperparams=hyperparams)

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, RecordState]:
        state, context, params = here.state, here.context, here.params
        measuring = dataclasses.replace(write, measures=True)
        result, inner = self.inner_part(here).run(measuring, updates)
        update_norm, lost = measurements(result)
        param_norm = jnp.nan
        if params is not None:
            param_norm = tree.root(tree.squared_norm(write.new_params(params, result)))
        # A `.record()` around this one reads the same measurements.
        result = result if write.measures else without_measurements(result)
        values = (tree.root(tree.squared_norm(updates)), update_norm, param_norm, lost)
        norms = (jnp.asarray(x, state.grad_norm.dtype) for x in values)
        return result, RecordState(
            inner, *norms, hyperparams=self._hyperparams(state.inner, context)
        )

    def _hyperparams(self, state: PyTree, context: Context) -> Readings:
        # Copied: the transform's own numbers must not be donated along with the state.
        return jax.tree.map(jnp.copy, read(self.inner, state, context))

    def metrics(self, state: RecordState) -> dict[str, Array]:
        return super().metrics(state) | state.hyperparams
