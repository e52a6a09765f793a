"""A transform whose steps are measured."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .. import tree
from .._core.by_path import ByPath
from .._core.chain import Chain
from .._core.hyperparams import read
from .._core.paced import AbstractPacedTransform
from .._core.transform import AbstractTransform, Context
from .._core.wrapper import AbstractWrapper
from .._types import Params, Scalar, Updates


class RecordedState(eqx.Module):
    """What `Recorded` remembers."""

    inner: Any
    """The inner transform's state."""
    grad_norm: Scalar
    update_norm: Scalar
    param_norm: Scalar
    hyperparams: ByPath
    """The value of each hyperparameter, by path, that the last step used."""


class Recorded(AbstractWrapper):
    """The inner transform, with norms and hyperparameters of its last step in `opt.metrics`.

    Made with `tx.record()`. The metrics are `grad_norm`, `update_norm` and `param_norm`, the
    global norms of what comes in, of what goes out and of the parameters that result, summed in
    at least float32; and each hyperparameter, by its path, as the step used it. Where the inner
    transform is idle, as within `.every_k`, the norm of what goes out is 0.

    A norm costs one more pass over what it measures, and that of the updates a buffer for them.

    **Arguments:**

    - `inner`: the transform.
    """

    fluent_method: ClassVar[str | None] = "record"

    inner: AbstractTransform

    elementwise: ClassVar[bool] = True

    def init(self, params: Params) -> RecordedState:
        inner = self.inner.init(params)
        norm = jax.eval_shape(tree.global_norm, params)
        hyperparams = self._hyperparams(inner, Context(step=jnp.zeros((), jnp.int32)))

        def zero() -> Scalar:
            return jnp.zeros((), norm.dtype)

        return RecordedState(inner, zero(), zero(), zero(), hyperparams)

    def update(
        self,
        updates: Updates,
        state: RecordedState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, RecordedState]:
        made, inner = self.run("update", updates, state, params, context)
        new = None if params is None else tree.add(params, made)
        norm = tree.global_norm(made)
        return made, self._record(updates, norm, inner, state, new, context)

    def step(
        self, grads: Updates, state: RecordedState, params: Params, context: Context | None = None
    ) -> tuple[Params, RecordedState]:
        (part,) = self.inside(state, context, params)
        with part.scope():
            (new, norm), inner = _step(self.inner)(grads, state.inner, params, context)
        return new, self._record(grads, norm, inner, state, new, context)

    def _record(
        self,
        grads: Updates,
        update_norm: Scalar,
        inner: Any,
        state: RecordedState,
        params: Params | None,
        context: Context | None,
    ) -> RecordedState:
        return RecordedState(
            inner,
            _as(state.grad_norm, tree.global_norm(grads)),
            _as(state.update_norm, update_norm),
            _as(state.param_norm, jnp.nan if params is None else tree.global_norm(params)),
            self._hyperparams(state.inner, context),
        )

    def _hyperparams(self, state: Any, context: Context | None) -> ByPath:
        # Copied: the transform's own numbers must not be donated along with the state.
        return jax.tree.map(jnp.copy, read(self.inner, state, context))

    def metrics(self, state: RecordedState) -> dict[str, Array]:
        norms = {
            "grad_norm": state.grad_norm,
            "update_norm": state.update_norm,
            "param_norm": state.param_norm,
        }
        return norms | state.hyperparams


def _as(like: Scalar, x: Any) -> Scalar:
    return jnp.asarray(x, like.dtype)


def _step(transform: AbstractTransform) -> Callable[..., Any]:
    """`transform.step`, returning beside the parameters the norm of what it added to them.

    Not the norm of the difference of the parameters, which rounding makes 0 for small updates.
    Paced transforms stay paced: their idle branch must not make zeros of the parameters' size.
    """
    if isinstance(transform, AbstractPacedTransform):
        (part,) = transform.inside()

        def paced(grads: Any, state: Any, params: Any, context: Any) -> Any:
            def hold(shapes: Any) -> Any:
                return params, jnp.zeros((), shapes[1].dtype)

            return transform.pace(grads, state, params, context, _step(part.transform), hold)

        return paced

    if isinstance(transform, Chain):
        return functools.partial(transform.through, _step)

    def plain(grads: Any, state: Any, params: Any, context: Any) -> Any:
        updates, state = transform.update(grads, state, params, context)
        return (tree.add(params, updates), tree.global_norm(updates)), state

    return plain
