"""Predicts the bytes of a model and its optimizer on each device, before any of them exists."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from ... import tree
from ..._core.protocol.chain import first_link
from ..._core.protocol.parts import transforms
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.printing import bytes_as_text
from ...tree.paths import dotted
from ...tree.sharding import axis_names, full_spec, num_parts
from ...tree.types import PyTree, WhereLike
from ..binding.binding import by_path
from ..binding.optimizer import Optimizer
from ..sharding.placement import sharding_on, state_shardings
from ..sharding.shard import bytes_per_device, check_mesh, shard

_PASSED = {"params", "step", "value", "grad", "key"}
"""The inputs of a step that `plan` can make up."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes per device, as `sl.plan` computes them."""

    mesh: dict[str, int]
    """The size of each mesh axis."""
    params: int
    """The trained parameters."""
    frozen: int
    """All other arrays of the model."""
    grads: int
    """The gradients, with the shapes, dtypes and shardings of the parameters."""
    state: int
    """The arrays of the optimizer: its state, hyperparameters and step count."""
    system: int
    """The largest matrix of P × P that a step solves with, for P parameters, as Gauss–Newton rules
    in the form of the parameters do. 0 for rules without one."""
    scratch: int | None
    """The other allocations of the compiled optimizer step, or `None` if it was not compiled."""

    @property
    def total(self) -> int:
        """The sum of all of these. Activations are not included."""
        return sum(size or 0 for size in self._sizes.values())

    @property
    def _sizes(self) -> dict[str, int | None]:
        return {name: size for name, size in vars(self).items() if name != "mesh"}

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        words = {"params": "parameters", "grads": "gradients"}
        sizes = {words.get(name, name): size for name, size in self._sizes.items()}
        sizes["total"] = self.total
        lines = (
            f"{name:<10}  {'not compiled' if size is None else bytes_as_text(size):>12}"
            for name, size in sizes.items()
            if size != 0 or name not in ("frozen", "system")
        )
        return "\n".join([f"per device of a mesh with {axes}:", *lines])


def plan(
    tx: AbstractTransform[Any],
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    trainable: WhereLike | None = None,
    shard_state: str | None = None,
) -> Plan:
    """Computes how many bytes a model and its optimizer take on each device.

    An array of s bytes whose axes are sharded over mesh axes with sizes n₁, n₂, … takes
    s / (n₁ n₂ …) bytes on each device. State with the shape of a parameter is sharded like it.
    Sums of a parameter along some axes, such as the rows and columns of Adafactor and SM3, are
    sharded like the remaining axes. The factors of Shampoo, SOAP and Kron are divided among the
    devices that share their parameter, if one of their axes is divisible. All other state is
    replicated. Nothing is allocated.

    ```python
    >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
    >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    >>> model = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=rows)}
    >>> sl.plan(sl.adam(1e-3), model, mesh)
    per device of a mesh with data=8:
    parameters       8.39 MB
    gradients        8.39 MB
    state            16.8 MB
    scratch     not compiled
    total            33.6 MB

    ```

    **Arguments:**

    - `tx`: the transform.
    - `model`: any tree. Its leaves may be arrays or `jax.ShapeDtypeStruct`s. Their shardings must
        be `NamedSharding`s, of which only the spec is used; leaves without one are replicated.
    - `mesh`: the mesh, with the axes that the specs name. An `AbstractMesh` needs no devices. With
        a `Mesh`, the optimizer step is compiled for its devices to learn how much scratch memory
        it needs; `mesh.abstract_mesh` skips this.
    - `trainable`: which arrays to train, as in `Optimizer`.
    - `shard_state`: the mesh axis that `opt.shard_state` partitions the state over. Defaults to
        none.

    **Returns:** a `Plan` with the numbers of bytes `params`, `frozen`, `grads`, `state`, `system`,
    `scratch` and `total`. The first four are exact for arrays whose shardings stay as they are
    created. `system` is the largest matrix of P × P that a step solves with, which is whole on each
    device. With `form="auto"` of a Gauss–Newton rule it is an upper bound: fewer residuals than
    parameters make a smaller one. Systems of the size of the residuals depend on the batch, and are
    not included. `scratch` belongs to a step that donates parameters and state, as in
    `sl.train_step(..., donate="all")`; a step that keeps the old parameters needs their bytes once
    more. It is `None` for an abstract mesh, and for transforms that need per-example gradients, the
    loss as a function, or inputs of their own.

    **Raises:** `ValueError` for a spec that names an axis that the mesh does not have, or that does
    not divide its array; `TypeError` for shardings of another kind.
    """
    check_mesh("sl.plan", mesh)
    abstract = jax.tree_util.tree_map_with_path(lambda path, x: _placed(path, x, mesh), model)
    place_of = by_path(abstract)
    opt = Optimizer(tx, abstract, trainable=trainable)
    params = {path: place_of[path] for path in opt.binding.paths}
    trained = opt.binding.params.unflatten([*params.values()])
    opt = _opt_placed(opt, trained, params, mesh)
    if shard_state is not None:
        opt, _ = shard(opt, mesh, shard_state, params)
    bytes_of_params = bytes_per_device(params.values())
    return Plan(
        mesh=dict(mesh.shape),
        params=bytes_of_params,
        frozen=bytes_per_device(filter(_is_shape, place_of.values())) - bytes_of_params,
        grads=bytes_of_params,
        state=bytes_per_device(jax.tree.leaves(opt)),
        system=_system(tx, trained),
        scratch=_scratch(opt, abstract, trained) if isinstance(mesh, Mesh) else None,
    )


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _system(tx: AbstractTransform[Any], params: PyTree) -> int:
    """The largest system that a part solves. Systems of different groups do not live together."""
    sizes: list[int] = []

    def look(params: PyTree) -> None:
        sizes.extend(part.module.system(part.params) for part in transforms(tx, params=params))

    jax.eval_shape(look, params)
    return max(sizes, default=0)


