"""The direction of one transform, with the length of the updates of another."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Inexact, PyTree

from ... import tree
from ..._core.engine.matrices import refuse_unequal
from ..._core.protocol.bases import AbstractParameterWriter
from ..._core.protocol.parts import Part, parts, segments
from ..._core.protocol.transform import AbstractTransform, require_transform
from ..._core.protocol.wrapper import AbstractWrapper, refuse_constraints
from ..._core.protocol.writer import Writer
from ...tree.dtypes import promoting
from ...tree.types import Params, Updates
from ...where.layout import Layout, layouts


class GraftState(eqx.Module):
    """The state of `Graft`."""

    inner: PyTree
    """The state of the transform that gives the direction."""
    magnitude: PyTree
    """The state of the transform that gives the length."""


class Graft(AbstractWrapper[GraftState]):
    """The updates of the inner transform, with the norms of another one's updates.

    Made by `tx.graft`, which describes the arguments.

    Both transforms see the same gradients. With the updates d of the inner one and s of the other,
    of one layer:

        u = d·‖s‖ / ‖d‖,   and 0 where d is 0

    The norms are taken of a layer: of a whole leaf, or of each matrix or vector in a stack or in
    blocks, as the rules inside read it. They are correct even where a sum of squares overflows or
    underflows.

    The signs come from the inner transform. Whole optimizers can be grafted too:
    `sl.muon(1.0).graft(sl.adam(1e-3))` takes steps as long as Adam's.

    The hyperparameters of the other transform have paths such as
    `graft.magnitude.scale_by_adam.b1`.

    ```python
    >>> tx = sl.ScaleBySign().graft(sl.Identity())
    >>> grads = {"w": jnp.array([3.0, -4.0])}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> jnp.linalg.norm(updates["w"]).round(3)
    Array(5., dtype=float32)

    ```

    ??? cite "Agarwal et al., [Disentangling Adaptive Gradient Methods from Learning
        Rates](https://arxiv.org/abs/2002.11803), 2020"
    """

    magnitude: AbstractTransform

    reads_encoded: ClassVar[tuple[str, ...]] = ("state", "updates")

    def __check_init__(self):
        require_transform("Graft.magnitude", self.magnitude)
        refuse_constraints(
            self,
            ".graft",
            "Write it after `.graft`: `direction.graft(magnitude) | {link}(...)`.",
        )
        for part in (*parts(self.inner), *parts(self.magnitude)):
            if isinstance(part.module, AbstractParameterWriter):
                raise ValueError(
                    f"'{part.name}' inside `.graft` writes parameters itself, so its updates "
                    "have no norm of their own. Write "
                    f"`direction.graft(magnitude).{segments(part.module)[0]}(...)`."
                )

    def init(self, params: Params) -> GraftState:
        return GraftState(self.inner.init(params), self.magnitude.init(params))

    def children(self, here: Part) -> tuple[Part, ...]:
        # The inner transform comes last, as in `Outer`.
        state = None if here.state is None else here.state.magnitude
        path = ("magnitude", *segments(self.magnitude))
        magnitude = here.child(path, self.magnitude, lambda outer: outer.magnitude, state)
        return magnitude, self.inner_part(here)

    def run(self, here: Part, write: Writer, updates: PyTree) -> tuple[Any, GraftState]:
        magnitude, inner = self.children(here)
        sizes, magnitude = magnitude.run(write.returning, updates)
        updates, inner = inner.run(write.returning, updates)
        pairs = zip(*map(jax.tree.leaves, (updates, sizes)), strict=True)
        results: list[Array] = []
        for (x, size), layout in zip(pairs, self._layouts(updates), strict=True):
            results.append(_with_norm_of(tree.after(x, results[-1:]), size, layout.split))
        updates = jax.tree.structure(updates).unflatten(results)
        return write(here.params, updates), GraftState(inner, magnitude)

    def has_updated(self, state: GraftState) -> Bool[Array, "*runs"] | bool:
        # Where one of the two returns zeros, so does this.
        return self.magnitude.has_updated(state.magnitude) & self.inner.has_updated(state.inner)

    def _layouts(self, updates: Updates) -> list[Layout]:
        """The layout of each leaf, as the rules inside read it."""
        paths = tree.leaf_paths(updates)
        by_path = dict(zip(paths, layouts(updates), strict=True))
        for part in parts(self.inner, params=updates):
            layout = getattr(part.module, "layout", None)
            if layout is not None:  # for the leaves that a mask leaves to the rule
                by_path |= dict(
                    zip(tree.leaf_paths(part.params), layouts(part.params, layout), strict=True)
                )
        of_leaves = [by_path[path] for path in paths]
        refuse_unequal("`.graft`", updates, of_leaves)
        return of_leaves


@eqx.filter_jit
def _with_norm_of(
    x: Inexact[Array, "..."], other: Inexact[Array, "..."], split: tuple[tuple[str, int], ...]
) -> Inexact[Array, "..."]:
    """An array with the norms of another, layer by layer.

    Compiled, so that arrays of equal shape share a trace.
    """
    shape = tuple(size for _, size in split)
    axes = tuple(a for a, (letter, _) in enumerate(split) if letter != "s")
    layers, sizes = (tree.widened(jnp.reshape(y, shape)) for y in (x, other))
    with promoting(tree.accumulation_dtype(layers.dtype, sizes.dtype)):
        unit, norm, _ = tree.norms_along(layers, axes)
        _, size, of_size = tree.norms_along(sizes, axes)
        limit = float(jnp.finfo(size.dtype).max) / 4
        size = tree.cast(jnp.minimum(of_size, limit / jnp.maximum(size, 1)) * size, norm.dtype)
        # Divided first by the largest entry, since the quotient of the norms may overflow.
        inverse = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)
        return jnp.reshape(unit * inverse * size, x.shape)
