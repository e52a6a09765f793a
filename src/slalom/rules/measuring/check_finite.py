"""Finds the first values of a step that are not finite."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from ... import tree
from ..._core.text.messages import listed
from ...tree.paths import leaf_paths
from ...tree.types import Params, Updates
from .._base import AbstractTransform, Context


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

    def update(
        self,
        updates: Updates,
        state: CheckFiniteState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, CheckFiniteState]:
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

    @property
    def guard(self) -> Callable[[str, CheckFiniteState], None] | None:
        return _raise_if_found


def _finite(arrays: PyTree) -> Bool[Array, " leaves"]:
    """Whether all numbers of each array are finite."""
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(arrays)]
    return jnp.stack(leaves) if leaves else jnp.ones(0, bool)


def _raise_if_found(name: str, state: CheckFiniteState) -> None:
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


def _bad(finite: np.ndarray, paths: tuple[str, ...]) -> str:
    """The names of the arrays that are not finite, in any of several runs."""
    per_leaf = np.all(finite.reshape(-1, len(paths)), axis=0)
    names = [f"'{path}'" for path, ok in zip(paths, per_leaf, strict=True) if not ok]
    return listed(names, 3)
