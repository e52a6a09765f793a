"""Tree arithmetic for rules, and the one place where dtypes are decided.

Trees have holes (`None`), never placeholders: `jax.tree.map` steps over them by itself. What
stands in `__all__` is for authors of transforms; the rest is for the library.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, Int, PyTree, Real

from ._jit import under_jit
from ._paths import dotted, first_difference
from ._types import Params, Scalar


def is_array(x: Any) -> bool:
    """Whether `x` is a JAX or NumPy array or scalar (tracers are arrays)."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_inexact(x: Any) -> bool:
    """Whether `x` is a floating or complex array."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


# --- dtypes ---------------------------------------------------------------------------------


def canonical(dtype: Any) -> np.dtype:
    """The dtype that JAX makes of it: NumPy's doubles are single precision without x64."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def accumulation_dtype(*dtypes: Any) -> np.dtype:
    """The dtype to compute in where these meet: as wide as the widest, and at least float32.

    **Arguments:**

    - `dtypes`: floating or complex dtypes.

    **Returns:** float32, float64, complex64 or complex128.
    """
    # Not `jnp.promote_types`: under strict promotion, which users may choose, it refuses.
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


def _in_precision_of(x: Any, dtype: np.dtype) -> Array:
    """`x` in the precision of `dtype`: a real stays real and a complex number complex."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating) or not jnp.issubdtype(
        dtype, jnp.complexfloating
    ):
        return cast(x, dtype)
    return cast(x, real_dtype(dtype))


def cast(x: Any, dtype: np.dtype) -> Array:
    """`x` as a strongly typed JAX array; the very array where it is that already."""
    # Most are: asking takes a twentieth of the time that `jnp.asarray` takes to do nothing.
    if isinstance(x, jax.Array) and x.dtype == dtype and not x.weak_type:
        return x
    return jnp.asarray(x, dtype)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Each leaf in the dtype, strongly typed, of the leaf of `like` at its place.

    **Arguments:**

    - `tree`: a tree of arrays, such as new moments in the accumulation dtype.
    - `like`: a tree of the same structure, such as the old moments as they are stored.

    **Returns:** the tree.
    """
    return jax.tree.map(lambda x, y: cast(x, canonical(y.dtype)), tree, like)


def storage_dtype(leaf_dtype: Any, dtype: Any) -> np.dtype:
    """`dtype`, or its complex twin (complex64 for half precision) where the leaf is complex."""
    if jnp.issubdtype(leaf_dtype, jnp.complexfloating):
        return accumulation_dtype(dtype, np.complex64)
    return np.dtype(dtype)


# --- fresh state ----------------------------------------------------------------------------


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


# --- arithmetic -----------------------------------------------------------------------------


def map_leaves(
    rule: Callable[..., Any],
    trees: tuple[PyTree, ...],
    scalars: tuple[Scalar, ...] = (),
    per_leaf: tuple[Real[Array, "*leaves"], ...] = (),
    per_param: tuple[PyTree, ...] = (),
) -> Any:
    """Applies `rule(*leaves, *tuples, *scalars, *entries)` at every leaf of the trees.

    Everything that meets at a leaf arrives in that leaf's accumulation dtype, so a rule is
    written without a cast. Leaves of equal shape and dtype share one trace of the rule.

    **Arguments:**

    - `rule`: a pure function of arrays that returns an array or a tuple of arrays (and of
        tuples of arrays).
    - `trees`: trees of one structure and equal shapes; the first one gives the structure.
    - `scalars`: 0-d arrays that every leaf sees.
    - `per_leaf`: numbers that follow from ages: vectors with an entry for each leaf, in the
        order of the leaves, or scalars where all leaves are of one age.
    - `per_param`: trees with a tuple of arrays, of any shapes, in the place of each leaf.

    **Returns:** a tree, or as many trees as `rule` returns arrays, in the accumulation dtype.

    ```python
    >>> updates = {"w": jnp.array([3.0, 4.0])}
    >>> sl.tree.map_leaves(lambda u, s: u * s, (updates,), (jnp.float32(2.0),))
    {'w': Array([6., 8.], dtype=float32)}

    ```
    """
    check_same_structure(trees)
    structure = jax.tree.structure(trees[0])
    columns = [jax.tree.leaves(tree) for tree in trees]
    besides = [structure.flatten_up_to(tree) for tree in per_param]

    def at_leaf(
        leaves: tuple[Array, ...], tuples: tuple[Any, ...], numbers: tuple[Array, ...]
    ) -> Any:
        dtype = accumulation_dtype(*(x.dtype for x in leaves))
        real = real_dtype(dtype)
        numbers = tuple(cast(s, real) for s in numbers)
        leaves = tuple(_in_precision_of(x, dtype) for x in leaves)
        tuples = tuple(tuple(_in_precision_of(x, dtype) for x in arrays) for arrays in tuples)
        if dtype == real:
            return rule(*leaves, *tuples, *numbers)
        # Under strict promotion, which users may choose, real times complex would be refused.
        with jax.numpy_dtype_promotion("standard"):
            return rule(*leaves, *tuples, *numbers)

    if any(under_jit(x) for column in columns for x in column):
        # Tracing costs 2 ms a leaf in Python; a jit traces once per shape, and XLA inlines it (an
        # `inline=True` would copy its equations for every leaf). Outside of a trace it would
        # compile once per call instead, since `at_leaf` is new in every call.
        at_leaf = jax.jit(at_leaf)
    results = [
        at_leaf(
            leaves,
            tuple(column[i] for column in besides),
            (*scalars, *(x if x.ndim == 0 else x[i] for x in per_leaf)),
        )
        for i, leaves in enumerate(zip(*columns, strict=True))
    ]
    if results and isinstance(results[0], tuple):
        return tuple(structure.unflatten(column) for column in zip(*results, strict=True))
    if not results:
        one = jax.ShapeDtypeStruct((), jnp.float32)
        numbers = len(scalars) + len(per_leaf)
        arguments = [one] * len(trees) + [(one,)] * len(per_param) + [one] * numbers
        return _no_leaves(rule, structure, arguments)
    return structure.unflatten(results)


