"""Rules for matrices: the layout of each leaf, and stacks of matrices that are computed at once.

Large matrices are processed one after the other, which needs the scratch memory of one. Small ones
of equal shape are stacked, since one alone does not keep a processor busy.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...tree.paths import leaf_paths
from ...tree.types import Params
from ...where.layout import Layout, Matrix, layouts
from ..text.printing import public_name

_SMALL = 2**16
_SMALL_ON_ACCELERATORS = 2**20
"""The largest number of entries of a matrix that is stacked with others on one device."""

_STACK = 2**22
"""The largest number of entries of a stack, on one device."""


def is_small(size: int) -> bool:
    """Whether a matrix with so many entries is processed together with others on one device."""
    return size <= (_SMALL if jax.default_backend() == "cpu" else _SMALL_ON_ACCELERATORS)


class StackGroup(NamedTuple):
    """Stacks of matrices to compute with at once."""

    members: list[int]
    """The positions of its stacks."""
    numbers: list[int]
    """The number of matrices in each stack."""
    size: int
    """The number of entries of the largest matrix."""

    def divided(self, results: PyTree) -> Iterator[tuple[int, int, PyTree]]:
        """For each stack its position, its number of matrices, and its part of the results."""
        begin = 0
        for i, number in zip(self.members, self.numbers, strict=True):
            part = results
            if self.members[1:]:
                part = jax.tree.map(lambda x, a=begin, b=begin + number: x[a:b], results)
            yield i, number, part
            begin += number


def joined(stacks: Sequence[PyTree]) -> PyTree:
    """One stack of all matrices."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs) if xs[1:] else xs[0], *stacks)


def stack_groups(stacks: Sequence[PyTree]) -> Iterator[StackGroup]:
    """All small matrices of equal shapes at once, and stacks of large ones in turn.

    **Arguments:**

    - `stacks`: trees with a leading axis of matrices.
    """
    kinds: dict[Any, list[int]] = {}
    numbers: list[int] = []
    for i, stack in enumerate(stacks):
        arrays = jax.tree.leaves(stack)
        kinds.setdefault(tuple((x.shape[1:], x.dtype) for x in arrays), []).append(i)
        numbers.append(len(arrays[0]))
    for kind, members in kinds.items():
        size = max(math.prod(shape) for shape, _ in kind)
        most = max(1, _STACK // max(1, size)) if is_small(size) else 0
        for group in limited_groups(members, numbers, most):
            yield StackGroup(group, [numbers[i] for i in group], size)


def limited_groups(
    members: Sequence[int], numbers: Sequence[int], most: int
) -> Iterator[list[int]]:
    """The members in groups of at most so many matrices, and larger ones by themselves."""
    group: list[int] = []
    for i in members:
        if group and sum(numbers[j] for j in (*group, i)) > most:
            yield group
            group = []
        group.append(i)
    yield group


def of_matrices(function: Callable[..., Any], stack: PyTree) -> PyTree:
    """`function(matrix)` for each matrix of a stack: small ones at once, large ones in turn.

    **Arguments:**

    - `function`: a function of a tree of matrices.
    - `stack`: the tree with a leading axis of matrices.
    """
    arrays = jax.tree.leaves(stack)
    if len(arrays[0]) == 1:
        result = function(jax.tree.map(lambda x: x[0], stack))
        return jax.tree.map(lambda x: x[None], result)
    small = is_small(max(math.prod(x.shape[1:]) for x in arrays))
    return jax.vmap(function)(stack) if small else jax.lax.map(function, stack)


# --- which matrices ---------------------------------------------------------------------------


def matrices(rule: object, params: Params) -> tuple[Matrix, ...]:
    """The layout of each leaf as matrices, in order.

    **Arguments:**

    - `rule`: a transform, perhaps with the field `layout`.
    - `params`: the parameters, or updates.

    **Returns:** a `Matrix` for each leaf.

    **Raises:** `ValueError` for a leaf that is not a matrix of a layer, such as a vector.
    """
    of_leaves = layouts_in_blocks(rule, params)
    refuse_unequal(type(rule).__name__, params, of_leaves)
    return tuple(layout.matrix for layout in of_leaves if layout.matrix is not None)


def layouts_in_blocks(rule: object, params: Params) -> tuple[Layout, ...]:
    """The layout of each leaf, for a rule that takes each of its `blocks` as a matrix.

    **Raises:** `ValueError` for a leaf that is not a matrix of a layer.
    """
    of_leaves = layouts(params, getattr(rule, "layout", None))
    for path, layout in zip(leaf_paths(params), of_leaves, strict=True):
        if layout.matrix is None:
            raise ValueError(_not_a_matrix(type(rule), path, layout))
    return of_leaves


def refuse_unequal(who: str, params: Params, of_leaves: Sequence[Layout]) -> None:
    """Raises `ValueError` for layouts in unequal blocks, which few rules support."""
    for path, layout in zip(leaf_paths(params), of_leaves, strict=True):
        if layout.unequal is not None:
            raise ValueError(
                f"{who} cannot read '{path}' in blocks of unequal sizes, as `sl.Orthogonalize` "
                "does. Give it a layout of equal blocks, or of one matrix, or split the parameter "
                "in the model."
            )


def matrices_or_none(rule: object, params: Params) -> tuple[Matrix | None, ...]:
    """The layout of each leaf as matrices, in order; `None` for leaves that are no matrix of a
    layer."""
    return tuple(layout.matrix for layout in layouts(params, getattr(rule, "layout", None)))


def _not_a_matrix(rule: type, path: str, layout: Layout) -> str:
    reason = layout.not_a_matrix
    message = f"{rule.__name__} takes matrices, and '{path}' is {reason}. "
    letters = {2: "io", 3: "sio", 4: "oikk", 5: "oikkk"}.get(len(layout.shape))
    where = f"sl.where.path({path!r})" if path else "sl.where.everything()"
    if letters is not None and (layout.letters is None or layout.guessed or layout.axes("v")):
        message += (
            "If it is a matrix to you, say which axes are outputs (o), inputs (i), a kernel (k) "
            f"and a stack (s): `{public_name(rule)}(..., layout={{{where}: {letters!r}}})`. "
            "Otherwise g"
        )
    else:
        message += "G"
    return (
        f"{message}ive it another rule: "
        f"`sl.adamw(1e-3).partition({{sl.where.matrix(): {public_name(rule)}(...) | "
        "sl.ScaleByLearningRate(1e-3)})`."
    )


def on_automatic_axes(function: Callable[..., Any], like: PyTree, *args: PyTree) -> PyTree:
    """`function(*given)`, where explicit axes of a mesh are automatic.

    The products of a rule for matrices would be refused on explicit axes, because the shardings of
    their results would be a guess, and its factorizations need whole matrices.

    **Arguments:**

    - `function`: a function of trees.
    - `like`: a tree with the shardings of the results.
    - `args`: its arguments.
    """
    types = [jax.typeof(x) for x in jax.tree.leaves(like)]
    meshes = [t.sharding.mesh for t in types if any(t.sharding.spec)]
    if not meshes:
        return function(*args)
    # Arrays outside of the mesh, such as numbers of the state, are whole on it afterwards.
    shardings = jax.tree.map(
        lambda x: jax.NamedSharding(meshes[0], jax.typeof(x).sharding.spec), like
    )
    arrays, static = eqx.partition(args, eqx.is_array)

    def run(arrays: PyTree) -> PyTree:
        return function(*eqx.combine(arrays, static))

    return jax.sharding.auto_axes(run, out_sharding=shardings)(arrays)
