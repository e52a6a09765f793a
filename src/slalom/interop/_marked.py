"""Marks the fields of an Optax state that belong to parameters, which Optax does not declare.

A part of the state with the structure of the parameters is put into a module with a mark. Slalom
then shards, saves, resets and describes it as it does the state of its own rules.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import tree
from .._core.state.marks import param_like, per_param
from ..tree.types import Params, Tracer, Updates
from ._optax import import_optax


class Moment(eqx.Module):
    """A part of the state with an array of the same shape for each parameter."""

    params: PyTree = param_like()


class Factors(eqx.Module):
    """A part of the state with an array of another shape for each parameter."""

    params: PyTree = per_param()


class Shared(eqx.Module):
    """A number next to moments, such as the count for their bias correction."""

    shared: Any = per_param()  # of no parameter alone, so that a reset of some is refused


def mark(state: PyTree, params: Params) -> PyTree:
    """The state of Optax with marks."""
    masked_node = import_optax("from_optax").MaskedNode
    structure = jax.tree.structure(params)
    shapes = [np.shape(x) for x in jax.tree.leaves(params)]

    def is_masked(x: Any) -> bool:
        return isinstance(x, masked_node)

    def like_params(node: Any) -> Any:
        leaves, own = jax.tree.flatten(node, is_leaf=is_masked)
        arrays = [x for x in leaves if not is_masked(x)]
        if own != structure or not arrays or not all(map(tree.is_array, arrays)):
            return None
        alike = all(
            is_masked(x) or (np.shape(x) == shape and tree.is_inexact(x))
            for x, shape in zip(leaves, shapes, strict=True)
        )
        # Every number has the structure of a single array; one of no dimensions says nothing.
        if jax.tree_util.all_leaves([node]) and (not alike or not np.ndim(node)):
            return None
        without = structure.unflatten([None if is_masked(x) else x for x in leaves])
        return Moment(without) if alike else Factors(without)

    def visit(node: Any) -> Any:
        found = like_params(node)
        if found is not None or jax.tree_util.all_leaves([node]):
            return node if found is None else found
        children, own = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        new = [visit(child) for child in children]
        if any(isinstance(x, Moment | Factors) for x in new):
            new = [Shared(x) if tree.is_array(x) else x for x in new]
        return own.unflatten(new)

    return visit(state)


def unmark(state: PyTree, updates: Updates) -> PyTree:
    """Undoes `mark`."""
    masked_node = import_optax("from_optax").MaskedNode
    structure = jax.tree.structure(updates)

    def plain(node: Any) -> Any:
        if isinstance(node, Shared):
            return node.shared
        if not isinstance(node, Moment | Factors):
            return node
        leaves = structure.flatten_up_to(node.params)
        return structure.unflatten([masked_node() if x is None else x for x in leaves])

    return jax.tree.map(plain, state, is_leaf=_is_marked)


def mark_as(before: PyTree, state: PyTree, updates: Updates) -> PyTree:
    """The state of Optax with the marks that it had before."""
    masked_node = import_optax("from_optax").MaskedNode
    structure = jax.tree.structure(updates)

    def marked(node: Any, x: Any) -> Any:
        if isinstance(node, Shared):
            return Shared(x)
        if not isinstance(node, Moment | Factors):
            return x
        leaves = structure.flatten_up_to(x)
        without = [None if isinstance(leaf, masked_node) else leaf for leaf in leaves]
        return type(node)(structure.unflatten(without))

    return jax.tree.map(marked, before, state, is_leaf=_is_marked)


def _is_marked(node: Any) -> bool:
    return isinstance(node, Moment | Factors | Shared)


def owned(state: PyTree, params: Params) -> PyTree:
    """The state as arrays that nothing else refers to, neither parameters nor closures of Optax.

    A training step donates the state, and must not donate anything else with it.
    """
    seen = {id(x) for x in jax.tree.leaves(params)}

    def own(x: Any) -> Any:
        if isinstance(x, bool | int | float | np.ndarray | np.generic):
            x = jnp.asarray(x)
        if not isinstance(x, jax.Array):
            return x
        if id(x) in seen or not isinstance(x, Tracer):
            x = jnp.copy(x)
        seen.add(id(x))
        return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x

    return jax.tree.map(own, state)
