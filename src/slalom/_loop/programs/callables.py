"""Functions that carry arrays, as trees, so that their arrays are traced.

Equinox modules, their bound methods and `eqx.Partial` are trees already. `functools.partial` hides
its arrays from JAX. `jax.tree_util.Partial` shows its arguments, but not the arrays of its
function.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
from jaxtyping import PyTree

Function: TypeAlias = Callable[..., Any]


class Bound(eqx.Module):
    """A function with its first arguments and some keywords, all of them visible to JAX.

    **Arguments:**

    - `func`: a function, a tree that can be called, or `None` where `without_function` removed it.
    - `args`, `keywords`: the arguments.
    """

    func: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.func(*self.args, *args, **{**self.keywords, **keywords})


def as_tree(function: Function) -> Any:
    """A function as a tree that shows the arrays it carries. A plain function is a leaf."""
    if isinstance(function, functools.partial):
        return Bound(as_tree(function.func), function.args, dict(function.keywords))
    if isinstance(function, types.MethodType) and not _is_leaf(function.__self__):
        return Bound(function.__func__, (function.__self__,), {})
    return function


def without_function(tree: Any) -> tuple[Function, PyTree]:
    """A tree from `as_tree` as the plain function in it, and the tree with `None` in its place.

    The function of a module is its class.
    """
    if isinstance(tree, Bound):
        function, inner = without_function(tree.func)
        return function, Bound(inner, tree.args, tree.keywords)
    return (tree, None) if _is_leaf(tree) else (type(tree), tree)


def with_function(tree: PyTree, function: Function) -> Function:
    """Undoes `without_function`: the tree with the function in it, to call."""
    if isinstance(tree, Bound):
        inner = with_function(tree.func, function)
        return functools.partial(inner, *tree.args, **tree.keywords)
    return function if tree is None else tree


def _is_leaf(x: Any) -> bool:
    return jax.tree_util.all_leaves([x])
