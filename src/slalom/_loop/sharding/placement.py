"""The placement of state and parameters on a mesh.

`state_shardings` places fresh state. Tracers do not show where arrays are, so an optimizer keeps a
`StateSharding`, and the trace of a step applies it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ..._core.protocol.transform import AbstractTransform
from ..._core.state.marks import PARAM_LIKE, SPREAD
from ..._core.state.slots import Slot, slots
from ...tree.sharding import (
    axis_names,
    canonical_spec,
    constrain,
    full_spec,
    mesh_sharding,
    num_parts,
)
from ...tree.types import PyTree, Tracer


def sharding_on(x: Any, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The sharding of an array on this mesh; replicated if it is not on it yet."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh in (mesh, mesh.abstract_mesh):
        return sharding if sharding.mesh == mesh else _on(mesh, [*sharding.spec], np.ndim(x))
    return _on(mesh, (), np.ndim(x))


def _on(mesh: Mesh | AbstractMesh, spec: Sequence[Any], ndim: int) -> NamedSharding:
    return NamedSharding(mesh, canonical_spec(mesh, spec, ndim))


def state_shardings(
    transform: AbstractTransform[Any],
    state: Any,
    params: Mapping[str, Any],
    mesh: Mesh | AbstractMesh,
) -> Any:
    """The sharding of each array of a fresh state, which follows from its slot, shape and
    parameter.

    **Arguments:**

    - `transform`, `state`: the transform and its state: arrays, or traced ones.
    - `params`: the parameters by path: arrays, or shapes with shardings.
    - `mesh`: the mesh.

    **Returns:** a tree of shardings like the state.
    """
    leaves, structure = jax.tree.flatten(state)
    result = []
    for slot, x in zip(slots(transform, state, [*params]), leaves, strict=True):
        sharding = sharding_on(jax.typeof(x) if isinstance(x, Tracer) else x, mesh)
        param: Any = params.get(slot.param_among(params) or "")
        of_param = getattr(param, "sharding", None)
        if isinstance(of_param, NamedSharding):
            spec = _spec(slot, np.shape(x), np.shape(param), of_param)
            derived = _on(of_param.mesh, spec, np.ndim(x))
            # Explicit axes are in the types that a rule computes with.
            if _explicit(derived, np.ndim(x)) == _explicit(sharding, np.ndim(x)):
                sharding = derived
        result.append(sharding)
    return structure.unflatten(result)


def _explicit(sharding: NamedSharding, ndim: int) -> list[list[str]]:
    """The explicit axes of the mesh that each axis of an array is divided along."""
    mesh = sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = map(axis_names, full_spec(sharding.spec, ndim))
    return [[name for name in entry if kinds[name] == AxisType.Explicit] for entry in entries]


def _spec(
    slot: Slot, shape: tuple[int, ...], whole: tuple[int, ...], of_param: NamedSharding
) -> Sequence[Any]:
    mesh, spec = of_param.mesh, full_spec(of_param.spec, len(whole))
    if slot.mark == SPREAD:
        return _spread(shape, spec, mesh)
    if shape[1:] == whole:
        return [None, *spec]  # the history of L-BFGS
    if slot.mark == PARAM_LIKE and shape[:-1] == whole[: len(shape) - 1]:
        return divided(shape, spec, mesh)  # the array of a codec may have another last axis
    if len(shape) != len(whole) or any(n not in (1, m) for n, m in zip(shape, whole, strict=True)):
        return ()
    # The axes of a sum along some of them have size 1.
    return [e if n == m else None for e, n, m in zip(spec, shape, whole, strict=True)]


def _spread(shape: Sequence[int], spec: Sequence[Any], mesh: Mesh | AbstractMesh) -> list[Any]:
    """The division of an array among the devices that share a parameter with this spec.

    What divides an axis of the parameter divides the next axis of the array that it can. Explicit
    axes of a mesh do not, because they would be part of the types that a rule computes with.
    """
    entries = [] if AxisType.Explicit in mesh.axis_types else list(filter(axis_names, spec))
    result: list[Any] = []
    for size in shape:
        parts = num_parts(mesh.shape, entries[0]) if entries else 0
        result.append(entries.pop(0) if parts and size and size % parts == 0 else None)
    return result


def divided(shape: Sequence[int], spec: Sequence[Any], mesh: Mesh | AbstractMesh) -> list[Any]:
    """The entries of a spec that divide the axes of an array."""
    pairs = zip(shape, spec, strict=False)
    return [entry if n % num_parts(mesh.shape, entry) == 0 else None for n, entry in pairs]


class StateSharding(NamedTuple):
    """The shardings of an optimizer's arrays and of its parameters. The static part of a
    binding."""

    mesh: Mesh | AbstractMesh
    axis: str | None
    """The axis over which `Optimizer.shard_state` partitioned the state."""
    state: tuple[NamedSharding | None, ...]
    """The sharding of each array of the state, and of the count; `None` for one that is not on the
    mesh."""
    params: tuple[NamedSharding | None, ...]
    """The sharding of each parameter; `None` where no state shows it."""
    updates: tuple[NamedSharding | None, ...]
    """The sharding of each update: with the state that it is derived from, or with its
    parameter."""


def remembered(state: Iterable[Any], params: PyTree) -> StateSharding | None:
    """The current shardings of these arrays and parameters; `None` without a mesh with automatic
    axes."""
    of_params = tuple(map(mesh_sharding, jax.tree.leaves(params)))
    mesh = next((s.mesh for s in of_params if s is not None), None)
    if mesh is None or AxisType.Auto not in mesh.axis_types:
        return None  # explicit axes are in the types, which every trace sees
    of_state = tuple(map(mesh_sharding, state))
    return StateSharding(mesh, None, of_state, of_params, of_params)


def constrained(arrays: PyTree, shardings: tuple[NamedSharding | None, ...]) -> PyTree:
    """Traced arrays with these shardings."""
    leaves, structure = jax.tree.flatten(arrays)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return arrays  # inside a `shard_map`, where each device has its own part
    pairs = zip(leaves, shardings, strict=True)
    return structure.unflatten(
        [constrain(x, s) if isinstance(x, Tracer) and s is not None else x for x, s in pairs]
    )
