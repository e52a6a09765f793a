"""Initial state, shaped like the parameters."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from .checks import check_inexact
from .dtypes import accumulation_dtype, canonical, real_dtype, storage_dtype, sum_dtype
from .types import Params, PyTree, Tracer, under_jit


def full_like(params: Params, dtype: Callable[[np.dtype], Any], value: Any = 0) -> PyTree:
    """A constant, shaped and sharded like the parameters; `dtype` maps the dtype of each leaf."""
    check_inexact(params)

    def full(x):
        zeros = _zeros_like(x, dtype(canonical(x.dtype)))
        # The value is added to zeros because `jnp.full_like` would share the buffer of the value
        # with a 0-d leaf.
        return zeros if isinstance(value, int) else zeros + jnp.asarray(value, zeros.dtype)

    return jax.tree.map(full, params)


def _zeros_like(x: Any, dtype: Any) -> Array:
    """Zeros with the shape and sharding of `x`, and a strong dtype."""
    if isinstance(x, Tracer):
        zeros = jnp.zeros_like(x, dtype=dtype)
        # A tracer does not show how automatic axes shard it, but XLA shards what is computed from
        # it alike. The condition is always false, also for NaN, which XLA does not know.
        never = jnp.real(x) > jnp.inf
        return jax.lax.select(never, jnp.ones_like(zeros), zeros) if under_jit(x) else zeros
    home = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return _compiled_zeros(home)(np.shape(x), np.dtype(dtype))


@functools.lru_cache(maxsize=256)
def _compiled_zeros(home: Any) -> Any:
    # A compiled call takes a tenth of the time of an eager `jnp.zeros`, and creates sharded zeros
    # in place.
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=home, inline=True)


def zeros_like(params: Params, dtype: Callable[[np.dtype], Any] = np.dtype) -> PyTree:
    """Zeros, shaped and sharded like the parameters.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: a function from a parameter's dtype to that of its zeros. Defaults to the same
        dtype.

    **Returns:** a tree like the parameters, in which no two leaves share a buffer.
    """
    return full_like(params, dtype)


def stacked_zeros(params: Params, size: int, dtype: Callable[[np.dtype], Any]) -> PyTree:
    """As many zeros as `size` for each parameter, stacked on a new first axis."""

    def zeros(x: Any) -> Array:
        if under_jit(x):
            return _zeros_like(jnp.broadcast_to(x, (size, *x.shape)), dtype(x.dtype))
        # Broadcasting keeps the sharding.
        return jnp.broadcast_to(_zeros_like(x, dtype(canonical(x.dtype))), (size, *np.shape(x)))

    return jax.tree.map(zeros, params)


def copy(params: Params, dtype: Callable[[np.dtype], Any] = np.dtype) -> PyTree:
    """A copy of the parameters in new buffers, with the same sharding.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: a function from a parameter's dtype to that of its copy. Defaults to the same dtype.

    **Returns:** a tree like the parameters, which shares no buffer with them.
    """
    check_inexact(params)
    return jax.tree.map(lambda x: jnp.array(x, dtype(canonical(x.dtype)), copy=True), params)


def first_moment(params: Params, dtype: Any | None = None) -> PyTree:
    """Zeros for a mean of updates.

    In float16 it would never decay to 0: 0.9·m rounds back to m for m ≤ 4·2⁻²⁴, while the mean of
    squares it is divided by decays in float32.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: the dtype of the mean; complex leaves use its complex counterpart. Defaults to the
        parameter's dtype, but float32 for float16 parameters.

    **Returns:** a tree like the parameters.
    """
    if dtype is None:
        return zeros_like(params, lambda own: np.dtype(np.float32) if own == np.float16 else own)
    return zeros_like(params, lambda own: storage_dtype(own, dtype))


def second_moment(params: Params, dtype: Any | None = None, value: Any = 0) -> PyTree:
    """The initial value of a mean of squares, which is real even for complex parameters.

    A bfloat16 mean of squares with decay 0.999 stalls at a quarter of its limit: the increments
    fall below half a unit in the last place.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: the dtype of the mean. Defaults to the parameter's own dtype, but at least float32.
    - `value`: the initial value.

    **Returns:** a tree like the parameters.
    """
    if dtype is None:
        return full_like(params, lambda own: real_dtype(accumulation_dtype(own)), value)
    return full_like(params, lambda own: np.dtype(dtype), value)


def zeros_of(shapes: PyTree, like: PyTree = None) -> PyTree:
    """Zeros with the shapes, dtypes and shardings that `jax.eval_shape` returned.

    **Arguments:**

    - `shapes`: what `jax.eval_shape` returned.
    - `like`: the arrays that it was called with, outside a trace. Their shardings name the
        devices; abstract values know only the shape of the mesh.

    **Returns:** a tree like `shapes`.
    """
    homes = (x.sharding for x in jax.tree.leaves(like) if not isinstance(x, Tracer | np.ndarray))
    mesh = next((home.mesh for home in homes if isinstance(home, NamedSharding)), None)

    def zeros(s: jax.ShapeDtypeStruct) -> Array:
        sharding = s.sharding
        if isinstance(sharding, NamedSharding) and mesh is not None:
            sharding = NamedSharding(mesh, sharding.spec)
        made = jnp.zeros(s.shape, s.dtype, device=sharding)
        # Inside `jax.shard_map` what differs between the devices is of another type.
        varying = () if s.manual_axis_type is None else tuple(s.manual_axis_type.varying)
        return jax.lax.pcast(made, varying, to="varying") if varying else made

    return jax.tree.map(zeros, shapes)


def zeros_of_sums(x: Any, along: Iterable[int | tuple[int, ...]]) -> tuple[Array, ...]:
    """Zeros shaped and sharded like the sums of `x` along each of these axes, in at least float32.

    A summed axis has size 1.
    """
    dtype = sum_dtype(x)
    return tuple(
        _zeros_of_sum(x, (axes,) if isinstance(axes, int) else axes, dtype) for axes in along
    )


def _zeros_of_sum(x: Any, axes: tuple[int, ...], dtype: np.dtype) -> Array:
    if under_jit(x):
        # XLA computes no sum for this, since only its sharding is used.
        return _zeros_like(jnp.sum(x.real, axes, dtype, keepdims=True), dtype)
    shape = list(np.shape(x))
    for axis in axes:
        shape[axis] = 1
    home = getattr(x, "sharding", None)
    if not isinstance(home, NamedSharding) or isinstance(x, Tracer):
        return zeros_of(jax.ShapeDtypeStruct(tuple(shape), dtype), x)
    spec = full_spec(home.spec, len(shape))
    for axis in axes:
        spec[axis] = None
    home = NamedSharding(
        home.mesh, canonical_spec(home.mesh, spec, len(spec)), memory_kind=home.memory_kind
    )
    return _compiled_zeros(home)(tuple(shape), dtype)


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def num_parts(sizes: Mapping[str, int], entry: Any) -> int:
    """Into how many parts one entry of a spec divides an axis, on a mesh with these sizes."""
    return math.prod(sizes[name] for name in axis_names(entry))


def full_spec(spec: Iterable[Any], ndim: int) -> list[Any]:
    """The spec with an entry for each axis of the array."""
    entries = list(spec)
    return entries + [None] * (ndim - len(entries))


def canonical_spec(mesh: Any, spec: Sequence[Any], ndim: int) -> PartitionSpec:
    """The spec that JAX gives to the result of a program. Specs that mean the same may differ.

    With explicit axes it has an entry for each of the `ndim` axes of the array; otherwise none at
    the end is `None`.
    """
    entries = full_spec(spec, ndim)
    if AxisType.Explicit not in mesh.axis_types:
        while entries and entries[-1] is None:
            entries.pop()
    return PartitionSpec(*entries)


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """`jnp.reshape`, also of axes that are sharded along explicit axes of a mesh.

    JAX refuses a reshape whose result cannot have the sharding of `x`. Here the axes before and
    after those that change keep theirs, and the first one that changes keeps what divides it.
    """
    sharding = jax.typeof(x).sharding
    spec, mesh = tuple(sharding.spec), sharding.mesh
    before = _common(x.shape, shape)
    after = _common(x.shape[before:][::-1], shape[before:][::-1])
    changed = spec[before : len(spec) - after]
    if all(entry is None for entry in changed):
        return jnp.reshape(x, shape)
    kept: list[Any] = []
    for name in axis_names(changed[0]):
        parts = num_parts(mesh.shape, (*kept, name))
        if len(shape) == before + after or shape[before] % parts:
            break
        kept.append(name)
    middle = [tuple(kept) or None, *(None,) * (len(shape) - before - after - 1)]
    middle = middle[: len(shape) - before - after]
    new = PartitionSpec(*spec[:before], *middle, *spec[len(spec) - after :])
    return jax.lax.reshape(x, shape, out_sharding=sharding.update(spec=new))


def placed_like(x: Array, like: Array) -> Array:
    """An array with the sharding of another one of its shape, along explicit axes of a mesh."""
    sharding = jax.typeof(x).sharding
    spec = jax.typeof(like).sharding.spec
    if AxisType.Explicit not in sharding.mesh.axis_types or x.shape != like.shape:
        return x
    if sharding.spec == spec:
        return x
    return jax.sharding.reshard(x, sharding.update(spec=spec))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many sizes are equal, from the first one on."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return len(list(pairs))


def no_state(params: Params) -> None:
    """The state of a rule without state: `None`.

    **Arguments:**

    - `params`: the parameters.

    **Raises:** a `TypeError` if a leaf is not a floating or complex array.
    """
    check_inexact(params)


def fresh_count() -> Int[Array, ""]:
    """A counter that starts at 0, such as the age of accumulators.

    An age is one number for all leaves as long as these are equally old. It becomes a vector, with
    an entry per leaf, when some of them are reset. It is not a vector from the start because each
    leaf would then have a kernel of its own, which reads another entry: XLA compiles equal kernels
    only once, and compiling 200 different ones takes five times as long.

    **Returns:** 0. Mark the field of an age with `sl.fields.per_leaf()`.
    """
    return _compiled_zeros(None)((), np.dtype(np.int32))
