"""Compiled functions of an optimizer that take only those of its arrays that they read.

A call of a compiled function takes half a microsecond per argument. Most arrays of an optimizer are
moments, which its hyperparameters and metrics do not depend on.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun


class _Reading(NamedTuple):
    types: list[Any]
    """The types of all arrays."""
    positions: list[int]
    """The arrays that are read."""
    compiled: Callable[[list[Any]], Any]


def reading(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compiles a function of an optimizer.

    For an optimizer of shapes it returns shapes, and for one that was created under `vmap` a value
    for each run.
    """

    def of_runs(opt: Any) -> Any:
        return jax.vmap(function)(opt) if opt.arrays.count.ndim else function(opt)

    @functools.lru_cache(maxsize=128)
    def readings(structure: Any) -> list[_Reading]:
        del structure
        return []

    def read(opt: Any) -> Any:
        if isinstance(opt.arrays.count, jax.ShapeDtypeStruct):
            return jax.eval_shape(of_runs, opt)
        leaves, structure = jax.tree.flatten(opt)
        # As `jax.typeof`, which takes longer. Arrays of one program have the same objects as types.
        types = [getattr(x, "aval", None) or jax.typeof(x) for x in leaves]
        known = readings(structure)
        found = next((x for x in known if x.types == types), None)
        if found is None:
            found = _traced(lambda leaves: of_runs(structure.unflatten(leaves)), leaves, types)
            known.append(found)
        return found.compiled([leaves[i] for i in found.positions])

    return read


def _traced(function: Callable[[list[Any]], Any], leaves: list[Any], types: list[Any]) -> _Reading:
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(leaves)
    jaxpr = traced.jaxpr
    inputs = [v for equation in jaxpr.eqns for v in equation.invars]
    read = set(map(id, (*inputs, *jaxpr.outvars)))
    positions = [i for i, v in enumerate(jaxpr.invars) if id(v) in read]

    @jax.jit
    def compiled(arrays: list[Any]) -> Any:
        given: list[Any] = [None] * len(types)
        for i, x in zip(positions, arrays, strict=True):
            given[i] = x
        # Copied, because the next step may donate the state.
        results = map(jnp.copy, jaxpr_as_fun(traced)(*given))
        return jax.tree.structure(shapes).unflatten(results)

    return _Reading(types, positions, compiled)
