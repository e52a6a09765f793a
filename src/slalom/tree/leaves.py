"""A rule at every leaf; and trees that are cut and merged."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Real

from .dtypes import accumulation_dtype, canonical, cast, in_precision_of, promoting
from .paths import check_inexact, check_same_shapes, check_same_structure
from .tracing import traced_once
from .types import PyTree


def map_leaves(
    rule: Callable[..., Any],
    trees: tuple[PyTree, ...],
    now: SimpleNamespace | None = None,
    *,
    per_param: tuple[PyTree, ...] = (),
    like: tuple[PyTree, ...] = (),
) -> Any:
    """Applies `rule(now, *leaves, *tuples)` at every leaf of the trees.

    All values at a leaf arrive in that leaf's accumulation dtype, so a rule needs no casts. Leaves
    of equal shape and dtype share one trace of the rule.

    **Arguments:**

    - `rule`: a pure function that returns an array or a tuple of arrays (and of tuples of
        arrays).
    - `trees`: trees of one structure and equal shapes.
    - `now`: the numbers of this step by name, such as the hyperparameters that `self.at(context)`
        returns and the factors that are computed from them. Every leaf sees a 0-d array as it is;
        of a vector, with an entry per leaf in the order of the leaves, it sees its own entry.
        `None` stays `None`, and bools stay bools. Defaults to an empty namespace.
    - `per_param`: trees with a tuple of arrays, of any shapes, in place of each leaf.
    - `like`: for each array that `rule` returns, a tree whose dtypes it is cast to, such as the
        old moments for the new ones. Defaults to the accumulation dtype. To use the new moments
        for an update, pass them to a second rule: XLA can then overwrite the old ones.

    **Returns:** a tree, or as many trees as `rule` returns arrays.

    ```python
    >>> from types import SimpleNamespace
    >>> updates = {"w": jnp.array([3.0, 4.0])}
    >>> now = SimpleNamespace(factor=jnp.float32(2.0))
    >>> sl.tree.map_leaves(lambda now, u: now.factor * u, (updates,), now)
    {'w': Array([6., 8.], dtype=float32)}

    ```
    """
    check_same_structure(trees)
    structure = jax.tree.structure(trees[0])
    columns = [jax.tree.leaves(tree) for tree in trees]
    tuple_columns = [structure.flatten_up_to(tree) for tree in per_param]
    stored = [[canonical(x.dtype) for x in jax.tree.leaves(tree)] for tree in like]
    numbers = {} if now is None else vars(now)

    # Without annotations, which a type checker at run time would compile for each new function.
    def at_leaf(dtypes, numbers, leaves, tuples):
        result = in_accumulation_dtype(numbers, leaves, tuples)
        if not dtypes:
            return result
        if not isinstance(result, tuple):
            return cast(result, *dtypes)
        return tuple(cast(x, dtype) for x, dtype in zip(result, dtypes, strict=True))

    def in_accumulation_dtype(numbers, leaves, tuples):
        dtype = accumulation_dtype(*(x.dtype for x in leaves))
        numbers, arrays = in_precision_of((numbers, (*leaves, *tuples)), dtype)
        with promoting(dtype):
            return rule(SimpleNamespace(**numbers), *arrays)

    if not columns[0]:
        counts = (len(trees), len(per_param))
        return _of_no_leaves(in_accumulation_dtype, numbers, counts, structure.unflatten([]))
    at_leaf = traced_once(at_leaf, columns, static_argnums=0)
    per_leaf = {name: x for name, x in numbers.items() if x is not None and x.ndim > 0}
    results: list[Any] = []
    for i, leaves in enumerate(zip(*columns, strict=True)):
        tuples = tuple(column[i] for column in tuple_columns)
        result = at_leaf(
            tuple(column[i] for column in stored),
            numbers | {name: x[i] for name, x in per_leaf.items()} if per_leaf else numbers,
            leaves,
            tuples,
        )
        results.append(result)
    if isinstance(results[0], tuple):
        return tuple(structure.unflatten(column) for column in zip(*results, strict=True))
    return structure.unflatten(results)


def _of_no_leaves(
    rule: Callable[..., Any], numbers: dict[str, Any], counts: tuple[int, int], empty: PyTree
) -> Any:
    """As many empty trees as the rule returns when it is evaluated on scalars."""
    one = jax.ShapeDtypeStruct((), jnp.float32)
    scalars = {
        name: x if x is None else jax.ShapeDtypeStruct((), x.dtype) for name, x in numbers.items()
    }
    result = jax.eval_shape(rule, scalars, (one,) * counts[0], ((one,),) * counts[1])
    return (empty,) * len(result) if isinstance(result, tuple) else empty


def scale(tree: PyTree, factor: Real[Array, "*leaves"]) -> PyTree:
    """factor · tree, in the accumulation dtype."""
    return map_leaves(lambda now, x: x * now.factor, (tree,), SimpleNamespace(factor=factor))


def add(params: PyTree, updates: PyTree) -> PyTree:
    """params + updates, summed in the accumulation dtype and rounded once."""
    check_same_shapes(updates, params, "parameter")
    check_inexact(updates)

    def add_leaf(u, p):
        if jnp.iscomplexobj(u) and not jnp.iscomplexobj(p):
            raise TypeError(f"A {u.dtype} update cannot be added to a {p.dtype} parameter.")
        dtype = accumulation_dtype(p.dtype, u.dtype)
        return cast(jax.lax.add(cast(p, dtype), cast(u, dtype)), canonical(p.dtype))

    return jax.tree.map(add_leaf, updates, params)


def cut(tree: PyTree, keep: tuple[bool, ...]) -> PyTree:
    """The tree with `None` in place of the leaves that are not kept."""
    leaves, structure = jax.tree.flatten(tree)
    if keep == (False,) and jax.tree_util.treedef_is_leaf(structure):
        return ()  # The tree is one array, and `None` in its place would read as "not passed".
    return structure.unflatten([x if k else None for x, k in zip(leaves, keep, strict=True)])


def merge(structure: Any, pieces: Iterable[tuple[tuple[bool, ...], PyTree]]) -> PyTree:
    """Undoes complementary cuts of one tree of this structure.

    Anything may have taken the place of a leaf since then.

    **Arguments:**

    - `structure`: the structure of the whole tree.
    - `pieces`: the leaves that each cut has kept, and its result.
    """
    whole = structure.unflatten(range(structure.num_leaves))
    leaves: list[Any] = [None] * structure.num_leaves
    for keep, piece in pieces:
        at, inside = jax.tree.flatten(cut(whole, keep))
        for i, x in zip(at, inside.flatten_up_to(piece), strict=True):
            leaves[i] = x
    return structure.unflatten(leaves)


def put(tree: PyTree, keep: tuple[bool, ...], kept: PyTree) -> PyTree:
    """The tree with other leaves in place of those that a cut keeps."""
    others = tuple(not k for k in keep)
    return merge(jax.tree.structure(tree), ((keep, kept), (others, cut(tree, others))))