def _no_leaves(rule: Callable[..., Any], structure: Any, arguments: list[Any]) -> Any:
    """What `map_leaves` returns for trees without a leaf: as many empty trees as it would."""
    result = jax.eval_shape(rule, *arguments)
    empty = structure.unflatten([])
    return tuple(empty for _ in result) if isinstance(result, tuple) else empty


def check_inexact(tree: PyTree) -> None:
    """Refuses a tree with a leaf that is no floating or complex array."""
    if all(map(is_inexact, jax.tree.leaves(tree))):
        return  # paths are for messages, and cost more than all else here
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not is_inexact(x):
            kind = f"an array of dtype {x.dtype}" if is_array(x) else f"of type {type(x).__name__}"
            raise TypeError(
                f"The leaf '{dotted(path)}' is {kind}; parameters and gradients are trees of "
                "floating or complex arrays. Bind the whole model with `sl.Optimizer(tx, model)`, "
                "which steps over everything else, or pass "
                "`eqx.filter(model, eqx.is_inexact_array)`."
            )


def check_same_structure(trees: tuple[PyTree, ...]) -> None:
    """Refuses trees that differ in structure or in a leaf's shape, by the path of the leaf."""
    first, *others = trees
    check_inexact(first)
    structure = jax.tree.structure(first)
    for other in others:
        if jax.tree.structure(other) != structure:
            differ = first_difference(first, other, ("the updates", "what meets them"))
            raise ValueError(
                "The updates have another structure than the state or the parameters that meet "
                f"them: {differ}. Pass gradients, state and parameters of one model."
            )
        check_same_shapes(first, other, "the state or parameter that meets it there")


def check_same_shapes(updates: PyTree, others: PyTree, what: str) -> None:
    """Refuses updates of other shapes than what meets them, by the path of the leaf."""
    shapes = [[np.shape(x) for x in jax.tree.leaves(tree)] for tree in (updates, others)]
    if shapes[0] == shapes[1]:
        return
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    for (path, u), other in zip(leaves, jax.tree.leaves(others), strict=True):
        if np.shape(u) != np.shape(other):
            raise ValueError(
                f"The update at '{dotted(path)}' has shape {np.shape(u)}, but {what} has shape "
                f"{np.shape(other)}. Shapes must be equal: nothing is broadcast."
            )


def abs_squared(x: Inexact[Array, "*shape"]) -> Real[Array, "*shape"]:
    """|x|², real also for complex x.

    **Arguments:**

    - `x`: a floating or complex array.

    **Returns:** a real array.
    """
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def global_norm(tree: PyTree) -> Scalar:
    """The Euclidean norm of all leaves together, summed in at least float32.

    **Arguments:**

    - `tree`: a tree of floating or complex arrays.

    **Returns:** a real scalar; 0 for a tree without leaves.
    """
    return jnp.sqrt(squared_norm(tree))


