"""A preconditioner that is fitted to the gradients by descent: PSGD Kron."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Inexact, Int, PyTree, UInt32

from ... import tree
from ..._core.engine.batches import batches, is_small, joined
from ..._core.engine.matrices import matrices
from ..._core.fields.declare import Hyperparameter, hyperparameter, layout_field
from ..._core.fields.keys import as_key_data, fresh_key_data, key_field
from ..._core.protocol.context import Context
from ..._core.protocol.transform import AbstractTransform
from ..._core.state.marks import per_param, until_reset
from ...tree.fresh import placed_like
from ...tree.types import Params, Updates
from ...where.layout import LayoutLike, Matrix
from ..shaping.clip import clip_factor
from ._kronecker import (
    adjoint,
    adjoint_times,
    bounded_entries,
    has_factor,
    sides_as_text,
    size_field,
)

_Pair = tuple[Array, Array]
"""The factors of the rows and of the columns: (batch, n, n), or (batch, n) for a diagonal."""


class ScaleByKronState(eqx.Module):
    """The state of `ScaleByKron`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next refresh."""
    since: Int[Array, ""] = until_reset()
    """The number of steps since the last refresh."""
    factors: PyTree[Inexact[Array, "..."]] = per_param(spread=True)
    """At each leaf a tuple of Q_L and Q_R; a vector for each diagonal one."""


class ScaleByKron(AbstractTransform[ScaleByKronState]):
    """PSGD Kron: preconditions both sides of a matrix by triangular factors that learn.

        U = P_L·G·P_Rᵀ   with   P = Qᴴ·Q
        u = U·min(1, c / rms(U))

    A refresh draws V from a normal distribution, and moves each factor towards whitening the
    gradients by a relative step:

        A = Q_L·G·Q_Rᵀ,   B = Q_L⁻ᴴ·V·conj(Q_R)⁻¹
        Q_L ← Q_L − μ·triu(A·Aᴴ − B·Bᴴ)·Q_L / ‖A·Aᴴ + B·Bᴴ‖

    and Q_R likewise with Aᵀ and Bᵀ. The norm is a lower bound of the spectral norm, from one step
    of a power iteration. A step refreshes, before it uses the factors, once 1/p steps have passed
    since the last refresh, where p is the update probability. Refreshes are one branch, so the
    steps in between pay nothing for them.

    The root mean square is that of one matrix. Put `sl.Ema(0.9)` in front of it, as `sl.kron` does.

    Follows the authors' code. There, the norms of Q_L and Q_R are balanced in a hundredth of the
    refreshes; here in every refresh, which does not change P. A gradient of zeros leaves the
    factors as they are; otherwise they would grow forever.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. A side that is
    longer than `max_size` has a diagonal factor. The factors have n² + m² elements for an n × m
    matrix, in at least float32. Devices that share a matrix divide them, if the mesh has automatic
    axes. Under a `vmap` that batches the state, each step costs as much as a refresh.

    **Arguments:**

    - `update_probability`: p, in (0, 1], usually a schedule. Defaults to that of the authors, 1 in
        the first 500 steps, and then e^(−(n − 500)/1000) down to 0.03 at step 4007.
    - `preconditioner_lr`: μ, ≥ 0.
    - `preconditioner_init_scale`: the multiple of the identity at which Q_L ⊗ Q_R starts, > 0.
    - `max_size`: the longest side that has a triangular factor.
    - `key`: an int in [0, 2³¹), or a PRNG key, for V.
    - `clip`: c, the largest root mean square of the update of a matrix, ≥ 0; `inf` sets no limit.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "Li, [Preconditioned Stochastic Gradient
        Descent](https://arxiv.org/abs/1512.04202), 2015; Pooladzandi & Li, [Curvature-Informed SGD
        via General Purpose Lie-Group Preconditioners](https://arxiv.org/abs/2402.04553), 2024"
    """

    update_probability: Hyperparameter | None = hyperparameter(None, within="(0, 1]")
    preconditioner_lr: Hyperparameter = hyperparameter(0.1, within="[0, inf)")
    preconditioner_init_scale: Hyperparameter = hyperparameter(1.0, within="(0, inf)")
    max_size: int = size_field(8192)
    key: Any = key_field(default=0)
    implementation: Any = eqx.field(default=None, static=True)
    clip: Hyperparameter = hyperparameter(1.1, within="[0, inf]", kw_only=True)
    layout: LayoutLike = layout_field()

    keeps_zeros: ClassVar[bool] = True

    def __init__(
        self,
        update_probability: Hyperparameter | None = None,
        preconditioner_lr: Hyperparameter = 0.1,
        preconditioner_init_scale: Hyperparameter = 1.0,
        max_size: int = 8192,
        key: Any = 0,
        *,
        clip: Hyperparameter = 1.1,
        layout: LayoutLike = None,
    ):
        self.update_probability = update_probability
        self.preconditioner_lr = preconditioner_lr
        self.preconditioner_init_scale = preconditioner_init_scale
        self.max_size = max_size
        self.key, self.implementation = as_key_data(key)
        self.clip = clip
        self.layout = layout

    def init(self, params: Params) -> ScaleByKronState:
        leaves, structure = jax.tree.flatten(params)
        scale = tree.root(self.at(Context(step=0)).preconditioner_init_scale)
        factors = [
            self._first(m, x.dtype, scale)
            for m, x in zip(matrices(self, params), leaves, strict=True)
        ]
        return ScaleByKronState(
            since=tree.fresh_count(),
            key=fresh_key_data(self.key),
            factors=structure.unflatten(factors),
        )

    def _first(self, matrix: Matrix, dtype: Any, scale: Any) -> tuple[Array, ...]:
        wide = tree.accumulation_dtype(tree.canonical(dtype))
        shape = (matrix.batch, matrix.rows, matrix.columns)
        if 0 in shape:
            return ()

        def first(is_triangular: bool, n: int) -> Array:
            one = jnp.eye(n, dtype=wide) if is_triangular else jnp.ones(n, wide)
            return jnp.broadcast_to(one[None] * scale.astype(wide), (matrix.batch, *one.shape))

        return tuple(map(first, has_factor(shape[1:], self.max_size), shape[1:]))

    def update(
        self,
        updates: Updates,
        state: ScaleByKronState,
        params: Params | None = None,
        context: Context | None = None,
    ) -> tuple[Updates, ScaleByKronState]:
        del params
        structure = jax.tree.structure(updates)
        if structure.num_leaves == 0:
            return updates, state
        found = matrices(self, updates)
        now = self.at(context)
        leaves = jax.tree.leaves(tree.widened(updates))

        def read(leaves):
            return [m.read(x) for m, x in zip(found, leaves, strict=True)]

        factors = structure.flatten_up_to(state.factors)

        def idle(key, factors, leaves):
            del leaves
            return key, factors

        def refresh(key, factors, leaves):
            grads = read(leaves)
            key, drawn = jax.random.split(jax.random.wrap_key_data(key, impl=self.implementation))
            keys = jax.random.split(drawn, len(grads))
            groups = [
                (_raw_keys(own, len(g)), g, *pair)
                for own, g, pair in zip(keys, grads, factors, strict=True)
                if pair
            ]

            def move(raw, g, left, right):
                noise = _noise(jax.random.wrap_key_data(raw, impl=self.implementation), g)
                g, left, right = map(_by_rows, tree.after((g, left, right), noise))
                return _moved(now.preconditioner_lr, g, noise, left, right)

            moved = iter(_in_batches(move, groups))
            new = [next(moved) if pair else () for pair in factors]
            return jax.random.key_data(key), jax.tree.map(placed_like, new, factors)

        wait = 1 / self._probability(now, context)
        due = (state.since + 1).astype(wait.dtype) >= wait
        key, factors = jax.lax.cond(due, refresh, idle, state.key, factors, leaves)
        result = tree.map_leaves(
            _preconditioned, (read(leaves),), now, per_param=(factors,), in_turn=True
        )
        updates = structure.unflatten([m.write(x) for m, x in zip(found, result, strict=True)])
        return updates, ScaleByKronState(
            since=jnp.where(due, 0, tree.increment(state.since)),
            key=key,
            factors=structure.unflatten(factors),
        )

    def _probability(self, now: Any, context: Context | None) -> Any:
        if now.update_probability is not None:
            return now.update_probability
        step = self.demand("step", None if context is None else context.step)
        number = jnp.asarray(step, now.preconditioner_lr.dtype)
        return jnp.clip(jnp.exp((500 - number) / 1000), 0.03, 1)

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return sides_as_text(self, params, "diagonal factor of")


def _raw_keys(key: Any, number: int) -> Array:
    """The raw data of a key for each matrix of a leaf."""
    return jax.random.key_data(jax.random.split(key, number))


def _noise(keys: Any, like: Array) -> Array:
    """Noise for each matrix, from a key of its own."""
    return jax.vmap(lambda key: jax.random.normal(key, like.shape[1:], like.dtype))(keys)


# --- one stack of matrices ------------------------------------------------------------------


def _preconditioned(now, g, factors):
    """P_L·g·P_Rᵀ, clipped."""
    if not factors:
        return g
    left, right = factors
    g = bounded_entries(g)
    g = _adjoint_times(_times(g, left), left)
    u = _adjoint_times(_times(g.mT, right), right).mT
    size = tree.root(jnp.mean(tree.abs_squared(u), (-2, -1), keepdims=True))
    return u * clip_factor(size, now.clip)


def _times(x: Array, factor: Array) -> Array:
    """Q·x."""
    return factor[:, :, None] * x if factor.ndim == 2 else factor @ x


def _adjoint_times(x: Array, factor: Array) -> Array:
    """Qᴴ·x."""
    return jnp.conj(factor)[:, :, None] * x if factor.ndim == 2 else adjoint_times(factor, x)


def _solved(x: Array, factor: Array) -> Array:
    """Q⁻ᴴ·x."""
    if factor.ndim == 2:
        return x / jnp.conj(factor)[:, :, None]
    return jax.lax.linalg.triangular_solve(
        factor, x, left_side=True, lower=False, transpose_a=True, conjugate_a=True
    )


def _moved(rate: Any, g: Array, noise: Array, left: Array, right: Array) -> _Pair:
    """The factors after one step towards whitening the gradients."""
    with jax.default_matmul_precision("highest"):
        a = _times(_times(bounded_entries(g), left).mT, right).mT
        b = _solved(_solved(noise, left).mT, right).mT
        # The step is relative, so A and B may be scaled to prevent that their squares overflow.
        largest = jnp.maximum(_largest(a), _largest(b))
        inverse = (1 / tree.positive(largest))[:, None, None]
        a, b = a * inverse, b * inverse
        is_zero = _largest(g) == 0
        new = (_step(rate, a, b, left), _step(rate, a.mT, b.mT, right))
    sizes = [_largest(factor) for factor in new]
    mean = tree.root(sizes[0]) * tree.root(sizes[1])
    balanced = [q * _aligned(mean / size, q) for q, size in zip(new, sizes, strict=True)]
    left, right = (
        jnp.where(_aligned(is_zero, q), old, q)
        for old, q in zip((left, right), balanced, strict=True)
    )
    return left, right


def _step(rate: Any, a: Array, b: Array, factor: Array) -> Array:
    rate = rate.astype(tree.real_dtype(a.dtype))
    if factor.ndim == 2:
        gain = jnp.sum(tree.abs_squared(a), axis=-1)
        loss = jnp.sum(tree.abs_squared(b), axis=-1)
        norm = jnp.max(gain + loss, axis=-1, keepdims=True)
        return factor - rate * ((gain - loss) / tree.positive(norm)) * factor
    gain, loss = a @ adjoint(a), b @ adjoint(b)
    inverse = rate / tree.positive(_norm_lower_bound(gain + loss))
    return factor - jnp.triu((gain - loss) * inverse[:, None, None]) @ factor


def _norm_lower_bound(x: Inexact[Array, "batch n n"]) -> Array:
    """A lower bound of the spectral norm of Hermitian matrices, usually tight within a tenth."""
    sizes = jnp.sum(tree.abs_squared(x), axis=-2)
    column = jnp.take_along_axis(x, jnp.argmax(sizes, axis=-1)[:, None, None], axis=-1)
    product = x @ (column / tree.positive(_norm(column)))
    product = product / tree.positive(_norm(product))
    return _norm(x @ product)[:, 0, 0]


def _norm(x: Inexact[Array, "batch n 1"]) -> Array:
    return tree.root(jnp.sum(tree.abs_squared(x), axis=-2, keepdims=True))


def _largest(x: Array) -> Array:
    """The largest absolute value of each matrix or vector."""
    return jnp.max(jnp.abs(x), axis=tuple(range(1, x.ndim)))


def _aligned(numbers: Array | Bool[Array, " batch"], like: Array) -> Array:
    return numbers.reshape(numbers.shape + (1,) * (like.ndim - 1))


# --- batches over equal shapes ----------------------------------------------------------------


def _in_batches(function: Callable[..., Any], groups: Sequence[tuple[Array, ...]]) -> list[Any]:
    """`function(*arrays)` for each group of arrays: once for all groups of small matrices of equal
    shapes, and for one large matrix after the other, which needs the scratch memory of one.

    **Arguments:**

    - `function`: a function of stacks of matrices, that returns an array or a tuple of arrays with
        the same first axis. All it computes must depend on its first argument.
    - `groups`: its arguments.

    **Returns:** the results, in order.
    """
    results: list[Any] = [None] * len(groups)
    result: Any = ()
    for batch in batches(groups):
        # Under strict promotion, real times complex would be refused.
        with jax.numpy_dtype_promotion("standard"):
            first, *rest = joined([groups[i] for i in batch.members])
            stacks = (_by_rows(tree.after(first, result)), *rest)
            result = _applied(function, stacks, batch.size)
        for i, _, own in batch.divided(result):
            results[i] = own
    return results


def _applied(function: Callable[..., Any], stacks: tuple[Array, ...], size: int) -> Any:
    if len(stacks[0]) == 1 or is_small(size):
        return function(*stacks)

    def of_one(one: tuple[Array, ...]) -> Any:
        return jax.tree.map(lambda x: x[0], function(*(x[None] for x in one)))

    return jax.lax.map(of_one, stacks)


def _by_rows(x: Array) -> Array:
    """The array in row-major order."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
