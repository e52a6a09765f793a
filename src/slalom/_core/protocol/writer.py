"""Returns the updates of a transform, or adds them to the parameters.

`update` and `step` do the same work, but `update` returns the updates and `step` adds them to the
parameters. Each has a `Writer`, which is passed down to the transform that computes the last
updates. A wrapper can pass down another one, to replace or to observe how parameters are written,
as `.write(policy)` and `.record()` do.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ... import tree
from ...tree.rounding import same_bits
from ...tree.types import Params, PyTree, Scalar
from ..engine.encoded import Encoded, is_encoded


@dataclasses.dataclass(frozen=True, eq=False)
class Writer:
    """Returns updates, or adds them to the parameters.

    `AbstractTransform.run` gets one, and passes it on to the transform inside.

    The result is a tree like the parameters with something at each leaf: the update, the new
    parameter, or either of them with a measurement. It is computed leaf by leaf, so the
    results of a partition's groups can be merged.

    **Arguments:**

    - `adds`: whether the updates are added, and not returned.
    - `encoded`: under a policy of `.write`, each half-precision parameter with what its dtype
        cannot hold. The updates are added to it in full precision, and the sum is encoded.
    - `seeds`: the seeds of the random bits of each parameter, if the policy rounds at random.
    - `new`: parameters to write in place of the sum.
    - `measures`: whether the updates are measured. The norm of what is added cannot be measured
        afterwards: subtracting the old parameters from the new ones loses small updates to
        rounding.
    """

    adds: bool = True
    encoded: Sequence[Encoded | None] | None = None
    seeds: Sequence[Any] | None = None
    new: Sequence[Array] | None = None
    measures: bool = False

    @property
    def returns(self) -> bool:
        """Whether the result is the updates."""
        return not self.adds and not self.measures

    def __call__(self, params: PyTree, updates: PyTree) -> PyTree:
        """The result for these updates."""
        result = self._written(params, updates)
        if not self.measures:
            return result
        leaves, structure = jax.tree.flatten(updates)
        zero = jnp.zeros((), jnp.int32)
        counts = [(zero, zero)] * len(leaves)
        if params is not None:
            triples = (self.full(params), self.new_params(params, result), updates)
            counts = list(map(_counts, *map(jax.tree.leaves, triples)))
            if self.adds and self.encoded is None and self.new is None:
                # Added again after the comparison, in place. XLA would otherwise keep a copy of the
                # old parameters for it.
                result = self._written(params, tree.after(updates, counts))
        squares = map(tree.squared_norm, leaves)
        results = structure.flatten_up_to(result)
        return structure.unflatten(map(_Measured, results, squares, counts))

    def _written(self, params: PyTree, updates: PyTree) -> PyTree:
        """The result without measurements."""
        if not self.adds:
            return updates
        new = self.new
        if new is None:
            new = jax.tree.leaves(tree.add(self.full(params), updates))
        old, structure = jax.tree.flatten(self.at_rest(params), is_leaf=is_encoded)
        written: list[Any] = []
        before = None
        for x, p, seeds in zip(new, old, self.seeds or [None] * len(old), strict=True):
            x = tree.cast(x, tree.canonical(p.dtype))
            if is_encoded(p):
                x = before = p.codec.written(p, x, seeds, before)
            written.append(x)
        return structure.unflatten(written)

    def idle(self, params: Params | None, shapes: PyTree) -> PyTree:
        """The result of a step in which nothing runs.

        **Arguments:**

        - `params`: the parameters.
        - `shapes`: the result of a step in which something runs, as `jax.eval_shape` returns it.
        """
        if not self.adds:
            return tree.zeros_of(shapes)
        held = self.at_rest(params)
        if not self.measures:
            return held
        return jax.tree.map(
            lambda x, p: tree.zeros_of(x)._replace(result=p), shapes, held, is_leaf=_is_measured
        )

    def plain(self, result: PyTree) -> PyTree:
        """The updates or parameters in a result, without what belongs to them."""
        return without_kept(without_measurements(result))

    def new_params(self, params: Params, result: PyTree) -> Params:
        """The parameters that a result leads to."""
        result = without_measurements(result)
        return _full(result) if self.adds else tree.add(self.full(params), result)

    def assigning(self, new: Params) -> "Writer":
        """The same write, but with given new parameters in place of the sum.

        Adding fn(p + u) − p to p would miss fn(p + u) by a rounding, and so leave a set that fn
        projects onto.
        """
        return dataclasses.replace(self, new=jax.tree.leaves(new)) if self.adds else self

    @property
    def returning(self) -> "Writer":
        """The write for transforms before the last one: it returns their updates."""
        return Writer(adds=False, encoded=self.encoded)

    def full(self, params: PyTree) -> PyTree:
        """The parameters as rules see them, in the precision in which they are kept."""
        return _full(self.at_rest(params))

    def at_rest(self, params: PyTree) -> PyTree:
        """As `full`, with leaves that are decoded when they are read."""
        if self.encoded is None:
            return params
        leaves, structure = jax.tree.flatten(params)
        pairs = zip(leaves, self.encoded, strict=True)
        return structure.unflatten(
            [
                p if x is None else dataclasses.replace(x, arrays=x.arrays | {"param": p})
                for p, x in pairs
            ]
        )

    def in_place(self, params: Params | None) -> PyTree | None:
        """A tree of leaves at rest, in which rules that run leaf by leaf may write new parameters
        in place of the old ones. `None` if this write needs the updates."""
        is_sum = self.adds and not self.measures and self.new is None
        return self.at_rest(params) if is_sum and self.seeds is None else None

    def cut(self, keep: tuple[bool, ...]) -> "Writer":
        """This write for a transform that acts on some of the parameters only."""
        columns = {"encoded": self.encoded, "seeds": self.seeds, "new": self.new}
        kept = {
            name: [x for x, k in zip(column, keep, strict=True) if k]
            for name, column in columns.items()
            if column is not None
        }
        return dataclasses.replace(self, **kept) if kept else self

    def onto(self, policy: "Writer") -> "Writer":
        """This write, with a policy in place of the addition in the parameters' dtype."""
        return dataclasses.replace(self, encoded=policy.encoded, seeds=policy.seeds)


