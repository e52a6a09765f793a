"""How many bytes a model and its optimizer take on each device, before any of them exists."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from ... import tree
from ..._core.engine.encoded import is_encoded
from ..._core.protocol.chain import first_link
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.marks import SPREAD
from ..._core.state.slots import Slot, slots
from ..._core.state.walk import transforms
from ..._core.text.printing import bytes_as_text
from ...tree.fresh import axis_names, full_spec, num_parts
from ...tree.paths import dotted, example, leaf_paths
from ...tree.types import PyTree
from ...where.resolve import WhereLike
from ..binding.optimizer import Optimizer
from ..sharding.mesh import spread_spec
from ..sharding.shard import shard

_PASSED = {"params", "step", "value", "grad", "key"}
"""The inputs of a step that `plan` can make up."""

Spec = tuple[Any, ...]
"""The mesh axes that each axis of an array is sharded over."""


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
    """What else the compiled optimizer step allocates, or `None` if it was not compiled."""

    @property
    def total(self) -> int:
        """The sum of all of these. Activations are not included."""
        return (
            self.params + self.frozen + self.grads + self.state + self.system + (self.scratch or 0)
        )

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        scratch = "not compiled" if self.scratch is None else bytes_as_text(self.scratch)
        rows = [
            ("parameters", bytes_as_text(self.params)),
            *([("frozen", bytes_as_text(self.frozen))] if self.frozen else []),
            ("gradients", bytes_as_text(self.grads)),
            ("state", bytes_as_text(self.state)),
            *([("system", bytes_as_text(self.system))] if self.system else []),
            ("scratch", scratch),
            ("total", bytes_as_text(self.total)),
        ]
        lines = (f"{name:<10}  {size:>12}" for name, size in rows)
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
    not included. `scratch` belongs to a step that donates parameters and state, such as that of
    `sl.train_step(..., donate="all")`; a step that keeps the old parameters needs their bytes once
    more. It is `None` for an abstract mesh, and for transforms that need per-example gradients, the
    loss as a function, or inputs of their own.

    **Raises:** `ValueError` for a spec that names an axis that the mesh does not have, or that does
    not divide its array; `TypeError` for shardings of another kind.
    """
    axes = dict(mesh.shape)
    abstract = jax.tree.map(_abstract, model)
    opt = Optimizer(tx, abstract, trainable=trainable)
    paths, leaves = leaf_paths(abstract), jax.tree.leaves(abstract)
    specs = {
        path: _spec(path, before, axes)
        for path, before, leaf in zip(paths, jax.tree.leaves(model), leaves, strict=True)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    }
    sizes = dict(zip(paths, leaves, strict=True))
    trained = [p for p in leaf_paths(example(opt.binding.params)) if p in specs]
    bytes_of = {path: _bytes(sizes[path], spec, axes) for path, spec in specs.items()}
    params = sum(bytes_of[path] for path in trained)
    own = _opt_specs(opt, trained, specs, sizes, mesh)
    if shard_state is not None:
        opt = _partitioned(opt, own, trained, specs, sizes, mesh, shard_state)
        own = [tuple(x.sharding.spec) for x in jax.tree.leaves(opt)]
    scratch = None
    if isinstance(mesh, Mesh) and _can_step(opt.transform):
        scratch = _scratch(opt, own, abstract, specs, trained, mesh)
    return Plan(
        mesh=axes,
        params=params,
        frozen=sum(bytes_of.values()) - params,
        grads=params,
        state=sum(_bytes(x, spec, axes) for x, spec in zip(jax.tree.leaves(opt), own, strict=True)),
        system=_system(tx, opt.binding.params, sizes),
        scratch=scratch,
    )


def _system(tx: AbstractTransform[Any], structure: Any, sizes: dict[str, Any]) -> int:
    """The largest system that a part solves; those of different groups do not live together."""
    found: list[int] = []

    def look(params: PyTree) -> None:
        found.extend(part.module.system(part.params) for part in transforms(tx, params=params))

    jax.eval_shape(look, structure.unflatten([sizes[p] for p in leaf_paths(example(structure))]))
    return max(found, default=0)


