"""Transforms made of other transforms."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Bool

from ...tree.dtypes import cast_like
from ...tree.types import Params, PyTree, Updates
from ..text.printing import public_name
from .bases import AbstractRunTransform
from .context import Context
from .parts import Part, segments, transforms
from .transform import AbstractTransform, State
from .writer import Writer


class AbstractWrapper(AbstractRunTransform[State]):
    """A transform around one other, `inner`.

    `inner` is its first field. A subclass declares the others, and writes `run`:

    ```python
    >>> class Twice(sl.wrappers.AbstractWrapper):
    ...     def run(self, here, write, updates):
    ...         return self.inner_part(here).run(write, jax.tree.map(lambda u: 2 * u, updates))
    >>> tx = Twice(sl.sgd(0.1))
    >>> tx.step(jnp.ones(()), tx.init(jnp.ones(())), jnp.ones(()))[0]
    Array(0.8, dtype=float32)

    ```

    Its state is that of `inner`. A wrapper with more state writes `init`, and keeps the state of
    `inner` as `state.inner`. One with a clock of its own for `inner` also writes `inner_context`.

    **Arguments:**

    - `inner`: the transform inside.
    """

    inner: AbstractTransform[Any]

    has_clock: ClassVar[bool] = False
    """Whether the state has a `count`, which is the clock of the inner transform."""

    def init(self, params: Params) -> State:
        return self.inner.init(self.inner_part(Part.root(self, params=params)).params)

    def _inner_state(self, state: Any) -> PyTree:
        if type(self).init is AbstractWrapper.init:
            return state
        if not hasattr(state, "inner"):
            raise TypeError(
                f"{type(self).__name__}.init must return a state with a field `inner`, the state "
                f"of the transform inside, got {type(state).__name__}. Leave `init` out if this is "
                "all of the state."
            )
        return state.inner

    def inner_context(self, here: Part) -> Context:
        """The context that the inner transform sees, if `here` has one."""
        return here.context.replace(step=here.state.count) if self.has_clock else here.context

    def inner_part(self, here: Part) -> Part:
        """The inner transform with its context."""
        state = None if here.state is None else self._inner_state(here.state)
        part = here.child(segments(self.inner), self.inner, lambda outer: outer.inner, state)
        return part if here.context is None else part._replace(context=self.inner_context(here))

    def children(self, here: Part) -> tuple[Part, ...]:
        return (self.inner_part(here),)

    def has_updated(self, state: State) -> Bool[Array, "*runs"] | bool:
        return self.inner.has_updated(self._inner_state(state))

    def signs(self, params: Params) -> tuple[int | None, ...]:
        return self.inner.signs(params)


class AbstractPacedWrapper(AbstractWrapper[State]):
    """A wrapper that decides *whether* its inner transform runs, on a clock of its own.

    A subclass writes `init` and `run`, usually with `run_if`. Its state has
    `inner`, the inner transform's state, and `count`, how often it has run: its clock.

    **Arguments:**

    - `inner`: the transform inside.
    """

    has_clock: ClassVar[bool] = True


def wrapper_names(*, with_clock: bool = False) -> frozenset[str]:
    """The names of all classes of wrappers, as files and reports have them.

    **Arguments:**

    - `with_clock`: whether to return only those with a clock.
    """
    classes: list[type[AbstractWrapper]] = [AbstractWrapper]
    for c in classes:
        classes += c.__subclasses__()
    return frozenset(c.__name__ for c in classes if c.has_clock or not with_clock)


def refuse_constraints(inner: AbstractTransform, method: str, remedy: str) -> None:
    """Raises an error for constraints inside a wrapper that adds something other than updates.

    **Arguments:**

    - `inner`: what is inside the wrapper.
    - `method`: the method that makes the wrapper, such as `".graft"`.
    - `remedy`: what to write instead, where `{link}` is the code of the constraint's class.
    """
    for part in transforms(inner):
        if part.module.constrains:
            link = public_name(type(part.module))
            raise ValueError(
                f"'{part.name}' cannot be inside `{method}`: its updates take the parameters to "
                "where it wants them only if they are added unchanged. " + remedy.format(link=link)
            )


def run_if(
    condition: Bool[Array, ""] | bool,
    run: Callable[..., tuple[Any, Any]],
    write: Writer,
    params: Params | None,
    *operands: PyTree,
    skips: Part | None = None,
    instead: Updates | None = None,
) -> tuple[Any, Any]:
    """Runs the inner transform where a condition holds, in one branch of a `lax.cond`.

    The other branch is the identity: it costs nothing, and XLA keeps parameters and state in place.

    **Arguments:**

    - `condition`: a bool scalar, or `True`, which needs no conditional.
    - `run`: `run(*operands)` returns the result and the inner transform's new state.
    - `write`, `params`: as `AbstractTransform.run` gets them.
    - `operands`: the arguments of `run`; the last one is the inner transform's state.
    - `skips`: the inner transform, if a step in which it does not run is skipped for good. Then
        `AbstractTransform.skipped` draws new samples inside it. Leave it out to keep the samples,
        as in an unfinished window of `.every_k`.
    - `instead`: the result of a step in which it does not run, for a `write` that returns updates.

    **Returns:** the result and the inner transform's new state, as `run` returns them, or
    `instead`, by default `write.idle(...)`, and the old state.
    """
    if condition is True:
        return run(*operands)
    shapes, _ = jax.eval_shape(run, *operands)

    def idle(*operands: PyTree) -> tuple[Any, Any]:
        state = operands[-1]
        if skips is not None:
            state = skipped(skips._replace(state=state))
        if instead is not None:
            return cast_like(instead, shapes), state
        return write.idle(params, shapes), state

    return jax.lax.cond(condition, run, idle, *operands)


def skipped(part: Part) -> PyTree:
    """The state of a transform and of those inside it after a step that was skipped."""
    changed = {}
    for inner in transforms(part.module, part.state):
        new = inner.module.skipped(inner.state)
        if new is not inner.state:
            changed[id(inner.state)] = new
    if not changed:
        return part.state
    return jax.tree.map(
        lambda x: changed.get(id(x), x), part.state, is_leaf=lambda x: id(x) in changed
    )
