"""How the updates of a transform are returned or added to the parameters.

`update` and `step` do the same work, but `update` returns the updates and `step` adds them to the
parameters. Each is a `Write`, which is passed down to the transform that computes the last updates.
A wrapper can pass down another one, to replace or to observe how parameters are written, as
`.record()` does.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .. import tree
from .._types import Params, Scalar, Updates


class Write(abc.ABC):
    """Returns updates, or adds them to the parameters.

    The result is a tree like the parameters with something at each leaf: the update, the new
    parameter, or either of them with an observation. It is computed leaf by leaf, so the
    results of a partition's groups can be merged.
    """

    @abc.abstractmethod
    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        """The result for these updates."""

    @abc.abstractmethod
    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        """The result of a step in which nothing runs.

        **Arguments:**

        - `params`: the parameters.
        - `shapes`: the result of a step in which something runs, as `jax.eval_shape` returns it.
        """

    @abc.abstractmethod
    def plain(self, result: PyTree) -> PyTree:
        """The updates or parameters in a result, without observations."""

    @abc.abstractmethod
    def new_params(self, params: Params, result: PyTree) -> Params:
        """The parameters that a result leads to."""

    @abc.abstractmethod
    def assigning(self, new: Params) -> "Write":
        """The same write, but with given new parameters in the place of the sum.

        Adding fn(p + u) − p to p would miss fn(p + u) by a rounding, and so leave a set that fn
        projects onto.
        """


class _Return(Write):
    """The updates themselves: what `update` returns."""

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        del params
        return updates

    def idle(self, params: Params | None, shapes: PyTree) -> Updates:
        del params
        return tree.zeros_of(shapes)

    def plain(self, result: PyTree) -> PyTree:
        return result

    def new_params(self, params: Params, result: PyTree) -> Params:
        return tree.add(params, result)

    def assigning(self, new: Params) -> Write:
        return self


class _Add(Write):
    """The parameters plus the updates: what `step` returns."""

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        return tree.add(params, updates)

    def idle(self, params: Params | None, shapes: PyTree) -> Params:
        del shapes
        return params

    def plain(self, result: PyTree) -> PyTree:
        return result

    def new_params(self, params: Params, result: PyTree) -> Params:
        del params
        return result

    def assigning(self, new: Params) -> Write:
        return _Assign(new)


RETURN, ADD = _Return(), _Add()


class _Assign(Write):
    """Given new parameters, whatever the updates."""

    def __init__(self, new: Params):
        self.new = new

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        del updates
        return tree.cast_like(self.new, params)

    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        return ADD.idle(params, shapes)

    def plain(self, result: PyTree) -> PyTree:
        return ADD.plain(result)

    def new_params(self, params: Params, result: PyTree) -> Params:
        return ADD.new_params(params, result)

    def assigning(self, new: Params) -> Write:
        return _Assign(new)


class _Measurement(NamedTuple):
    result: Any
    square: Array
    """The sum of the squares of the update."""


class MeasuredWrite(Write):
    """Another write that also measures the updates.

    The norm of what is added cannot be measured afterwards: subtracting the old parameters from
    the new ones loses small updates to rounding.

    **Arguments:**

    - `inner`: the write.
    """

    def __init__(self, inner: Write):
        self.inner = inner

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        structure = jax.tree.structure(updates)
        results = structure.flatten_up_to(self.inner(params, updates))
        squares = map(tree.squared_norm, jax.tree.leaves(updates))
        return structure.unflatten(map(_Measurement, results, squares))

    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        structure, results, squares = _unzip(shapes)
        held = self.inner.idle(params, structure.unflatten(results))
        zeros = [jnp.zeros(s.shape, s.dtype) for s in squares]
        return structure.unflatten(map(_Measurement, structure.flatten_up_to(held), zeros))

    def plain(self, result: PyTree) -> PyTree:
        return self.inner.plain(self.split(result)[0])

    def new_params(self, params: Params, result: PyTree) -> Params:
        return self.inner.new_params(params, self.split(result)[0])

    def assigning(self, new: Params) -> Write:
        return MeasuredWrite(self.inner.assigning(new))

    def split(self, result: PyTree) -> tuple[PyTree, Scalar]:
        """The result of the inner write, and the global norm of the updates."""
        structure, results, squares = _unzip(result)
        dtype = tree.accumulation_dtype(jnp.float32, *(x.dtype for x in squares))
        total = sum((tree.cast(x, dtype) for x in squares), jnp.zeros((), dtype))
        return structure.unflatten(results), tree.root(total)


def _unzip(result: PyTree) -> tuple[Any, list[Any], list[Any]]:
    """The structure of the parameters, and at each leaf what was written and what was measured."""
    pairs, structure = jax.tree.flatten(result, is_leaf=lambda x: isinstance(x, _Measurement))
    return structure, [pair.result for pair in pairs], [pair.square for pair in pairs]
