"""The real and imaginary parts of complex parameters, as parameters of their own."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from .._core.context import Context
from .._core.declared import Part
from .._core.transform import AbstractTransform
from .._core.walk import parts, segments
from .._core.wrapper import AbstractWrapper
from .._core.write import ADD, RETURN, Write
from .._core.writer import AbstractParameterWriter
from .._paths import HalfKey, snake_case
from .._types import Gradients, Params


class RealAndImaginary(NamedTuple):
    """What stands for a complex array inside of `SplitRealAndImaginary`."""

    real: Float[Array, "*shape"]
    imag: Float[Array, "*shape"]


# Its keys are told from a module's fields: selectors name parameters, not their parts.
jax.tree_util.register_pytree_with_keys(
    RealAndImaginary,
    lambda pair: (((HalfKey("real"), pair.real), (HalfKey("imag"), pair.imag)), None),
    lambda _, halves: RealAndImaginary(*halves),
)


class SplitRealAndImaginary(AbstractWrapper[Any]):
    """The inner transform on the real and imaginary parts of complex leaves, as two real ones.

    Made with `tx.split_complex()`. Real leaves are what they are. Whatever looks at a leaf as a
    whole then looks at one of the two parts: a second moment, a norm of a leaf, a sign.

    A selector inside names the parameter, and so selects both parts: the path is `"w"`, not
    `"w.real"`. In paths of the state the parts are told apart: `scale_by_adam.mu.w.real`. The
    context's `grad`, `per_param` and `value_fn` are split too.

    A transform that writes parameters itself goes around this one, as in
    `tx.split_complex().lookahead(5, 0.5)`.

    **Arguments:**

    - `inner`: the transform.
    """

    fluent_method: ClassVar[str | None] = "split_complex"

    inner: AbstractTransform

    def __check_init__(self):
        for part in parts(self.inner):
            if isinstance(part.module, AbstractParameterWriter):
                method = snake_case(type(part.module).__name__)
                raise ValueError(
                    f"{type(part.module).__name__} writes parameters itself, and inside of "
                    "`.split_complex()` it would keep halves of them. Change the order: "
                    f"`tx.split_complex().{method}(...)` instead of "
                    f"`tx.{method}(...).split_complex()`."
                )

    def init(self, params: Params) -> Any:
        return self.inner.init(_split(params))

    def run(
        self,
        write: Write,
        updates: Gradients,
        state: Any,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, Any]:
        (part,) = self.children(state, context, params)
        if write is RETURN or write is ADD:
            result, state = part.run(write, _split(updates))
            return _joined(result), state
        # Another write must see whole parameters, not their halves.
        halves, state = part.run(RETURN, _split(updates))
        return write(params, _joined(halves)), state

    def children(
        self, state: Any = None, context: Context | None = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        context = None if context is None else _split_context(context)
        params = None if params is None else _split(params)
        path = segments(self.inner)
        return (Part(path, self.inner, state, context, params, lambda outer: outer.inner),)

    def has_updated(self, state: Any) -> Bool[Array, "*runs"] | bool:
        return self.inner.has_updated(state)

    def signs(self, params: Params) -> tuple[int | None, ...]:
        signs = iter(self.inner.signs(_split(params)))
        found: list[int | None] = []
        for leaf in jax.tree.leaves(params):
            halves = {next(signs) for _ in jax.tree.leaves(_split(leaf))}
            found.append(halves.pop() if len(halves) == 1 else None)
        return tuple(found)


def _split(tree: PyTree) -> PyTree:
    def halves(x: Any) -> Any:
        return RealAndImaginary(x.real, x.imag) if jnp.iscomplexobj(x) else x

    return jax.tree.map(halves, tree)


def _joined(tree: PyTree) -> PyTree:
    def is_pair(x: Any) -> bool:
        return isinstance(x, RealAndImaginary)

    return jax.tree.map(lambda x: jax.lax.complex(*x) if is_pair(x) else x, tree, is_leaf=is_pair)


def _split_context(context: Context) -> Context:
    per_param = context.per_param and {k: _split(v) for k, v in context.per_param.items()}
    value_fn = context.value_fn
    return dataclasses.replace(
        context,
        grad=_split(context.grad),
        per_param=per_param,
        value_fn=None if value_fn is None else _of_halves(value_fn),
    )


def _of_halves(value_fn: Callable[[Params], Any]) -> Callable[[Params], Any]:
    return lambda halves: value_fn(_joined(halves))
