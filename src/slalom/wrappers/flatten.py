"""A transform on all small parameters end to end."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .. import tree
from .._core.chain import Chain
from .._core.context import Context
from .._core.declared import Part
from .._core.fields import count_field
from .._core.stateless import AbstractStatelessTransform
from .._core.transform import AbstractTransform
from .._core.walk import transforms
from .._core.wrapper import AbstractWrapper
from .._core.write import RETURN, Write
from .._paths import leaf_paths
from .._types import Gradients, Params, Updates

_MAX_SIZE = 8192
"""Where joining and leaving apart take equally long on a CPU; on a GPU it lies higher."""


class Joined(eqx.Module):
    """What stands for the parameters, or for updates, inside of `Flatten`."""

    together: dict[str, Array]
    """The small leaves end to end, in a buffer for each of the parameters' dtypes."""
    apart: PyTree
    """The tree with the large leaves only."""


class FlattenState(eqx.Module):
    """What `Flatten` remembers."""

    inner: Any
    """The inner transform's state: a `Joined` in place of every parameter-shaped tree."""
    dtypes: tuple[str, ...] = eqx.field(static=True)
    """The buffer of each small parameter. Updates may have another dtype."""
    shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    """The shape of each small parameter."""


class Flatten(AbstractWrapper[FlattenState]):
    """The inner transform on one buffer per dtype that holds all small leaves, end to end.

    Made with `tx.flatten()`. It gives what the inner transform gives, with a few large
    computations in place of one for each leaf. That pays for very many small leaves, whose
    computations take longer to begin than to do. Large leaves stay as they are, since there the
    two passes that join and split cost more than they save.

    The inner transform must be elementwise, since in a buffer there are no leaves: no norms, no
    masks. Flatten the other links alone: `sl.ClipByGlobalNorm(1.0) | sl.adam(1e-3).flatten()`.

    Differs from Optax, which joins all leaves, whatever their size.

    **Arguments:**

    - `inner`: the transform.
    - `max_size`: how many numbers a leaf may have to be joined to others, an int ≥ 1.
    """

    fluent_method: ClassVar[str | None] = "flatten"

    inner: AbstractTransform
    max_size: int = count_field(_MAX_SIZE)

    def __check_init__(self):
        for part in transforms(self.inner):
            if not part.module.elementwise:
                raise ValueError(
                    f"{part.name or type(part.module).__name__} does not treat every number of "
                    "the parameters alike and by itself, as `.flatten()` needs: in a buffer there "
                    "are no leaves. Flatten the other links alone, for example "
                    "`sl.ClipByGlobalNorm(1.0) | sl.adam(1e-3).flatten()`, and put wrappers "
                    "outside, `tx.flatten().if_finite()`."
                )

    def init(self, params: Params) -> FlattenState:
        tree.check_inexact(params)
        small = [x for x in jax.tree.leaves(params) if self._joins(x)]
        dtypes = tuple(str(tree.canonical(x.dtype)) for x in small)
        shapes = tuple(np.shape(x) for x in small)
        return FlattenState(self.inner.init(self._join(params, dtypes)), dtypes, shapes)

    def run(
        self,
        write: Write,
        updates: Gradients,
        state: FlattenState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, FlattenState]:
        if params is not None:
            tree.check_same_structure((updates, params))
        self._check_shapes(updates, state)
        dtypes, links = state.dtypes, self._links(state.inner)
        remember = [i for i, link in enumerate(links) if not _is_stateless(link)]
        until = remember[-1] + 1 if remember else 0
        joined = self._join(updates, dtypes) if until else None
        seen = params if params is None or not until else self._join(params, dtypes)
        known = self._join_context(context, params, dtypes)
        states = []
        for link in links[:until]:
            joined, new = link._replace(params=seen, context=known).run(RETURN, joined)
            states.append(new)
        if joined is not None:
            updates = self._split(joined, updates, dtypes)
        # What remembers nothing gives the same leaf by leaf, in the pass that adds the pieces to
        # the parameters. These then need no buffer, though the weight decay reads them.
        for link in links[until:]:
            link = link._replace(params=params, context=context)
            updates, new = link.run(RETURN, updates)
            states.append(new)
        inner = tuple(states) if isinstance(self.inner, Chain) else states[0]
        return write(params, updates), FlattenState(inner, dtypes, state.shapes)

    def _check_shapes(self, updates: Updates, state: FlattenState) -> None:
        """Refuses parameters of other shapes than at `init`, also those of equal size."""
        named = zip(leaf_paths(updates), jax.tree.leaves(updates), strict=True)
        small = [(path, np.shape(x)) for path, x in named if self._joins(x)]
        if len(small) != len(state.shapes):
            raise ValueError(
                f"The state of `.flatten()` was made for {len(state.shapes)} small parameters, and "
                f"there are {len(small)} now. Bind a new optimizer with `sl.Optimizer(tx, model)`."
            )
        for (path, shape), before in zip(small, state.shapes, strict=True):
            if shape != before:
                raise ValueError(
                    f"The state of `.flatten()` was made for a parameter of shape {before} at "
                    f"'{path}', which has shape {shape} now. Bind a new optimizer with "
                    "`sl.Optimizer(tx, model)`."
                )

    def shares(self, state: FlattenState, params: Params) -> dict[str, dict[str, float]]:
        """For each buffer the small parameters in it, with the fraction of it that each takes."""
        named = zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
        sizes: dict[str, dict[str, int]] = {}
        small = ((path, np.size(x)) for path, x in named if self._joins(x))
        for (path, size), dtype in zip(small, state.dtypes, strict=True):
            sizes.setdefault(dtype, {})[path] = size
        return {
            f"together.{dtype}": {path: n / max(sum(own.values()), 1) for path, n in own.items()}
            for dtype, own in sizes.items()
        }

    def _joins(self, leaf: Any) -> bool:
        return np.size(leaf) <= self.max_size

    def _join(self, whole: PyTree, dtypes: tuple[str, ...]) -> Joined:
        """A tree like the parameters with the small leaves in buffers."""
        leaves = jax.tree.leaves(whole)
        groups: dict[str, list[Any]] = {dtype: [] for dtype in dtypes}
        for dtype, x in zip(dtypes, filter(self._joins, leaves), strict=True):
            groups[dtype].append(x)
        apart = tree.cut(whole, tuple(not self._joins(x) for x in leaves))
        return Joined({dtype: _concatenate(group) for dtype, group in groups.items()}, apart)

    def _split(self, joined: Joined, like: PyTree, dtypes: tuple[str, ...]) -> PyTree:
        """Undoes `_join`: a tree of the structure and shapes of `like`."""
        leaves, structure = jax.tree.flatten(like)
        ends = dict.fromkeys(joined.together, 0)
        of_small, apart = iter(dtypes), iter(jax.tree.leaves(joined.apart))
        pieces = []
        for x in leaves:
            if not self._joins(x):
                pieces.append(next(apart))
                continue
            dtype = next(of_small)
            start, ends[dtype] = ends[dtype], ends[dtype] + np.size(x)
            piece = joined.together[dtype][start : ends[dtype]]
            pieces.append(jnp.reshape(piece, np.shape(x)))
        return structure.unflatten(pieces)

    def _join_context(
        self, context: Context | None, params: Params | None, dtypes: tuple[str, ...]
    ) -> Context | None:
        """The context with everything that is shaped as the parameters joined."""
        if context is None:
            return None
        given: dict[str, Any] = {}
        if context.grad is not None:
            given["grad"] = self._join(context.grad, dtypes)
        if context.per_param is not None:
            given["per_param"] = {k: self._join(v, dtypes) for k, v in context.per_param.items()}
        if context.value_fn is not None and params is not None:
            value_fn = context.value_fn
            given["value_fn"] = lambda joined: value_fn(self._split(joined, params, dtypes))
        return dataclasses.replace(context, **given)

    def _links(self, state: Any) -> tuple[Part, ...]:
        """The links of a chain, or the one transform there is."""
        if isinstance(self.inner, Chain):
            return self.inner.children(state)
        return (self.inner_part(FlattenState(state, (), ())),)


def _is_stateless(link: Part) -> bool:
    return isinstance(link.module, AbstractStatelessTransform)


def _concatenate(group: list[Any]) -> Array:
    own = {tree.canonical(x.dtype) for x in group}
    # Updates of one buffer may differ in dtype: they meet in one that holds them all.
    dtype = own.pop() if len(own) == 1 else tree.accumulation_dtype(*own, *(x.dtype for x in group))
    return jnp.concatenate([jnp.ravel(jnp.asarray(x, dtype)) for x in group])
