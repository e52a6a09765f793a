"""Fresh state, shaped as the parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, PyTree

from .._types import Params, Tracer
from .checks import check_inexact
from .dtypes import accumulation_dtype, canonical, real_dtype, storage_dtype


def full_like(params: Params, dtype: Callable[[np.dtype], Any], value: Any = 0) -> PyTree:
    """A constant, shaped and sharded as the parameters; `dtype` maps a leaf's dtype to its own."""
    check_inexact(params)

    def full(x: Any) -> Array:
        # The dtype is always given: without one the result would inherit a weak type. Added, not
        # filled in: filled in, a 0-d leaf would share its buffer with the value.
        zeros = jnp.zeros_like(x, dtype=dtype(canonical(x.dtype)))
        return zeros if isinstance(value, int) else zeros + jnp.asarray(value, zeros.dtype)

    return jax.tree.map(full, params)


def zeros_like(params: Params, dtype: Callable[[np.dtype], Any] = np.dtype) -> PyTree:
    """Zeros, shaped and sharded as the parameters.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: from a parameter's dtype to that of its zeros; the same without it.

    **Returns:** a tree like the parameters; no two leaves share a buffer.
    """
    return full_like(params, dtype)


def copy(params: Params, dtype: Callable[[np.dtype], Any] = np.dtype) -> PyTree:
    """The parameters in buffers of their own, sharded as they are.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: from a parameter's dtype to that of its copy; the same without it.

    **Returns:** a tree like the parameters; no leaf shares a buffer with them.
    """
    check_inexact(params)
    return jax.tree.map(lambda x: jnp.array(x, dtype(canonical(x.dtype)), copy=True), params)


def first_moment(params: Params, dtype: Any | None = None) -> PyTree:
    """Zeros for a mean of updates.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: how it is stored (complex leaves in its complex twin); the parameter's own dtype
        without it.

    **Returns:** a tree like the parameters.
    """
    return zeros_like(params, np.dtype if dtype is None else lambda own: storage_dtype(own, dtype))


def second_moment(params: Params, dtype: Any | None = None, value: Any = 0) -> PyTree:
    """A start for a mean of squares, which is real also for complex parameters.

    A bfloat16 mean of squares with decay 0.999 stalls at a quarter of its limit: the increments
    fall below half a unit in the last place.

    **Arguments:**

    - `params`: the parameters.
    - `dtype`: how it is stored; without it the parameter's own dtype, at least float32.
    - `value`: where the mean starts.

    **Returns:** a tree like the parameters.
    """
    if dtype is None:
        return full_like(params, lambda own: real_dtype(accumulation_dtype(own)), value)
    return full_like(params, lambda own: np.dtype(dtype), value)


def zeros_of(shapes: PyTree, like: PyTree = None) -> PyTree:
    """Zeros where `jax.eval_shape` gave shapes, sharded as it says.

    **Arguments:**

    - `shapes`: what `jax.eval_shape` returned.
    - `like`: what it was asked about, outside of a trace: these arrays know the devices, of which
        a type knows only how they are arranged.

    **Returns:** a tree like `shapes`.
    """
    homes = (x.sharding for x in jax.tree.leaves(like) if not isinstance(x, Tracer | np.ndarray))
    mesh = next((home.mesh for home in homes if isinstance(home, NamedSharding)), None)

    def zeros(s: jax.ShapeDtypeStruct) -> Array:
        sharding = s.sharding
        if isinstance(sharding, NamedSharding) and mesh is not None:
            sharding = NamedSharding(mesh, sharding.spec)
        return jnp.zeros(s.shape, s.dtype, device=sharding)

    return jax.tree.map(zeros, shapes)


def zeros_of_sums(x: Any, along: Iterable[int | tuple[int, ...]]) -> tuple[Array, ...]:
    """An accumulator for the sums of |x| along each of these axes, in at least float32."""
    dtype, axes = real_dtype(accumulation_dtype(canonical(x.dtype))), tuple(along)

    def sums(x: Any) -> tuple[Array, ...]:
        return tuple(jnp.sum(x.real, a, dtype, keepdims=True) for a in axes)

    return zeros_of(jax.eval_shape(sums, x), x)


def no_state(params: Params) -> None:
    """The state of a rule that remembers nothing.

    **Arguments:**

    - `params`: the parameters; refused where a leaf is no floating or complex array.
    """
    check_inexact(params)


def fresh_age() -> Int[Array, ""]:
    """How often accumulators were fed: the age that `bias_correction` takes.

    It begins as one number for all leaves, and becomes a vector with an entry for each when some
    of them start anew. It is no vector from the start because then the kernel of every leaf would
    read another entry: XLA compiles equal kernels once, and these one by one, which takes five
    times as long at 200 leaves.

    **Returns:** 0; mark its field with `sl.per_leaf()`.
    """
    return jnp.zeros((), jnp.int32)
