"""The base of all projections."""

import abc
from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import tree
from .._core.fields.schedule import read_numbers
from .._core.protocol.context import Context
from .._core.protocol.parts import AbstractDeclared
from .._core.text.printing import code
from ..tree.paths import check_real, dotted
from ..tree.types import PyTree
from ..where.resolve import values_like


class AbstractProjection(AbstractDeclared):
    """A projection of trees. A subclass declares its numbers and writes `nearest`.

    The numbers are hyperparameters: inside `tx.project` they are traced and listed in
    `opt.hyperparams`, and they can be schedules.
    """

    compares: ClassVar[bool] = False
    """Whether it compares numbers, which excludes complex ones."""

    is_box: ClassVar[bool] = False
    """Whether the set is a box, with a lower and an upper bound of each number."""

    is_convex: ClassVar[bool] = True
    """Whether an average of trees in the set is in it."""

    @property
    def is_manifold(self) -> bool:
        """Whether the set is smooth, with a tangent space at each point."""
        return type(self).tangent is not AbstractProjection.tangent

    def tangent(self, now: SimpleNamespace, x: PyTree, u: PyTree) -> PyTree:
        """The part of a direction along the set.

        `.project` passes on gradients along the set only. A subclass replaces this for a smooth
        set, where updates are along the set too. By default it is that of a short step of the
        length δ, from which the projection returns:

            u + (p − y)·‖u‖/δ   with   y = x + δ·u/‖u‖,   p the nearest point to y

        In the interior this is u. It is 0 exactly where u is normal to a convex set, however long
        the step is.

        **Arguments:**

        - `now`: as for `nearest`.
        - `x`: a tree in the set, as for `nearest`.
        - `u`: the direction, a tree like `x`.

        **Returns:** a tree like `x`.
        """
        length, size = tree.global_norm(u), tree.global_norm(x)
        # The rounding of x is then 1e-5 of the direction in float32.
        step = jnp.where(size > 0, 0.001 * size, 1)
        usable = (length > 0) & jnp.isfinite(length) & jnp.isfinite(step)
        ahead = SimpleNamespace(share=jnp.where(usable, step / jnp.where(usable, length, 1), 0))
        y = tree.map_leaves(lambda now, x, u: x + now.share * u, (x, u), ahead)
        back = tree.map_leaves(lambda _, p, y: p - y, (self.nearest(now, y), y))
        # From a point of the set the way back is never longer. A start outside has no direction
        # along the set.
        usable &= tree.global_norm(back) <= 1.01 * step
        scale = SimpleNamespace(scale=jnp.where(usable, length / step, 0))
        return tree.map_leaves(lambda now, u, back: u + now.scale * back, (u, back), scale)

    @abc.abstractmethod
    def nearest(self, now: SimpleNamespace, x: PyTree) -> PyTree:
        """The nearest tree of the set.

        **Arguments:**

        - `now`: the hyperparameters at this step, by name.
        - `x`: a tree of at least one floating or complex array, in at least float32.

        **Returns:** a tree like `x`.
        """

    def __call__(self, x: PyTree, context: Context | None = None) -> PyTree:
        """Projects a tree.

        **Arguments:**

        - `x`: a tree of floating or complex arrays. `None` marks a hole.
        - `context`: the clock, if a number of the projection is a schedule.

        **Returns:** a tree like `x`.
        """
        tree.check_inexact(x)
        self.check(x)
        if not jax.tree.leaves(x):
            return x
        return tree.cast_like(self.nearest(self._at(context), tree.widened(x)), x)

    def along(self, x: PyTree, u: PyTree, context: Context | None = None) -> PyTree:
        """The part of a direction along the set.

        **Arguments:**

        - `x`: a tree in the set.
        - `u`: the direction, a tree like `x`.
        - `context`: as for a call.

        **Returns:** a tree like `x`, in at least float32.
        """
        if not jax.tree.leaves(x):
            return u
        return self.tangent(self._at(context), tree.widened(x), tree.widened(u))

    def _at(self, context: Context | None) -> SimpleNamespace:
        return SimpleNamespace(**read_numbers(self, context))

    def check(self, x: PyTree) -> None:
        """Raises an error for a tree that cannot be projected. `tx.project` calls it at binding.

        **Arguments:**

        - `x`: the tree, of which only structure, shapes and dtypes count.
        """
        if self.compares:
            check_real(
                x,
                f"{code(self)} compares numbers",
                "Select the real parameters, for example with "
                "`tx.project(fn, where=~sl.where.dtype(jnp.complexfloating))`.",
            )


def leaves_like(name: str, y: PyTree, x: PyTree) -> list[Any]:
    """The number or array of a tree like the model, or of a prefix of it, for each leaf of `x`."""
    must = f"{name} must be a tree like the one to project"
    leaves = values_like(y, x, (name, "the tree to project"), must)
    for (path, _), n in zip(jax.tree_util.tree_leaves_with_path(x), leaves, strict=True):
        if not eqx.is_array_like(n):
            raise TypeError(
                f"{name} must have a number or an array at '{dotted(path)}', got {n!r}."
            )
    return leaves
