"""Inside a `jax.shard_map`, where each device may have numbers of its own and no norm is global.

JAX records in the type of an array over which mesh axes it varies, unless `check_vma=False`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from ...tree.paths import leaf_paths


def refuse_parts(who: str, *trees: PyTree) -> None:
    """Raises an error for trees whose norm would cover one device only.

    **Arguments:**

    - `who`: the name of what would compute it.
    - `trees`: the updates, and the parameters if they are known.
    """
    axes = _manual_axes()
    if not axes:
        return
    # The index of a device along an axis varies over it. If JAX does not say so, it says nothing.
    untold = [axis for axis in axes if axis not in _varies_over(jax.lax.axis_index(axis))]
    if untold:
        raise ValueError(
            f"{who} needs whole parameters, as for a norm, but inside a `jax.pmap`, or a "
            "`jax.shard_map` with `check_vma=False`, it is not known whether each device has all "
            f"of them along {_quoted(untold)}. Instead of `pmap`, shard the batch over a mesh and "
            "call the step under `jax.jit`: `jax.device_put(batch, jax.NamedSharding(mesh, "
            'jax.P("data")))`. Or return the averaged gradients and call `opt.step` outside. In a '
            "`shard_map`, `check_vma=True` suffices."
        )
    for tree in trees:
        for path, varying in _varying(tree, axes):
            raise ValueError(
                f"{who} needs whole parameters, as for a norm, but inside this `jax.shard_map` the "
                f"devices have different values at '{path}' along {_quoted(varying)}, so the "
                "result would be that of one device. If these are gradients, average them first: "
                f'`jax.lax.pmean(grads, "{varying[0]}")`. If the parameters are sharded, return '
                "the gradients from the `shard_map` and call `opt.step` outside it, where norms "
                "are global."
            )


def refuse_shards(who: str, tree: PyTree) -> None:
    """Raises an error for shards of arrays where the state covers whole arrays.

    **Arguments:**

    - `who`: the name of the transform.
    - `tree`: the parameters, or the updates.
    """
    mesh = jax.sharding.get_abstract_mesh()
    for path, varying in _varying(tree, mesh.manual_axes):
        raise ValueError(
            f"{who} needs whole parameters, because it stores blocks of whole arrays, but inside "
            f"this `jax.shard_map` each device has a part of '{path}' along {_quoted(varying)}. "
            "Return the gradients from the `shard_map` and call `opt.step` outside it, where each "
            "device stores its own part."
        )


def refuse_divided_examples(who: str, batch: PyTree, params: PyTree) -> None:
    """Raises an error for a batch along whose axes JAX adds up the gradients of parameters.

    **Arguments:**

    - `who`: the name of what needs the gradient of each example.
    - `batch`: the arrays of the batch.
    - `params`: the parameters.
    """
    axes = _manual_axes()
    divided = {axis for _, varying in _varying(params, axes) for axis in varying}
    for _, varying in _varying(batch, [axis for axis in axes if axis not in divided]):
        raise ValueError(
            f"{who} needs the gradient of each example, but inside this `jax.shard_map` the "
            f"devices have different examples along {_quoted(varying)} and the same parameters, "
            "so JAX adds up the gradients of one example of each device. Instead of `shard_map`, "
            "shard the batch and call the step under `jax.jit`: `jax.device_put(batch, "
            'jax.NamedSharding(mesh, jax.P("data")))`.'
        )


def _manual_axes() -> list[Any]:
    """The axes along which each device runs the code on its own, where there are several."""
    mesh = jax.sharding.get_abstract_mesh()
    return [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1]


def _varying(tree: PyTree, axes: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """The leaves that vary over some of these axes, with the axes."""
    for path, x in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        varying = [axis for axis in axes if axis in _varies_over(x)]
        if varying:
            yield path, varying


def _varies_over(x: PyTree) -> frozenset[Any]:
    aval: Any = jax.typeof(x)  # typed as any abstract value, but that of an array has this field
    return aval.manual_axis_type.varying


def _quoted(axes: list[Any]) -> str:
    return ", ".join(f"'{axis}'" for axis in axes)
