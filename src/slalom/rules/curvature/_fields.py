"""Fields and checks that the rules of this folder share."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ... import tree
from ..._core.fields.declare import checked_field
from ..._core.text.messages import check_int, series
from ...tree.types import Params, PyTree, Scalar, Updates
from ._system import SOLVERS


def solver_field() -> Any:
    """Declares how systems are solved."""
    return checked_field(_check_solver, "auto")


def chunk_field() -> Any:
    """Declares an optional number of examples."""
    check = functools.partial(check_int, least=1, or_else=", a number of examples")
    return checked_field(check, None)


def _check_solver(name: str, solver: object) -> None:
    if solver not in SOLVERS and not callable(solver):
        choices = [*map(repr, SOLVERS), "a function of a matrix and a right-hand side"]
        raise ValueError(f"{name} must be {series(choices, 'or')}, got {solver!r}.")


def same(a: Params, b: Params) -> Bool[Array, ""]:
    """Whether two trees are equal."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    flags = [jnp.all(jnp.asarray(x, y.dtype) == y) for x, y in pairs]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def kept(params: Params, like: Params) -> Params:
    """A copy for the state: outside a trace, a cast may return the caller's buffer."""
    return jax.tree.map(lambda p, k: jnp.array(p, k.dtype, copy=True), params, like)


def last_changes(params: Params, updates: Updates, state: PyTree) -> tuple[Params, Updates]:
    """By how much parameters and gradients differ from those in the state; 0 in the first step."""

    def differences(now, p, last_p, u, last_u):
        return jnp.where(now.first, 0, p - last_p), jnp.where(now.first, 0, u - last_u)

    return tree.map_leaves(
        differences,
        (params, state.params, updates, state.updates),
        SimpleNamespace(first=state.age == 0),
    )


def first_scale(updates: Updates, params: Params) -> Scalar:
    """The factor of the first direction, which is the gradient, of a quasi-Newton rule."""
    norm = tree.global_norm(updates)
    size = jnp.asarray(tree.global_norm(params), norm.dtype)
    # A step shorter than a rounding of the parameters would not change them. A longer one than the
    # gradient would be wrong without a line search, so it is only as long as it needs to be.
    least = jnp.finfo(norm.dtype).eps ** 0.5 * jnp.maximum(size, 1)
    length = jnp.clip(norm, jnp.minimum(least, 1), 1)
    return jnp.where(norm == 0, 1, length / jnp.where(norm == 0, 1, norm))
