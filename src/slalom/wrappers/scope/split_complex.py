"""Transforms the real and imaginary parts of complex parameters separately."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ..._core.protocol.parameter_writer import AbstractParameterWriter
from ..._core.protocol.parts import Part
from ..._core.protocol.transform import AbstractTransform
from ..._core.protocol.wrapper import AbstractWrapper
from ..._core.protocol.writer import ADD, RETURN, Writer
from ..._core.state.walk import parts, segments
from ...tree.paths import HalfKey, snake_case
from ...tree.types import Gradients, Params


class RealAndImaginary(NamedTuple):
    """A complex array, as the inner transform of `SplitComplex` sees it."""

    real: Float[Array, "*shape"]
    imag: Float[Array, "*shape"]


# With keys of its own type, because selectors name parameters, not their parts.
jax.tree_util.register_pytree_with_keys(
    RealAndImaginary,
    lambda pair: (((HalfKey("real"), pair.real), (HalfKey("imag"), pair.imag)), None),
    lambda _, halves: RealAndImaginary(*halves),
)


class SplitComplex(AbstractWrapper[Any]):
    """Applies the inner transform to the real and imaginary parts of complex leaves.

    Made by `tx.split_complex`, which describes the arguments.

    The two parts are separate real leaves, with separate second moments, norms and signs. Real
    leaves are unchanged.

    A selector inside names the parameter and selects both parts: its path is `"w"`, not
    `"w.real"`. In the state, the parts have separate paths, such as `scale_by_adam.mu.w.real`. The
    `grad`, `per_param` and `value_fn` of the context are split too.

    A transform that writes parameters itself must wrap this one, as in
    `tx.split_complex().lookahead(5, 0.5)`.
    """

    passes_gradients: ClassVar[bool] = True
    over: ClassVar[str] = "tree"

    inner: AbstractTransform

    def __check_init__(self):
        for part in parts(self.inner):
            if isinstance(part.module, AbstractParameterWriter):
                method = snake_case(type(part.module).__name__)
                raise ValueError(
                    f"{type(part.module).__name__} writes parameters itself, so it cannot be used "
                    "inside `.split_complex()`. Change the order: "
                    f"`tx.split_complex().{method}(...)` instead of "
                    f"`tx.{method}(...).split_complex()`."
                )

    def init(self, params: Params) -> Any:
        return self.inner.init(_split(params))

    def run(self, here: Part, write: Writer, updates: Gradients) -> tuple[Any, Any]:
        if write is RETURN or write is ADD:
            (part,) = self.children(here)
            result, state = part.run(write, _split(updates))
            return joined(result), state
        # Other writes need whole parameters.
        (part,) = self.children(here._replace(params=write.full(here.params)))
        halves, state = part.run(RETURN, _split(updates))
        return write(here.params, joined(halves)), state

    def children(self, here: Part) -> tuple[Part, ...]:
        part = here.child(segments(self.inner), self.inner, lambda outer: outer.inner, here.state)
        context = None if here.context is None else here.context.in_form(_split, joined)
        params = None if here.params is None else _split(here.params)
        return (part._replace(context=context, params=params),)

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


def joined(tree: PyTree) -> PyTree:
    """A tree with the complex arrays in place of their parts."""

    def is_pair(x: Any) -> bool:
        return isinstance(x, RealAndImaginary)

    return jax.tree.map(lambda x: jax.lax.complex(*x) if is_pair(x) else x, tree, is_leaf=is_pair)
