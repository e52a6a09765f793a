"""A rule at every leaf; and trees cut apart and put together."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Real

from .._types import Scalar, under_jit
from .checks import check_inexact, check_same_shapes, check_same_structure
from .dtypes import accumulation_dtype, canonical, cast, in_precision_of, real_dtype


def map_leaves(
    rule: Callable[..., Any],
    trees: tuple[PyTree, ...],
    scalars: tuple[Scalar, ...] = (),
    per_leaf: tuple[Real[Array, "*leaves"], ...] = (),
    per_param: tuple[PyTree, ...] = (),
    like: tuple[PyTree, ...] = (),
) -> Any:
    """Applies `rule(*leaves, *tuples, *scalars, *entries)` at every leaf of the trees.

    Everything that meets at a leaf arrives in that leaf's accumulation dtype, so a rule is
    written without a cast. Leaves of equal shape and dtype share one trace of the rule.

    **Arguments:**

    - `rule`: a pure function of arrays that returns an array or a tuple of arrays (and of
        tuples of arrays).
    - `trees`: trees of one structure and equal shapes; the first one gives the structure.
    - `scalars`: 0-d arrays that every leaf sees.
    - `per_leaf`: numbers that follow from ages: vectors with an entry for each leaf, in the
        order of the leaves, or scalars where all leaves are of one age.
    - `per_param`: trees with a tuple of arrays, of any shapes, in the place of each leaf.
    - `like`: for each array that `rule` returns a tree in whose dtypes it is returned, such as the
        old moments for the new ones. Derive an update from what is stored, in a rule of its own:
        were it derived from wider numbers, XLA would copy the old moments to compute these again.

    **Returns:** a tree, or as many trees as `rule` returns arrays, in the accumulation dtype or as
    `like` says.

    ```python
    >>> updates = {"w": jnp.array([3.0, 4.0])}
    >>> sl.tree.map_leaves(lambda u, s: u * s, (updates,), (jnp.float32(2.0),))
    {'w': Array([6., 8.], dtype=float32)}

    ```
    """
    check_same_structure(trees)
    structure = jax.tree.structure(trees[0])
    columns = [jax.tree.leaves(tree) for tree in trees]
    besides = [structure.flatten_up_to(tree) for tree in per_param]
    stored = [[canonical(x.dtype) for x in jax.tree.leaves(tree)] for tree in like]

    def at_leaf(
        dtypes: tuple[np.dtype, ...],
        leaves: tuple[Array, ...],
        tuples: tuple[Any, ...],
        numbers: tuple[Array, ...],
    ) -> Any:
        made = in_wide(leaves, tuples, numbers)
        if not dtypes:
            return made
        if not isinstance(made, tuple):
            return cast(made, *dtypes)
        return tuple(cast(x, dtype) for x, dtype in zip(made, dtypes, strict=True))

    def in_wide(
        leaves: tuple[Array, ...], tuples: tuple[Any, ...], numbers: tuple[Array, ...]
    ) -> Any:
        dtype = accumulation_dtype(*(x.dtype for x in leaves))
        real = real_dtype(dtype)
        numbers = tuple(cast(s, real) for s in numbers)
        leaves = tuple(in_precision_of(x, dtype) for x in leaves)
        tuples = tuple(tuple(in_precision_of(x, dtype) for x in arrays) for arrays in tuples)
        if dtype == real:
            return rule(*leaves, *tuples, *numbers)
        # Under strict promotion, which users may choose, real times complex would be refused.
        with jax.numpy_dtype_promotion("standard"):
            return rule(*leaves, *tuples, *numbers)

    if any(under_jit(x) for column in columns for x in column):
        # Tracing costs 2 ms a leaf in Python; a jit traces once per shape, and XLA inlines it (an
        # `inline=True` would copy its equations for every leaf). Outside of a trace it would
        # compile once per call instead, since `at_leaf` is new in every call.
        at_leaf = jax.jit(at_leaf, static_argnums=0)
    results = [
        at_leaf(
            tuple(column[i] for column in stored),
            leaves,
            tuple(column[i] for column in besides),
            (*scalars, *(x if x.ndim == 0 else x[i] for x in per_leaf)),
        )
        for i, leaves in enumerate(zip(*columns, strict=True))
    ]
    if results and isinstance(results[0], tuple):
        return tuple(structure.unflatten(column) for column in zip(*results, strict=True))
    if not results:
        one = jax.ShapeDtypeStruct((), jnp.float32)
        numbers = len(scalars) + len(per_leaf)
        arguments = [one] * len(trees) + [(one,)] * len(per_param) + [one] * numbers
        return _no_leaves(rule, structure, arguments)
    return structure.unflatten(results)


def _no_leaves(rule: Callable[..., Any], structure: Any, arguments: list[Any]) -> Any:
    """What `map_leaves` returns for trees without a leaf: as many empty trees as it would."""
    result = jax.eval_shape(rule, *arguments)
    empty = structure.unflatten([])
    return tuple(empty for _ in result) if isinstance(result, tuple) else empty


def add(params: PyTree, updates: PyTree) -> PyTree:
    """params + updates: summed in the accumulation dtype, rounded once to the parameters'."""
    check_same_shapes(updates, params, "the parameter there")
    check_inexact(updates)

    def add_leaf(u: Any, p: Any) -> Array:
        if jnp.iscomplexobj(u) and not jnp.iscomplexobj(p):
            raise TypeError(f"A {u.dtype} update cannot be added to a {p.dtype} parameter.")
        dtype = accumulation_dtype(p.dtype, u.dtype)
        return cast(jax.lax.add(cast(p, dtype), cast(u, dtype)), canonical(p.dtype))

    return jax.tree.map(add_leaf, updates, params)


def cut(tree: PyTree, keep: tuple[bool, ...]) -> PyTree:
    """The tree with holes at the leaves that are not kept."""
    leaves, structure = jax.tree.flatten(tree)
    if keep == (False,) and jax.tree_util.treedef_is_leaf(structure):
        return ()  # a model that is one array: `None` in its place would read as not given
    return structure.unflatten([x if k else None for x, k in zip(leaves, keep, strict=True)])


def merge(structure: Any, keep: tuple[bool, ...], kept: PyTree, rest: PyTree) -> PyTree:
    """Undoes a pair of complementary cuts of one tree of this structure.

    Anything may have taken the place of a leaf since then.
    """
    whole = structure.unflatten(range(structure.num_leaves))
    others = tuple(not k for k in keep)
    inside = iter(jax.tree.structure(cut(whole, keep)).flatten_up_to(kept))
    outside = iter(jax.tree.structure(cut(whole, others)).flatten_up_to(rest))
    return structure.unflatten([next(inside if k else outside) for k in keep])