# --- sizes and shardings ------------------------------------------------------------------------


def _placed(path: Any, leaf: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The shape and dtype of an array of the model, and its sharding on the mesh."""
    if _is_shape(leaf) or tree.is_array(leaf):
        shape = np.shape(leaf)
        # JAX may store an array of NumPy in a smaller dtype.
        extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        dtype = leaf.dtype if extended else tree.canonical(leaf.dtype)
        spec = _spec(dotted(path), leaf, dict(mesh.shape))
        at = NamedSharding(mesh, tree.canonical_spec(mesh, spec, len(shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=at)
    return leaf


def _spec(path: str, leaf: Any, axes: dict[str, int]) -> tuple[Any, ...]:
    """The sharding of a leaf of the model, with an entry for each of its axes."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return (None,) * len(leaf.shape)
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"The sharding of '{path}' is a {type(sharding).__name__}, which names no mesh axes. "
            "Use `jax.sharding.NamedSharding(mesh, spec)`."
        )
    spec = tuple(full_spec(sharding.spec, len(leaf.shape)))
    for i, entry in enumerate(spec):
        for name in axis_names(entry):
            if name not in axes:
                raise ValueError(
                    f"'{path}' is sharded over the mesh axis '{name}', but the mesh has the axes "
                    f"{', '.join(map(repr, axes))}. Use the names of the mesh in the "
                    "`PartitionSpec`."
                )
        parts = num_parts(axes, entry)
        if leaf.shape[i] % parts:
            raise ValueError(
                f"'{path}' has shape {tuple(leaf.shape)}, and its axis {i} cannot be divided into "
                f"{parts} equal parts along {', '.join(map(repr, axis_names(entry)))}. Shard "
                "another axis, or pad the array."
            )
    return spec


def _opt_placed(
    opt: Optimizer, trained: PyTree, params: dict[str, Any], mesh: Mesh | AbstractMesh
) -> Optimizer:
    """An optimizer of shapes, with their shardings."""

    # While it is traced, a state has the explicit axes of any mesh in its types.
    def shardings_of(transform: AbstractTransform[Any], trained: PyTree) -> PyTree:
        return state_shardings(transform, transform.init(trained), params, mesh)

    shardings = eqx.filter_eval_shape(shardings_of, opt.transform, trained)

    def placed(x: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return opt._map_state(
        lambda state: jax.tree.map(placed, state, shardings),
        lambda x: placed(x, sharding_on(x, mesh)),
    )


# --- scratch ------------------------------------------------------------------------------------


def _scratch(opt: Optimizer, model: PyTree, params: PyTree) -> int | None:
    """The scratch memory of the compiled step on each device, where the backend says it."""
    needs = {name for part in transforms(opt.transform) for name in part.module.needs}
    if not needs <= _PASSED or first_link(opt.transform).per_example:
        return None
    is_trained = jax.tree.map(lambda x: x is not None, params, is_leaf=lambda x: x is None)
    others, static = eqx.partition(eqx.filter(model, is_trained, inverse=True), _is_shape)

    def step(params: Any, opt: Any, others: Any, grads: Any, value: Any, key: Any) -> Any:
        model = eqx.combine(params, others, static)
        new, opt = opt.step(model, grads, value=value, grad=grads, key=key)
        return eqx.filter(new, is_trained), opt

    homes = jax.tree.map(lambda x: x.sharding, (params, opt))
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=homes)
    inputs = jax.eval_shape(lambda: (jnp.float32(0), jax.random.key(0)))
    lowered = compiled.lower(params, opt, others, params, *inputs)
    usage = lowered.compile().memory_analysis()
    return None if usage is None else int(usage.temp_size_in_bytes)