# --- sizes and shardings ------------------------------------------------------------------------


def _abstract(leaf: Any) -> Any:
    """The shape and dtype of an array, which JAX may store in a smaller dtype than NumPy."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if not tree.is_array(leaf):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), tree.canonical(leaf.dtype))


def _spec(path: str, leaf: Any, axes: dict[str, int]) -> Spec:
    """How a leaf of the model is sharded, with an entry for each of its axes."""
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


def _bytes(x: Any, spec: Spec, axes: dict[str, int]) -> int:
    """The bytes of an array on each device."""
    parts = math.prod(num_parts(axes, entry) for entry in spec)
    return math.prod(x.shape) * x.dtype.itemsize // parts


def _opt_specs(
    opt: Optimizer,
    trained: Sequence[str],
    specs: dict[str, Spec],
    sizes: dict[str, Any],
    mesh: Mesh | AbstractMesh,
) -> list[Spec]:
    """How each array of an optimizer is sharded."""
    state = jax.tree.leaves(opt.state, is_leaf=is_encoded)
    arrays = [(x, _blocks(leaf)) for leaf in state for x in jax.tree.leaves(leaf)]
    of_state = [
        _state_spec(slot, leaf.shape, specs, sizes, trained, blocks, mesh)
        for slot, (leaf, blocks) in zip(
            slots(opt.transform, opt.state, trained), arrays, strict=True
        )
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    # The arrays of the transform come first, and the step count last.
    rules = [(None,) * len(x.shape) for x in jax.tree.leaves(opt.arrays.transform)]
    return [*rules, *of_state, ()]


def _blocks(leaf: Any) -> int | None:
    """The number of blocks in a row of an encoded leaf; `None` for an array."""
    if not is_encoded(leaf):
        return None
    return min((x.shape[-1] for x in jax.tree.leaves(leaf) if x.shape), default=0)


def _state_spec(
    slot: Slot,
    shape: Sequence[int],
    specs: dict[str, Spec],
    sizes: dict[str, Any],
    trained: Sequence[str],
    blocks: int | None,
    mesh: Mesh | AbstractMesh,
) -> Spec:
    """How a leaf of the state is sharded."""
    param = slot.param_among(trained)
    if param is None:
        return (None,) * len(shape)
    of_param = specs[param], tuple(sizes[param].shape)
    if slot.mark == SPREAD:
        return spread_spec(shape, specs[param], mesh)
    if blocks is not None:
        return _derived_in_blocks(tuple(shape), *of_param, blocks, dict(mesh.shape))
    return _derived(tuple(shape), *of_param)


def _derived_in_blocks(
    shape: tuple[int, ...], spec: Spec, param: tuple[int, ...], blocks: int, axes: dict[str, int]
) -> Spec:
    """How an array of an encoded leaf is sharded. Its last axis may have an entry per block, or
    several numbers of a block in each entry."""
    first = len(shape) - 1
    if 0 <= first < len(param) - 1 and shape[:-1] == param[:first]:
        # The axes from `first` on were joined, since the last one is shorter than a block. Of what
        # shards them, that of the first one remains where it divides blocks, or a single one. (XLA
        # may keep more; this is never less than what is stored.)
        whole = blocks == 1 and shape[-1] == math.prod(param[first:])
        kept, parts = [], 1
        for name in axis_names(spec[first]):
            if blocks % (parts * axes[name]) == 0 or whole:
                parts *= axes[name]
                kept.append(name)
        return (*spec[:first], tuple(kept) if shape[-1] % parts == 0 else ())
    if len(shape) != len(param) or not shape or shape[:-1] != param[:-1]:
        return _derived(shape, spec, param)
    # What shards an axis is divided among the blocks first, then among the numbers of a block that
    # share an entry, and then among its entries. It is lost where it divides an entry.
    shared = param[-1] // max(1, shape[-1])
    kept, parts, lost = [], 1, 1
    for name in axis_names(spec[-1]):
        if shape[-1] == param[-1] or blocks % (parts * axes[name]) == 0:
            parts *= axes[name]
            kept.append(name)
        elif shared % (lost * axes[name]) == 0:
            lost *= axes[name]
        elif shape[-1] // blocks % axes[name] == 0:
            kept.append(name)
    return (*spec[:-1], tuple(kept))


def _derived(shape: tuple[int, ...], spec: Spec, param: tuple[int, ...]) -> Spec:
    """How state of this shape is sharded that belongs to a parameter with this spec and shape."""
    if len(shape) > len(param) and shape[1:] == param:
        return (None, *spec)  # the history of L-BFGS
    if len(shape) == len(param) and all(
        n in (1, full) for n, full in zip(shape, param, strict=True)
    ):
        # The parameter's own shape, or that of a sum, whose summed axes have size 1.
        return tuple(
            e if n == full else None for e, n, full in zip(spec, shape, param, strict=True)
        )
    return (None,) * len(shape)


def _partitioned(
    opt: Optimizer,
    own: Sequence[Spec],
    trained: Sequence[str],
    specs: dict[str, Spec],
    sizes: dict[str, Any],
    mesh: Mesh | AbstractMesh,
    axis: str,
) -> Optimizer:
    """An optimizer of shapes, with the shardings after `shard_state`."""
    leaves, structure = jax.tree.flatten(opt.arrays)
    arrays = structure.unflatten(
        [_placed(x, spec, mesh) for x, spec in zip(leaves, own, strict=True)]
    )
    params = {path: _placed(sizes[path], specs[path], mesh) for path in trained}
    arrays, binding, _ = shard(arrays, opt.binding, mesh, axis, params)
    return Optimizer._from_fields(arrays, binding)


def _placed(x: Any, spec: Spec, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    home = NamedSharding(mesh, tree.canonical_spec(mesh, spec, len(spec)))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)


# --- scratch ------------------------------------------------------------------------------------


def _can_step(transform: AbstractTransform[Any]) -> bool:
    needs = {name for part in transforms(transform) for name in part.module.needs}
    return needs <= _PASSED and not first_link(transform).per_example


def _scratch(
    opt: Optimizer,
    opt_specs: Sequence[Spec],
    model: PyTree,
    specs: dict[str, Spec],
    trained: Sequence[str],
    mesh: Mesh,
) -> int | None:
    """The scratch memory of the compiled step on each device, where the backend says it."""

    key_paths, structure = jax.tree_util.tree_flatten_with_path(model)
    leaves = {dotted(key_path): leaf for key_path, leaf in key_paths}
    arrays = {path: _placed(leaves[path], spec, mesh) for path, spec in specs.items()}
    params = {path: arrays[path] for path in trained}
    others = {path: x for path, x in arrays.items() if path not in params}
    arrays, bound_structure = jax.tree.flatten(opt)
    own = [_placed(x, spec, mesh) for x, spec in zip(arrays, opt_specs, strict=True)]
    bound = bound_structure.unflatten(own)
    scalar = jax.ShapeDtypeStruct((), np.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))

    def step(params: Any, opt: Any, others: Any, grads: Any, value: Any, key: Any) -> Any:
        filled = {**leaves, **others}
        whole = structure.unflatten([params.get(path, filled[path]) for path in leaves])
        tangent = structure.unflatten([grads.get(path) for path in leaves])
        after, opt = opt.step(whole, tangent, value=value, grad=tangent, key=key)
        new = dict(zip(leaves, structure.flatten_up_to(after), strict=True))
        return {path: new[path] for path in params}, opt

    homes = jax.tree.map(lambda x: x.sharding, (params, bound))
    compiled = jax.jit(step, donate_argnums=(0, 1), out_shardings=homes)
    lowered = compiled.lower(params, bound, others, params, scalar, key)
    usage = lowered.compile().memory_analysis()
    return None if usage is None else int(usage.temp_size_in_bytes)
