"""A transform that runs where a condition holds."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .. import tree
from .._core.declared import CHECK
from .._core.fields import choice_field
from .._core.printing import code
from .._core.transform import MIXED, AbstractTransform, Context, count_from_zero
from .._core.wrapper import AbstractWrapper
from .._types import Params, Updates


class WhenState(eqx.Module):
    """What `When` remembers."""

    last_ran: Bool[Array, "*runs"]
    """Whether the condition held in the last step."""
    count: Int[Array, "*runs"]
    """How often it held: the inner transform's clock."""
    inner: Any
    """The inner transform's state."""


def _check_condition(name: str, condition: Any) -> None:
    if not callable(condition):
        raise TypeError(
            f"{name} must be a function `condition(context, updates)` that returns a bool scalar, "
            f"got {condition!r} of type {type(condition).__name__}."
        )


class When(AbstractWrapper):
    """The inner transform where a condition holds; else updates pass through, or are zero.

    Made with `tx.when(condition)`. Where the condition does not hold, nothing of the inner
    transform is executed and its state is kept; schedules inside it count the steps in which it
    held.

    ```python
    >>> def early(context, updates):
    ...     return context.step < 1_000
    >>> tx = sl.AddNoise(0.1, 0.55, key=0).when(early) | sl.adam(1e-3)

    ```

    A whole optimizer must not let gradients pass, since they would be added to the parameters,
    which binding refuses: `sl.adam(1e-3).when(condition, otherwise="zero")`.

    Under a `vmap` that batches the condition, `lax.cond` becomes a selection: values stay right,
    and steps where it does not hold cost what others cost.

    **Arguments:**

    - `inner`: the transform.
    - `condition`: called as `condition(context, updates)` in every step, with the context as it
        is outside, above all the clock `context.step`; returns a bool scalar.
    - `otherwise`: `"pass"`: the updates pass through unchanged; `"zero"`: there is no update.
    """

    fluent_method: ClassVar[str | None] = "when"

    inner: AbstractTransform
    condition: Callable[[Context, Updates], Any] = eqx.field(
        static=True, metadata={CHECK: _check_condition}
    )
    otherwise: str = choice_field("pass", "zero")

    def init(self, params: Params) -> WhenState:
        return WhenState(
            last_ran=jnp.array(False), count=count_from_zero(), inner=self.inner.init(params)
        )

    def update(
        self,
        updates: Updates,
        state: WhenState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, WhenState]:
        def hold(shape: Any, u: Any) -> Any:
            return jnp.asarray(u if self.otherwise == "pass" else jnp.zeros_like(u), shape.dtype)

        shapes = jax.eval_shape(lambda: self._run("update", updates, state, params, context))[0]
        held = jax.tree.map(hold, shapes, updates)
        _, made, state = self._decide("update", held, updates, state, params, context)
        return made, state

    def step(
        self, grads: Updates, state: WhenState, params: Params, context: Context | None = None
    ) -> tuple[Params, WhenState]:
        holds, new, state = self._decide("step", params, grads, state, params, context)
        if self.otherwise == "pass":
            # Added out here: XLA gives the parameters' own memory only to a branch that leaves
            # them as they are.
            raw = tree.add(new, grads)
            new = jax.tree.map(lambda stepped, raw: jnp.where(holds, stepped, raw), new, raw)
        return new, state

    def _decide(
        self,
        verb: str,
        held: Any,
        updates: Updates,
        state: WhenState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Bool[Array, ""], Any, WhenState]:
        """Whether the condition holds, what the inner transform made or `held`, the new state."""
        holds = self._holds(Context() if context is None else context, updates)

        def run(inner_state: Any) -> tuple[Any, Any]:
            at = WhenState(state.last_ran, state.count, inner_state)
            return self._run(verb, updates, at, params, context)

        made, inner = jax.lax.cond(holds, run, lambda same: (held, same), state.inner)
        count = jnp.where(holds, tree.increment(state.count), state.count)
        return holds, made, WhenState(holds, count, inner)

    def _run(
        self,
        verb: str,
        updates: Updates,
        state: WhenState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, Any]:
        outer = Context() if context is None else context
        return self.run(verb, updates, state, params, outer)

    def _holds(self, context: Context, updates: Updates) -> Bool[Array, ""]:
        name = code(self.condition)
        try:
            holds = self.condition(context, updates)
        except jax.errors.TracerBoolConversionError:
            raise TypeError(
                f"The condition {name} of `.when` branches in Python on something that is traced. "
                "Return the comparison itself, `context.step < n`, and join several with `&` and "
                "`|` instead of `and` and `or`."
            ) from None
        if not isinstance(holds, bool) and not tree.is_array(holds):
            got = f"{holds!r} of type {type(holds).__name__}"
        elif jnp.shape(holds) != () or jnp.result_type(holds) != jnp.bool_:
            got = f"an array of shape {jnp.shape(holds)} and dtype {jnp.result_type(holds)}"
        else:
            return jnp.asarray(holds)
        raise TypeError(
            f"The condition {name} of `.when` must return a bool scalar, got {got}. Compare, as in "
            "`context.step < n`, and make one bool of several with `jnp.all` or `jnp.any`."
        )

    def has_updated(self, state: WhenState) -> Bool[Array, "*runs"] | bool:
        inner = self.inner.has_updated(state.inner)
        if self.otherwise == "zero":
            return state.last_ran & inner
        return True if inner is True else ~state.last_ran | inner

    def signs(self, params: Params) -> tuple[int | None, ...]:
        signs = self.inner.signs(params)
        if self.otherwise == "zero":
            return signs
        return tuple({-1: MIXED, 0: 1}.get(s, s) if s is not None else None for s in signs)
