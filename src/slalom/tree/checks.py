"""Checks of trees; the errors name the path of the leaf."""

import jax
import numpy as np

from .dtypes import is_array, is_inexact
from .paths import dotted, first_difference
from .types import PyTree


def check_inexact(tree: PyTree) -> None:
    """Raises if a leaf is not a floating or complex array."""
    if all(map(is_inexact, jax.tree.leaves(tree))):
        return  # Paths are only needed for messages, and cost more than all else here.
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not is_inexact(x):
            if isinstance(x, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"The leaf '{dotted(path)}' is a `jax.ShapeDtypeStruct`, and `init` makes "
                    "arrays. Write `eqx.filter_eval_shape(tx.init, params)` for an abstract state, "
                    "or `sl.Optimizer(tx, model)`, which takes abstract models."
                )
            kind = f"an array of dtype {x.dtype}" if is_array(x) else f"of type {type(x).__name__}"
            raise TypeError(
                f"The leaf '{dotted(path)}' is {kind}; parameters and gradients must be trees "
                "of floating or complex arrays. Create the optimizer with the whole model, "
                "`sl.Optimizer(tx, model)`, which skips everything else, or pass "
                "`eqx.filter(model, eqx.is_inexact_array)`."
            )


def check_same_structure(trees: tuple[PyTree, ...]) -> None:
    """Raises if the trees differ in structure or in the shape of a leaf."""
    first, *others = trees
    check_inexact(first)
    structure = jax.tree.structure(first)
    for other in others:
        if jax.tree.structure(other) != structure:
            differ = first_difference(first, other, ("the updates", "the state or parameters"))
            raise ValueError(
                f"The updates differ in structure from the state or parameters: {differ}. Pass "
                "gradients, state and parameters of the same model."
            )
        check_same_shapes(first, other, "the state or parameter there")


def check_same_shapes(updates: PyTree, others: PyTree, what: str) -> None:
    """Raises if updates differ from `others` in structure or in the shape of a leaf."""
    if jax.tree.structure(updates) != jax.tree.structure(others):
        differ = first_difference(updates, others, ("the updates", "the parameters"))
        raise ValueError(f"The updates differ in structure from the parameters: {differ}.")
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
