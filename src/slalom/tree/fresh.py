"""Initial state, shaped like the parameters."""

import collections
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Int

from .dtypes import accumulation_dtype, canonical, real_dtype, storage_dtype, sum_dtype
from .paths import check_inexact
from .sharding import canonical_spec, full_spec
from .types import Params, PyTree, Tracer, under_jit

_SMALL = 2**16
_FEW = 16
_calls: collections.Counter[Any] = collections.Counter()
"""The number of small zeros of each sharding, shape and dtype that were made without a program."""


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
        # A tracer does not show its sharding along automatic axes, but XLA shards results computed
        # from it alike. The condition is always false, also for NaN, which XLA does not know.
        never = jnp.real(x) > jnp.inf
        if under_jit(x):
            zeros = jax.lax.select(never, jnp.ones_like(zeros), zeros)
        return _along_explicit_axes(zeros, jax.typeof(x).sharding)
    sharding = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return _zeros(sharding, np.shape(x), np.dtype(dtype))


def _along_explicit_axes(x: Array, sharding: Any) -> Array:
    """A traced array with this sharding, if its axes are explicit.

    From JAX 0.12 on, `jnp.zeros` and `jnp.zeros_like` have it only inside of `jax.set_mesh`.
    """
    named = isinstance(x, Tracer) and isinstance(sharding, NamedSharding)
    explicit = named and AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, sharding) if explicit else x


def _zeros(sharding: Any, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    on_mesh = isinstance(sharding, NamedSharding)
    if on_mesh or math.prod(shape) > _SMALL or _calls[sharding, shape, dtype] >= _FEW:
        return _compiled_zeros(sharding)(shape, dtype)
    # A program for each shape would take 50 ms to compile, and megabytes of memory for good.
    _calls[sharding, shape, dtype] += 1
    return jax.device_put(np.zeros(shape, dtype), sharding)


@functools.lru_cache(maxsize=256)
def _compiled_zeros(sharding: Any) -> Any:
    # A compiled call takes a tenth of the time of an eager `jnp.zeros`, and creates sharded zeros
    # in place.
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding, inline=True)


def zeros_like(params: Params, dtype: Callable[[np.dtype], Any] = np.dtype) -> PyTree:
    """Zeros, shaped and sharded like the parameters.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: a function from a parameter's dtype to the dtype of its zeros. Defaults to the same
        dtype.

    **Returns:** a tree like the parameters, in which no two leaves share a buffer.
    """
    return full_like(params, dtype)


def stacked_zeros(params: Params, size: int) -> PyTree:
    """`size` zeros for each parameter, in at least float32, stacked on a new first axis."""

    def zeros(x: Any) -> Array:
        shape, dtype = (size, *np.shape(x)), accumulation_dtype(x.dtype)
        if under_jit(x):
            return _zeros_like(jnp.broadcast_to(x, shape), dtype)
        # Broadcasting keeps the sharding.
        return jnp.broadcast_to(_zeros_like(x, dtype), shape)

    return jax.tree.map(zeros, params)


def copy(params: Params, dtype: Callable[[np.dtype], Any] = np.dtype) -> PyTree:
    """A copy of the parameters in new buffers, with the same sharding.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: a function from a parameter's dtype to its copy's. Defaults to the same dtype.

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
        return zeros_like(params, lambda d: np.dtype(np.float32) if d == np.float16 else d)
    return zeros_like(params, lambda d: storage_dtype(d, dtype))


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
        return full_like(params, lambda d: real_dtype(accumulation_dtype(d)), value)
    return full_like(params, lambda d: np.dtype(dtype), value)


def zeros_of(shapes: PyTree, like: PyTree = None) -> PyTree:
    """Zeros with the shapes, dtypes and shardings that `jax.eval_shape` returned.

    **Arguments:**

    - `shapes`: what `jax.eval_shape` returned.
    - `like`: the arrays that it was called with, outside a trace. Their shardings name the
        devices; abstract values know only the shape of the mesh.

    **Returns:** a tree like `shapes`.
    """
    shardings = (
        x.sharding for x in jax.tree.leaves(like) if not isinstance(x, Tracer | np.ndarray)
    )
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)

    def zeros(s: jax.ShapeDtypeStruct) -> Array:
        sharding = s.sharding
        if isinstance(sharding, NamedSharding) and mesh is not None:
            sharding = NamedSharding(mesh, sharding.spec)
        x = _along_explicit_axes(jnp.zeros(s.shape, s.dtype, device=sharding), sharding)
        # Inside `jax.shard_map` values that differ between devices have another type.
        varying = () if s.manual_axis_type is None else tuple(s.manual_axis_type.varying)
        return jax.lax.pcast(x, varying, to="varying") if varying else x

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
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or isinstance(x, Tracer):
        return zeros_of(jax.ShapeDtypeStruct(tuple(shape), dtype), x)
    spec = full_spec(sharding.spec, len(shape))
    for axis in axes:
        spec[axis] = None
    sharding = sharding.update(spec=canonical_spec(sharding.mesh, spec, len(spec)))
    return _compiled_zeros(sharding)(tuple(shape), dtype)


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
