"""Returns the updates of a transform, or adds them to the parameters.

`update` and `step` do the same work, but `update` returns the updates and `step` adds them to the
parameters. Each is a `Writer`, which is passed down to the transform that computes the last
updates. A wrapper can pass down another one, to replace or to observe how parameters are written,
as `.record()` and `.write(policy)` do.
"""

import abc
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import tree
from ...tree.rounding import same_bits
from ...tree.types import Params, PyTree, Scalar, Updates


class Writer(abc.ABC):
    """Returns updates, or adds them to the parameters.

    `AbstractTransform.run` gets one, and passes it on to the transform inside.

    The result is a tree like the parameters with something at each leaf: the update, the new
    parameter, or either of them with an observation. It is computed leaf by leaf, so the
    results of a partition's groups can be merged.
    """

    returns: ClassVar[bool] = False
    """Whether the result is the updates."""

    @abc.abstractmethod
    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        """The result for these updates."""

    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        """The result of a step in which nothing runs.

        **Arguments:**

        - `params`: the parameters.
        - `shapes`: the result of a step in which something runs, as `jax.eval_shape` returns it.
        """
        del shapes
        return params

    def plain(self, result: PyTree) -> PyTree:
        """The updates or parameters in a result, without observations."""
        return result

    def new_params(self, params: Params, result: PyTree) -> Params:
        """The parameters that a result leads to."""
        del params
        return result

    @abc.abstractmethod
    def assigning(self, new: Params) -> "Writer":
        """The same write, but with given new parameters in place of the sum.

        Adding fn(p + u) − p to p would miss fn(p + u) by a rounding, and so leave a set that fn
        projects onto.
        """

    @property
    def returning(self) -> "Writer":
        """The write for transforms before the last one: it returns their updates."""
        return RETURN

    def full(self, params: PyTree) -> PyTree:
        """The parameters as rules see them, in the precision in which they are kept."""
        return params

    def at_rest(self, params: PyTree) -> PyTree:
        """As `full`, with leaves that are decoded when they are read."""
        return params

    def in_place(self, params: Params | None) -> PyTree | None:
        """A tree of leaves at rest, in which rules that run leaf by leaf may write new parameters
        in place of the old ones. `None` if this write needs the updates."""
        del params

    def cut(self, keep: tuple[bool, ...]) -> "Writer":
        """This write for a transform that acts on some of the parameters only."""
        del keep
        return self

    def onto(self, policy: "Writer") -> "Writer":
        """This write, with a policy in place of the addition in the parameters' dtype."""
        return policy


class Return(Writer):
    """Returns the updates themselves. `update` uses it, and so do all links of a chain but the
    last.

    **Arguments:**

    - `under`: the write of the last link, if that is a policy, which knows the parameters in full.
    """

    returns: ClassVar[bool] = True

    def __init__(self, under: Writer | None = None):
        self.under = under

    @property
    def returning(self) -> Writer:
        return self

    def full(self, params: PyTree) -> PyTree:
        return params if self.under is None else self.under.full(params)

    def at_rest(self, params: PyTree) -> PyTree:
        return params if self.under is None else self.under.at_rest(params)

    def cut(self, keep: tuple[bool, ...]) -> Writer:
        return self if self.under is None else Return(self.under.cut(keep))

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        del params
        return updates

    def idle(self, params: Params | None, shapes: PyTree) -> Updates:
        del params
        return tree.zeros_of(shapes)

    def new_params(self, params: Params, result: PyTree) -> Params:
        return tree.add(params, result)

    def assigning(self, new: Params) -> Writer:
        return self

    def onto(self, policy: Writer) -> Writer:
        raise TypeError(
            f"`.write({policy})` writes half-precision parameters itself: updates that are rounded "
            "to their dtype would be lost when they are added. Write "
            "`model, opt = opt.step(model, grads)` instead of `opt.update(model, grads)`. A "
            "transform around `.write` must pass its own `write` on."
        )


class _Add(Writer):
    """Adds the updates to the parameters, as `step` does."""

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        return tree.add(params, updates)

    def in_place(self, params: Params | None) -> PyTree | None:
        return params

    def assigning(self, new: Params) -> Writer:
        return _Assign(new)


RETURN, ADD = Return(), _Add()


