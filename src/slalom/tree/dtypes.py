"""The one place where dtypes are decided."""

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .types import PyTree, Scalar


def is_array(x: Any) -> bool:
    """Whether `x` is a JAX or NumPy array or scalar (tracers are arrays)."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_inexact(x: Any) -> bool:
    """Whether `x` is a floating or complex array."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys."""
    return is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_number(x: Any) -> bool:
    """Whether this is a number, not a PRNG key or a flag."""
    return x is not None and jnp.issubdtype(x.dtype, jnp.number)


def canonical(dtype: Any) -> np.dtype:
    """The dtype that JAX uses for it: float64 becomes float32 unless x64 is enabled."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def accumulation_dtype(*dtypes: Any) -> np.dtype:
    """The dtype to compute with these dtypes in: as wide as the widest, and at least float32.

    **Arguments:**

    - `dtypes`: floating or complex dtypes.

    **Returns:** float32, float64, complex64 or complex128.
    """
    # `jnp.promote_types` would raise under strict promotion, which users may choose.
    wide = any(jnp.finfo(dtype).bits > 32 for dtype in dtypes)
    if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        return canonical(np.complex128 if wide else np.complex64)
    return canonical(np.float64 if wide else np.float32)


def real_dtype(dtype: Any) -> np.dtype:
    """The dtype of the real part."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(jnp.finfo(dtype).dtype)
    return dtype


def sum_dtype(tree: PyTree) -> np.dtype:
    """The dtype of sums over all leaves of squares or of real parts: at least float32."""
    return real_dtype(accumulation_dtype(*(x.dtype for x in jax.tree.leaves(tree))))


def in_precision_of(tree: PyTree, dtype: np.dtype) -> PyTree:
    """A tree of arrays in the precision of `dtype`; real ones stay real, complex ones complex, and
    bools and PRNG keys as they are."""
    real = real_dtype(dtype)
    return jax.tree.map(
        lambda x: cast(x, dtype if jnp.iscomplexobj(x) else real) if is_number(x) else x, tree
    )


def cast(x: Any, dtype: np.dtype) -> Array:
    """`x` as a strongly typed JAX array of this dtype; `x` itself if it is one."""
    # Most are, and this test takes a twentieth of the time of a `jnp.asarray` without effect.
    if isinstance(x, jax.Array) and x.dtype == dtype and not x.weak_type:
        return x
    return jnp.asarray(x, dtype)


def promoting(dtype: np.dtype) -> contextlib.AbstractContextManager[Any]:
    """A context in which real numbers may be multiplied with arrays of this dtype.

    Under strict promotion, which users may choose, JAX refuses real times complex.
    """
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jax.numpy_dtype_promotion("standard") if is_complex else contextlib.nullcontext()


def widened(tree: PyTree) -> PyTree:
    """Casts each leaf to its accumulation dtype, the dtype of updates between links.

    **Arguments:**

    - `tree`: a tree of arrays, such as a stored momentum.

    **Returns:** the tree.
    """
    return jax.tree.map(lambda x: cast(x, accumulation_dtype(x.dtype)), tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts each leaf to the dtype of the corresponding leaf of `like`.

    **Arguments:**

    - `tree`: a tree of arrays, such as new moments in the accumulation dtype.
    - `like`: a tree of the same structure, such as the stored moments.

    **Returns:** the tree.
    """
    return jax.tree.map(lambda x, y: cast(x, canonical(y.dtype)), tree, like)


def storage_dtype(leaf_dtype: Any, dtype: Any) -> np.dtype:
    """`dtype`, or its complex counterpart (complex64 for half precision) if the leaf is complex.
    Without one, the leaf's accumulation dtype."""
    if dtype is None:
        return accumulation_dtype(leaf_dtype)
    if jnp.issubdtype(leaf_dtype, jnp.complexfloating):
        return accumulation_dtype(dtype, np.complex64)
    return np.dtype(dtype)


def canonical_float() -> Any:
    """float32, or float64 under x64."""
    return jnp.result_type(float)


def as_canonical(value: Any) -> Scalar:
    """A strongly typed array of the canonical float."""
    return jnp.asarray(value, canonical_float())


def nearest_float(value: Any) -> float:
    """A number as a float: infinity for an int beyond their range."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_float(value: Any) -> Scalar:
    """A strongly typed floating array; anything but a strong floating dtype becomes canonical."""
    value = jnp.asarray(value)
    keep = jnp.issubdtype(value.dtype, jnp.floating) and not value.weak_type
    return jnp.asarray(value, value.dtype if keep else canonical_float())
