"""Where state and parameters are. Tracers do not show it, so the trace of a step applies it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ...tree.types import PyTree, Tracer
from .mesh import constrain, mesh_sharding


class StateSharding(NamedTuple):
    """Where the arrays of an optimizer and of its parameters are. The static part of a binding."""

    mesh: Mesh | AbstractMesh
    axis: str | None
    """The axis over which `Optimizer.shard_state` partitioned the state."""
    state: tuple[NamedSharding | None, ...]
    """The sharding of each array of the state, and of the count; `None` for one that is not on the
    mesh."""
    params: tuple[NamedSharding | None, ...]
    """The sharding of each parameter; `None` where no state shows it."""
    grads: tuple[NamedSharding | None, ...]
    """The sharding of the state that each gradient is added to."""

    def of_updates(self) -> tuple[NamedSharding | None, ...]:
        """Where each update is: with the state that it is derived from, or with its parameter."""
        pairs = zip(self.grads, self.params, strict=True)
        return tuple(param if grad is None else grad for grad, param in pairs)

    def constrain_grads(self, grads: PyTree) -> PyTree:
        """Gradients that are reduced only to the shard that updates the state."""
        return _constrained(grads, self.grads)

    def constrain_params(self, params: PyTree) -> PyTree:
        """New parameters, or updates, with the sharding of the parameters."""
        return _constrained(params, self.params)

    def constrain_state(self, arrays: list[Any]) -> list[Any]:
        """New state with the sharding of the old one."""
        return _constrained(arrays, self.state)


def remembered(state: Iterable[Any], params: PyTree) -> StateSharding | None:
    """Where these arrays and parameters are now; `None` without a mesh with automatic axes."""
    homes = tuple(map(mesh_sharding, jax.tree.leaves(params)))
    mesh = next((home.mesh for home in homes if home is not None), None)
    if mesh is None or AxisType.Auto not in mesh.axis_types:
        return None  # explicit axes are in the types, which every trace sees
    own = tuple(map(mesh_sharding, state))
    return StateSharding(mesh, None, own, homes, (None,) * len(homes))


def _constrained(arrays: PyTree, shardings: tuple[NamedSharding | None, ...]) -> PyTree:
    leaves, structure = jax.tree.flatten(arrays)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return arrays  # inside a `shard_map`, where each device has its own part
    pairs = zip(leaves, shardings, strict=True)
    return structure.unflatten(
        [constrain(x, s) if isinstance(x, Tracer) and s is not None else x for x, s in pairs]
    )