class _Assign(Writer):
    """Given new parameters, whatever the updates."""

    def __init__(self, new: Params):
        self.new = new

    def cut(self, keep: tuple[bool, ...]) -> Writer:
        return _Assign(tree.cut(self.new, keep))

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        del updates
        return tree.cast_like(self.new, params)

    def assigning(self, new: Params) -> Writer:
        return _Assign(new)

    def onto(self, policy: Writer) -> Writer:
        return policy.assigning(self.new)


class _Measurement(NamedTuple):
    result: Any
    square: Array
    """The sum of the squares of the update."""
    counts: tuple[Array, Array]
    """The number of nonzero entries of the update, and how many of these changed nothing."""


class MeasuredWrite(Writer):
    """Another write that also measures the updates.

    The norm of what is added cannot be measured afterwards: subtracting the old parameters from
    the new ones loses small updates to rounding.

    **Arguments:**

    - `inner`: the write.
    """

    def __init__(self, inner: Writer):
        self.inner = inner

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        structure = jax.tree.structure(updates)
        result = self.inner(params, updates)
        counts = [(jnp.zeros((), jnp.int32),) * 2] * structure.num_leaves
        if params is not None:
            pairs = (self.inner.full(params), self.inner.new_params(params, result), updates)
            counts = list(map(_counts, *map(jax.tree.leaves, pairs)))
            if self.inner is ADD:
                # Added again after the comparison, in place. XLA would otherwise keep a copy of the
                # old parameters for it.
                result = self.inner(params, tree.after(updates, counts))
        squares = map(tree.squared_norm, jax.tree.leaves(updates))
        results = structure.flatten_up_to(result)
        return structure.unflatten(map(_Measurement, results, squares, counts))

    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        structure, results, measured = _unzip(shapes)
        held = self.inner.idle(params, structure.unflatten(results))
        zeros = tree.zeros_of(measured)
        pairs = zip(structure.flatten_up_to(held), zeros, strict=True)
        return structure.unflatten([_Measurement(x, *counts) for x, counts in pairs])

    def plain(self, result: PyTree) -> PyTree:
        return self.inner.plain(self.split(result)[0])

    def new_params(self, params: Params, result: PyTree) -> Params:
        return self.inner.new_params(params, self.split(result)[0])

    def assigning(self, new: Params) -> Writer:
        return MeasuredWrite(self.inner.assigning(new))

    @property
    def returning(self) -> Writer:
        return self.inner.returning

    def full(self, params: PyTree) -> PyTree:
        return self.inner.full(params)

    def at_rest(self, params: PyTree) -> PyTree:
        return self.inner.at_rest(params)

    def cut(self, keep: tuple[bool, ...]) -> Writer:
        return MeasuredWrite(self.inner.cut(keep))

    def onto(self, policy: Writer) -> Writer:
        return MeasuredWrite(self.inner.onto(policy))

    def split(self, result: PyTree) -> tuple[PyTree, Scalar, Scalar]:
        """The result of the inner write, the global norm of the updates, and the share of their
        nonzero numbers that changed no parameter."""
        structure, results, measured = _unzip(result)
        squares = [square for square, _ in measured]
        dtype = tree.accumulation_dtype(jnp.float32, *(x.dtype for x in squares))
        total = sum((tree.cast(x, dtype) for x in squares), jnp.zeros((), dtype))
        nonzero, lost = (
            sum((counts[i].astype(dtype) for _, counts in measured), jnp.zeros((), dtype))
            for i in range(2)
        )
        share = lost / jnp.maximum(nonzero, 1)
        return structure.unflatten(results), tree.root(total), share


def _unzip(result: PyTree) -> tuple[Any, list[Any], list[Any]]:
    """The structure of the parameters, and at each leaf the written and the measured values."""
    pairs, structure = jax.tree.flatten(result, is_leaf=lambda x: isinstance(x, _Measurement))
    return structure, [x.result for x in pairs], [(x.square, x.counts) for x in pairs]


def _counts(before: Array, after: Array, update: Array) -> tuple[Array, Array]:
    """The number of nonzero entries of an update, and how many of these changed nothing."""
    nonzero = update != 0
    lost = nonzero & same_bits(before, after)
    # One reduction of pairs: XLA:CPU rewrites a sum of bools to one over windows, which needs a
    # buffer of ints as large as the parameter.
    return jax.lax.reduce(
        (nonzero.astype(jnp.int32), lost.astype(jnp.int32)),
        (jnp.zeros((), jnp.int32),) * 2,
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(update.ndim)),
    )
