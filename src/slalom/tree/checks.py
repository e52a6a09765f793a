"""What trees are refused, by the path of the leaf."""

import jax
import numpy as np
from jaxtyping import PyTree

from .._paths import dotted, first_difference
from .dtypes import is_array, is_inexact


def check_inexact(tree: PyTree) -> None:
    """Refuses a tree with a leaf that is no floating or complex array."""
    if all(map(is_inexact, jax.tree.leaves(tree))):
        return  # paths are for messages, and cost more than all else here
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not is_inexact(x):
            kind = f"an array of dtype {x.dtype}" if is_array(x) else f"of type {type(x).__name__}"
            raise TypeError(
                f"The leaf '{dotted(path)}' is {kind}; parameters and gradients are trees of "
                "floating or complex arrays. Bind the whole model with `sl.Optimizer(tx, model)`, "
                "which steps over everything else, or pass "
                "`eqx.filter(model, eqx.is_inexact_array)`."
            )


def check_same_structure(trees: tuple[PyTree, ...]) -> None:
    """Refuses trees that differ in structure or in a leaf's shape, by the path of the leaf."""
    first, *others = trees
    check_inexact(first)
    structure = jax.tree.structure(first)
    for other in others:
        if jax.tree.structure(other) != structure:
            differ = first_difference(first, other, ("the updates", "what meets them"))
            raise ValueError(
                "The updates have another structure than the state or the parameters that meet "
                f"them: {differ}. Pass gradients, state and parameters of one model."
            )
        check_same_shapes(first, other, "the state or parameter that meets it there")


def check_same_shapes(updates: PyTree, others: PyTree, what: str) -> None:
    """Refuses updates of other shapes than what meets them, by the path of the leaf."""
    if jax.tree.structure(updates) != jax.tree.structure(others):
        differ = first_difference(updates, others, ("the updates", "the parameters"))
        raise ValueError(f"The updates have another structure than the parameters: {differ}.")
    shapes = [[np.shape(x) for x in jax.tree.leaves(tree)] for tree in (updates, others)]
    if shapes[0] == shapes[1]:
        return
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, u), other in zip(leaves, jax.tree.leaves(others), strict=True):
        if np.shape(u) != np.shape(other):
            raise ValueError(
                f"The update at '{dotted(path)}' has shape {np.shape(u)}, but {what} has shape "
                f"{np.shape(other)}. Shapes must be equal: nothing is broadcast."
            )
