"""The base of all projections."""

import abc
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .. import tree
from .._core.fields.declare import read_numbers
from .._core.protocol.context import Context
from .._core.protocol.parts import AbstractDeclared
from .._core.text.printing import code
from ..tree.paths import dotted, first_difference
from ..tree.types import PyTree


class AbstractProjection(AbstractDeclared):
    """A projection of trees. A subclass declares its numbers and writes `nearest`.

    The numbers are hyperparameters: inside `tx.project` they are traced and listed in
    `opt.hyperparams`, and they can be schedules.
    """

    compares: ClassVar[bool] = False
    """Whether it compares numbers, which complex ones do not allow."""

    is_box: ClassVar[bool] = False
    """Whether the set is a box, with a lower and an upper bound of each number."""

    @property
    def is_manifold(self) -> bool:
        """Whether the set is smooth, with a tangent space at each point."""
        return type(self).tangent is not AbstractProjection.tangent

    def tangent(self, now: SimpleNamespace, x: PyTree, u: PyTree) -> PyTree:
        """The part of a direction along the set, for sets that are smooth.

        `.project` then passes on gradients and updates along the set only.

        **Arguments:**

        - `now`: as for `nearest`.
        - `x`: a tree in the set, as for `nearest`.
        - `u`: the direction, a tree like `x`.

        **Returns:** a tree like `x`.
        """
        del now, x
        return u

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
        """The part of a direction along the set; all of it for a set that is not smooth.

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
        for path, leaf in jax.tree_util.tree_leaves_with_path(x):
            if self.compares and jnp.iscomplexobj(leaf):
                raise TypeError(
                    f"{code(self)} compares numbers, and the leaf '{dotted(path)}' is "
                    f"{leaf.dtype}. Select the real parameters, for example with "
                    "`tx.project(fn, where=~sl.where.dtype(jnp.complexfloating))`."
                )


def leaves_like(name: str, own: PyTree, x: PyTree) -> list[Any]:
    if jax.tree.structure(own) != jax.tree.structure(x):
        differ = first_difference(own, x, (name, "the tree to project"))
        raise ValueError(f"{name} must be a tree like the one to project: {differ}.")
    return jax.tree.leaves(own)
