"""A transform on all parameters end to end."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .. import tree
from .._chain import Chain
from .._fluent import fluent
from .._stateless import AbstractStatelessTransform
from .._transform import AbstractTransform, Context, Part, operand, parts
from .._types import Params, Updates
from .._wrapper import AbstractWrapper


class FlattenState(eqx.Module):
    """What `Flatten` remembers."""

    inner: Any
    """The inner transform's state: what would be shaped as the parameters is one vector for each
    dtype."""
    dtypes: tuple[str, ...] = eqx.field(static=True)
    """For each parameter, the buffer that it is in: updates may come in another dtype."""


@fluent
class Flatten(AbstractWrapper):
    """The inner transform on one buffer per dtype that holds all leaves, end to end.

    Made with `tx.flatten()`. It gives what the inner transform gives, with a few large
    computations in place of one for each leaf, and state in one vector for each dtype of the
    parameters. That pays for very many small leaves. Joining and splitting costs a buffer of the
    gradients' size and two passes over it, so for large leaves it does not.

    The inner transform must be elementwise, since in a buffer there are no leaves: no norms, no
    masks. Flatten the other links alone: `sl.ClipByGlobalNorm(1.0) | sl.adam(1e-3).flatten()`.

    **Arguments:**

    - `inner`: the transform.
    """

    inner: AbstractTransform

    def __check_init__(self):
        for part in parts(self.inner):
            if not part.transform.elementwise:
                raise ValueError(
                    f"{part.name or type(part.transform).__name__} does not treat every number of "
                    "the parameters alike and by itself, as `.flatten()` needs: in a buffer there "
                    "are no leaves. Flatten the other links alone, for example "
                    "`sl.ClipByGlobalNorm(1.0) | sl.adam(1e-3).flatten()`, and put wrappers "
                    "outside, `tx.flatten().if_finite()`."
                )

    def init(self, params: Params) -> FlattenState:
        tree.check_inexact(params)
        dtypes = tuple(str(tree.canonical(x.dtype)) for x in jax.tree.leaves(params))
        return FlattenState(self.inner.init(_join(params, dtypes)), dtypes)

    def update(
        self,
        updates: Updates,
        state: FlattenState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, FlattenState]:
        if params is not None:
            tree.check_same_structure((updates, params))
        dtypes, links = state.dtypes, self._links(state.inner)
        remember = [i for i, link in enumerate(links) if not _is_stateless(link)]
        joined = remember[-1] + 1 if remember else 0
        buffers = _join(updates, dtypes) if joined else {}
        flat = _join(params, dtypes) if joined and params is not None else None
        seen = _joined(context, params, dtypes)
        states = []
        for link in links[:joined]:
            with link.scope():
                buffers, new = link.transform.update(buffers, link.state, flat, seen)
            states.append(new)
        if joined:
            updates = _split(buffers, updates, dtypes)
        # What remembers nothing gives the same leaf by leaf, in the pass that adds the pieces to
        # the parameters. These then need no buffer, though the weight decay reads them.
        for link in links[joined:]:
            with link.scope():
                updates, new = link.transform.update(updates, link.state, params, context)
            states.append(new)
        inner = tuple(states) if isinstance(self.inner, Chain) else states[0]
        return updates, FlattenState(inner, dtypes)

    def _links(self, state: Any) -> tuple[Part, ...]:
        """The links of a chain, or the one transform there is."""
        if isinstance(self.inner, Chain):
            return self.inner.inside(state)
        return super().inside(FlattenState(state, ()))

    def __repr__(self) -> str:
        return f"{operand(self.inner)}.flatten()"


def _is_stateless(link: Part) -> bool:
    return isinstance(link.transform, AbstractStatelessTransform)


def _join(leaves: PyTree, dtypes: tuple[str, ...]) -> dict[str, Array]:
    """The leaves end to end, in a buffer for each of the parameters' dtypes."""
    groups: dict[str, list[Any]] = {dtype: [] for dtype in dtypes}
    for dtype, x in zip(dtypes, jax.tree.leaves(leaves), strict=True):
        groups[dtype].append(x)
    return {dtype: _concatenate(group) for dtype, group in groups.items()}


def _concatenate(group: list[Any]) -> Array:
    own = {tree.canonical(x.dtype) for x in group}
    # Updates of one buffer may differ in dtype: they meet in one that holds them all.
    dtype = own.pop() if len(own) == 1 else tree.accumulation_dtype(*own, *(x.dtype for x in group))
    return jnp.concatenate([jnp.ravel(jnp.asarray(x, dtype)) for x in group])


def _split(buffers: dict[str, Array], like: PyTree, dtypes: tuple[str, ...]) -> PyTree:
    """Undoes `_join`: a tree of the structure and shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    ends = dict.fromkeys(buffers, 0)
    pieces = []
    for dtype, x in zip(dtypes, leaves, strict=True):
        start, ends[dtype] = ends[dtype], ends[dtype] + np.size(x)
        pieces.append(jnp.reshape(buffers[dtype][start : ends[dtype]], np.shape(x)))
    return structure.unflatten(pieces)


def _joined(
    context: Context | None, params: Params | None, dtypes: tuple[str, ...]
) -> Context | None:
    """The context with everything that is shaped as the parameters joined."""
    if context is None:
        return None
    given: dict[str, Any] = {}
    if context.grad is not None:
        given["grad"] = _join(context.grad, dtypes)
    if context.per_param is not None:
        given["per_param"] = {k: _join(v, dtypes) for k, v in context.per_param.items()}
    if context.value_fn is not None and params is not None:
        given["value_fn"] = _of_buffers(context.value_fn, params, dtypes)
    return dataclasses.replace(context, **given)


def _of_buffers(
    value_fn: Callable[[Params], Any], params: Params, dtypes: tuple[str, ...]
) -> Callable[[Any], Any]:
    return lambda buffers: value_fn(_split(buffers, params, dtypes))
