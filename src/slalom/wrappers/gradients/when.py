"""Conditional transforms."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ... import fields, tree
from ..._core.protocol.context import Context
from ..._core.protocol.parts import CHECK, Part
from ..._core.protocol.traits import MIXED
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractWrapper, run_if, skipped
from ..._core.protocol.writer import Writer
from ..._core.text.printing import code
from ...tree.types import Gradients, Params, Updates, is_function


class WhenState(eqx.Module):
    """The state of `When`."""

    last_ran: Bool[Array, "*runs"]
    """Whether the condition held in the last step."""
    count: Int[Array, "*runs"]
    """The number of steps in which it held: the inner transform's clock."""
    inner: Any
    """The inner transform's state."""


def _check_condition(name: str, condition: Any) -> None:
    if not is_function(condition):
        raise TypeError(
            f"{name} must be a function `condition(context, updates)` that returns a bool scalar, "
            f"got {condition!r} of type {type(condition).__name__}."
        )


class When(AbstractWrapper[WhenState]):
    """Applies the inner transform only while a condition holds.

    Made by `tx.when`, which describes the arguments.

    While the condition does not hold, the inner transform is not executed and its state does not
    change. Schedules inside it count the steps in which the condition held.

    ```python
    >>> def early(context, updates):
    ...     return context.step < 1_000
    >>> tx = sl.AddNoise(0.1, 0.55, key=0).when(early) | sl.adam(1e-3)

    ```

    A whole optimizer must not pass raw gradients through, because they would be added to the
    parameters. Use `sl.adam(1e-3).when(condition, otherwise="zero")`.

    Under a `vmap` over the condition, `lax.cond` becomes a select: the results are the same, but
    steps in which it does not hold cost as much as others.
    """

    over: ClassVar[str] = "tree"
    has_clock: ClassVar[bool] = True

    inner: AbstractTransform
    condition: Callable[[Context, Updates], Any] = eqx.field(
        static=True, metadata={CHECK: _check_condition}
    )
    otherwise: str = fields.choice_field("pass", "zero")

    def init(self, params: Params) -> WhenState:
        return WhenState(
            last_ran=jnp.array(False), count=tree.fresh_count(), inner=self.inner.init(params)
        )

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, WhenState]:
        here = here.with_context()
        state, part = here.state, self.inner_part(here)
        holds = self._holds(here.context, updates)

        def step(inner_state: Any) -> tuple[Any, Any]:
            return part._replace(state=inner_state).run(write, updates)

        if self.otherwise == "pass" and write.returns:
            shapes, _ = jax.eval_shape(step, state.inner)
            passed = tree.cast_like(updates, shapes)

            def idle(inner_state: Any) -> tuple[Any, Any]:
                return passed, skipped(part._replace(state=inner_state))

            result, inner = jax.lax.cond(holds, step, idle, state.inner)
        else:
            result, inner = run_if(holds, step, write, here.params, state.inner, skips=part)
            if self.otherwise == "pass":
                # Written outside the conditional, because XLA updates the parameters in place
                # only in a branch that does not change them.
                passed = write(write.plain(result), updates)
                result = jax.tree.map(lambda ran, raw: jnp.where(holds, ran, raw), result, passed)
        count = jnp.where(holds, tree.increment(state.count), state.count)
        return result, WhenState(holds, count, inner)

    def _holds(self, context: Context, updates: Updates) -> Bool[Array, ""]:
        name = code(self.condition)
        try:
            holds = self.condition(context, updates)
        except jax.errors.TracerBoolConversionError:
            raise TypeError(
                f"The condition {name} of `.when` branches in Python on a traced value. Return the "
                "comparison itself, `context.step < n`, and combine several with `&` and `|` "
                "instead of `and` and `or`."
            ) from None
        if not isinstance(holds, bool) and not tree.is_array(holds):
            got = f"{holds!r} of type {type(holds).__name__}"
        elif jnp.shape(holds) != () or jnp.result_type(holds) != jnp.bool_:
            got = f"an array of shape {jnp.shape(holds)} and dtype {jnp.result_type(holds)}"
        else:
            return jnp.asarray(holds)
        raise TypeError(
            f"The condition {name} of `.when` must return a bool scalar, got {got}. Return a "
            "comparison such as `context.step < n`, and reduce arrays with `jnp.all` or `jnp.any`."
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