RETURN, ADD = Writer(adds=False), Writer()


def _full(params: PyTree) -> Params:
    return jax.tree.map(lambda x: _decode(x) if is_encoded(x) else x, params, is_leaf=is_encoded)


@jax.jit  # shared by the leaves of one shape, since tracing takes time in Python
def _decode(x: Encoded) -> Array:
    return x.decode()


def without_kept(result: PyTree) -> PyTree:
    """A result without what a policy keeps of each parameter."""
    return jax.tree.map(
        lambda x: x.arrays["param"] if is_encoded(x) else x, result, is_leaf=is_encoded
    )


# --- measurements ---------------------------------------------------------------------------


class _Measured(NamedTuple):
    result: Any
    square: Array
    """The sum of the squares of the update."""
    counts: tuple[Array, Array]
    """The number of nonzero entries of the update, and how many of these changed nothing."""


def _is_measured(x: object) -> bool:
    return isinstance(x, _Measured)


def without_measurements(result: PyTree) -> PyTree:
    """A result without measurements, if it has any."""
    return jax.tree.map(lambda x: x.result if _is_measured(x) else x, result, is_leaf=_is_measured)


def measurements(result: PyTree) -> tuple[Scalar, Scalar]:
    """The global norm of the updates, and the share of their nonzero numbers that changed no
    parameter."""
    leaves = jax.tree.leaves(result, is_leaf=_is_measured)
    dtype = tree.accumulation_dtype(jnp.float32, *(x.square.dtype for x in leaves))

    def total(numbers: Any) -> Scalar:
        return sum((tree.cast(x, dtype) for x in numbers), jnp.zeros((), dtype))

    nonzero, lost = (total(x.counts[i] for x in leaves) for i in range(2))
    return tree.root(total(x.square for x in leaves)), lost / jnp.maximum(nonzero, 1)


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