def squared_norm(tree: PyTree) -> Scalar:
    """The square of `global_norm`."""
    squares = jax.tree.leaves(map_leaves(lambda x: jnp.sum(abs_squared(x)), (tree,)))
    dtype = real_dtype(accumulation_dtype(jnp.float32, *(x.dtype for x in squares)))
    total = jnp.zeros((), dtype)
    for x in squares:
        total = jax.lax.add(total, cast(x, dtype))
    return total


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether no number in a tree is infinite or NaN.

    **Arguments:**

    - `tree`: a tree of floating or complex arrays.

    **Returns:** a bool scalar; true for a tree without leaves.
    """
    finite = jnp.array(True)
    for x in jax.tree.leaves(tree):
        # Not `all(isfinite(x))`: XLA writes those bools to memory, which takes twice as long. The
        # maximum with a NaN is NaN, which is less than nothing.
        parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
        for part in parts:
            finite = finite & (jnp.max(jnp.abs(part), initial=0) < jnp.inf)
    return finite


def inner(a: PyTree, b: PyTree) -> Scalar:
    """Re⟨a, b⟩ = Σ Re(āᵢ·bᵢ) over all entries of all leaves, summed in at least float32.

    With real parts, complex parameters are what they are to a gradient: twice as many real ones.

    **Arguments:**

    - `a`, `b`: trees of floating or complex arrays, of one structure and equal shapes.

    **Returns:** a real scalar; 0 for trees without leaves.
    """
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    dtype = real_dtype(accumulation_dtype(jnp.float32, *(x.dtype for pair in pairs for x in pair)))
    total = jnp.zeros((), dtype)
    for x, y in pairs:
        wide = accumulation_dtype(x.dtype, y.dtype)
        x, y = _in_precision_of(x, wide), _in_precision_of(y, wide)
        product = x.real * y.real
        if jnp.iscomplexobj(x) and jnp.iscomplexobj(y):
            product = product + x.imag * y.imag
        total = total + jnp.asarray(jnp.sum(product), dtype)
    return total


def norm(x: Inexact[Array, "..."]) -> Scalar:
    """The Euclidean norm of one array, in its own precision: in rules, at least float32."""
    return jnp.sqrt(jnp.sum(abs_squared(x)))


def rms(x: Inexact[Array, "..."]) -> Scalar:
    """The root mean square of one array, in its own precision; 0 for an empty one."""
    return jnp.sqrt(jnp.sum(abs_squared(x)) / max(x.size, 1))


def complement(decay: Scalar) -> Scalar:
    """1 − decay, in the precision of the hyperparameter (exact for decay ≥ ½).

    **Arguments:**

    - `decay`: a decay in [0, 1], as `self.at(context)` gives it.

    **Returns:** a scalar.
    """
    return 1 - decay


def bias_correction(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """1 / (1 − decayᵗ), the factor that debiases a mean that started at zero and has age t ≥ 1.

    Written as −1 / expm1(t · log1p(−(1 − decay))): the naive form loses 5e-5 of its value to
    cancellation in float32 at t = 2, decay = 0.9999.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: how often it was fed, ≥ 1: one number, or an entry per leaf.

    **Returns:** as many factors, to be passed to `map_leaves` as `per_leaf`.
    """
    return -1 / jnp.expm1(age.astype(decay.dtype) * jnp.log1p(-complement(decay)))


def newest_weight(decay: Scalar, age: Int[Array, "*leaves"]) -> Real[Array, "*leaves"]:
    """(1 − decay) / (1 − decayᵗ): what the newest of t values weighs in a debiased mean of them.

    With it, mean ← (1 − w)·mean + w·new is the exponential mean of the values seen so far, and
    needs no correction when it is read.

    **Arguments:**

    - `decay`: the decay of the mean, in [0, 1).
    - `age`: how many values there are with the newest, ≥ 1: one number, or an entry per leaf.

    **Returns:** as many weights; exactly 1 at age 1.
    """
    weight = complement(decay) * bias_correction(decay, age)
    return jnp.where(age == 1, 1, weight)


def increment(count: Int[Array, "..."]) -> Int[Array, "..."]:
    """count + 1, which stays at the largest integer instead of turning negative.

    **Arguments:**

    - `count`: integers.

    **Returns:** the integers that follow.
    """
    largest = jnp.iinfo(count.dtype).max
    return jnp.where(count < largest, count + 1, largest)


def add(params: PyTree, updates: PyTree) -> PyTree:
    """params + updates: summed in the accumulation dtype, rounded once to the parameters'."""
    check_same_shapes(updates, params, "the parameter there")

    def add_leaf(u: Any, p: Any) -> Array:
        if jnp.iscomplexobj(u) and not jnp.iscomplexobj(p):
            raise TypeError(f"A {u.dtype} update cannot be added to a {p.dtype} parameter.")
        dtype = accumulation_dtype(p.dtype, u.dtype)
        return cast(jax.lax.add(cast(p, dtype), cast(u, dtype)), canonical(p.dtype))

    return jax.tree.map(add_leaf, updates, params)


# --- holes ----------------------------------------------------------------------------------


def cut(tree: PyTree, keep: tuple[bool, ...]) -> PyTree:
    """The tree with holes at the leaves that are not kept."""
    leaves, structure = jax.tree.flatten(tree)
    if keep == (False,) and jax.tree_util.treedef_is_leaf(structure):
        return ()  # a model that is one array: `None` in its place would read as not given
    return structure.unflatten([x if k else None for x, k in zip(leaves, keep, strict=True)])


def merge(structure: Any, keep: tuple[bool, ...], kept: PyTree, rest: PyTree) -> PyTree:
    """Undoes a pair of complementary cuts of one tree of this structure."""
    inside, outside = iter(jax.tree.leaves(kept)), iter(jax.tree.leaves(rest))
    return structure.unflatten([next(inside if k else outside) for k in keep])


__all__ = [
    "abs_squared",
    "accumulation_dtype",
    "all_finite",
    "bias_correction",
    "cast_like",
    "complement",
    "copy",
    "first_moment",
    "fresh_age",
    "global_norm",
    "increment",
    "inner",
    "map_leaves",
    "newest_weight",
    "no_state",
    "second_moment",
    "zeros_like",
]
