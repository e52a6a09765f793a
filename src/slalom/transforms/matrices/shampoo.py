"""The inverse fourth roots of two Kronecker factors: Shampoo."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from ... import tree
from ..._core.fields.declare import Hyperparameter, count_field, hyperparameter
from ..._core.fields.schedule import AbstractSchedule
from ..._core.protocol.context import Context
from ..._core.protocol.parts import CHECK, Part
from ..._core.protocol.transform import AbstractTransform, require_transform
from ..._core.protocol.wrapper import AbstractComposite
from ..._core.protocol.write import Writer
from ..._core.state.marks import per_leaf, per_param, until_reset
from ...tree.types import Gradients, Params, Updates
from ...where.layout import LayoutLike, Matrix
from ._kronecker import (
    adjoint,
    bounded_entries,
    flat,
    frequency_at,
    frequency_field,
    in_batches,
    shaped,
)
from ._layout import layout_field, matrices, matrices_or_none


class ScaleByShampooState(eqx.Module):
    """The state of `ScaleByShampoo`."""

    graft: Any
    """The state of the transform whose norm updates take."""
    age: Int[Array, "*leaves"] = per_leaf()
    since: Int[Array, ""] = until_reset()
    """The number of steps since the last refresh."""
    statistics: PyTree[Inexact[Array, "_ _ _"]] = per_param()
    """At each leaf a tuple of L and R, with an entry for each block."""
    roots: PyTree[Inexact[Array, "_ _ _"]] = per_param()
    """At each leaf a tuple of their inverse fourth roots."""


class ScaleByShampoo(AbstractComposite[ScaleByShampooState]):
    """Shampoo: preconditions both sides of a matrix by inverse fourth roots.

        Lₜ = β·Lₜ₋₁ + (1 − β)·G·Gᴴ,   Rₜ = β·Rₜ₋₁ + (1 − β)·Gᴴ·G
        Δ = L̂^(−1/4)·G·R̂^(−1/4),   U = Δ·‖S‖ / ‖Δ‖

    L̂ and R̂ are corrected for the bias towards the start at zero, and S is the update of another
    transform for the same gradient, whose norm that of Shampoo takes: it is grafted. With β = 1, L
    and R are sums. The roots are those of L̂ + ε·λ·I, where λ is the largest eigenvalue. They are
    computed in the first step and then every f steps, in one branch, so the steps in between pay
    nothing for it.

    A matrix with a side longer than `block_size` is cut into blocks of equal size, each with
    factors of its own. Norms are those of the whole matrix.

    Follows Anil et al., who apply momentum after the preconditioner, as in `sl.shampoo`. There ε is
    also added to the first L and R.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. Factors and roots
    take 2·(n² + m²) numbers for an n × m block, in at least float32. On a mesh each device has all
    of them. Under a `vmap` that batches the state, each step costs as much as a refresh.

    **Arguments:**

    - `b2`: β, in [0, 1].
    - `eps`: ε, ≥ 0.
    - `precondition_frequency`: f, the number of steps from one refresh to the next: an int ≥ 1,
        or a schedule, rounded to the nearest integer ≥ 1.
    - `block_size`: the longest side of a block.
    - `graft`: the transform that computes S, such as `sl.ScaleByAdam()`, or `sl.Identity()` for the
        norm of the gradient. Defaults to no grafting: U = Δ.
    - `layout`: as in `sl.where.matrix`.

    ??? cite "Gupta, Koren & Singer, [Shampoo: Preconditioned Stochastic Tensor
        Optimization](https://arxiv.org/abs/1802.09568), 2018; Anil et al., [Scalable Second Order
        Optimization for Deep Learning](https://arxiv.org/abs/2002.09018), 2020, for blocks and
        grafting"
    """

    b2: Hyperparameter = hyperparameter(0.999, within="[0, 1]")
    eps: Hyperparameter = hyperparameter(1e-6, within="[0, inf)")
    precondition_frequency: int | Int[Array, "*runs"] | AbstractSchedule = frequency_field(10)
    block_size: int = count_field(1024)
    graft: AbstractTransform | None = eqx.field(
        default=None, kw_only=True, metadata={CHECK: require_transform}
    )
    layout: LayoutLike = layout_field()

    def init(self, params: Params) -> ScaleByShampooState:
        leaves, structure = jax.tree.flatten(params)
        pairs = [
            (_Blocks.of(m, self.block_size), tree.accumulation_dtype(tree.canonical(x.dtype)))
            for m, x in zip(matrices(self, params), leaves, strict=True)
        ]

        def zeros() -> PyTree:
            # Two trees, since no two leaves of a state may share a buffer.
            return structure.unflatten([blocks.zeros(dtype) for blocks, dtype in pairs])

        return ScaleByShampooState(
            age=tree.fresh_count(),
            since=tree.fresh_count(),
            statistics=zeros(),
            roots=zeros(),
            graft=None if self.graft is None else self.graft.init(params),
        )

    def children(
        self, state: Any = None, context: Context | None = None, params: Params | None = None
    ) -> tuple[Part, ...]:
        if self.graft is None:
            return ()
        inner = None if state is None else state.graft
        return (Part(("graft",), self.graft, inner, context, params, lambda outer: outer.graft),)

    def run(
        self,
        write: Writer,
        updates: Gradients,
        state: ScaleByShampooState,
        params: Params | None,
        context: Context | None,
    ) -> tuple[Any, ScaleByShampooState]:
        grafted, graft = None, state.graft
        for part in self.children(state, context, params):
            grafted, graft = part.run(write.returning, updates)
        if jax.tree.leaves(updates):
            updates, state = self._preconditioned(updates, grafted, state, context)
        return write(params, updates), eqx.tree_at(
            lambda s: s.graft, state, graft, is_leaf=lambda x: x is None
        )

    def _preconditioned(
        self,
        updates: Updates,
        grafted: Updates | None,
        state: ScaleByShampooState,
        context: Context | None,
    ) -> tuple[Updates, ScaleByShampooState]:
        structure = jax.tree.structure(updates)
        found = matrices(self, updates)

        def read(x: PyTree) -> list[Array]:
            return [m.read(x) for m, x in zip(found, jax.tree.leaves(x), strict=True)]

        grads = read(updates)
        old, roots = map(structure.flatten_up_to, (state.statistics, state.roots))
        age = tree.increment(state.age)
        now = self.at(context)
        is_sum = now.b2 == 1
        now.c2 = jnp.where(is_sum, 1, 1 - now.b2)
        now.scale = jnp.where(is_sum, 1, tree.bias_correction(jnp.where(is_sum, 0, now.b2), age))
        (statistics,) = tree.map_leaves(
            self._statistics, (grads,), now, per_param=(old,), in_turn=True
        )
        is_new = jnp.any(state.age == 0)
        due = is_new | (state.since + 1 >= frequency_at(self, context))

        def refresh(statistics, roots):
            del roots
            scales = [now.scale if now.scale.ndim == 0 else now.scale[i] for i in range(len(grads))]
            groups = [
                (x, jnp.broadcast_to(scale.astype(tree.real_dtype(x.dtype)), len(x)))
                for pair, scale in zip(statistics, scales, strict=True)
                for x in pair
            ]

            def of_debiased(x, scale):
                return _inverse_fourth_roots(x * scale[:, None, None], now.eps)

            fresh = iter(in_batches(of_debiased, groups))
            return flat([tuple(next(fresh) for _ in pair) for pair in statistics])

        new = jax.lax.cond(due, refresh, lambda _, roots: roots, statistics, flat(roots))
        roots = shaped(new, roots)
        trees = (grads,) if grafted is None else (grads, read(grafted))
        result = tree.map_leaves(self._direction, trees, per_param=(roots,), in_turn=True)
        updates = structure.unflatten([m.write(x) for m, x in zip(found, result, strict=True)])
        return updates, ScaleByShampooState(
            age=age,
            since=jnp.where(due, 0, tree.increment(state.since)),
            statistics=structure.unflatten(statistics),
            roots=structure.unflatten(roots),
            graft=state.graft,
        )

    def _statistics(self, now, g, old):
        blocks = _Blocks.of_shape(g.shape, self.block_size).split(bounded_entries(g))
        left, right = old
        left = now.b2 * left + now.c2 * (blocks @ adjoint(blocks))
        right = now.b2 * right + now.c2 * (adjoint(blocks) @ blocks)
        return ((left, right),)

    def _direction(self, _, g, *rest):
        *grafted, (left, right) = rest
        cut = _Blocks.of_shape(g.shape, self.block_size)
        direction = cut.join(left @ cut.split(bounded_entries(g)) @ right)
        if not grafted:
            return direction
        largest, norm = _scaled_norm(direction)
        size, of_size = _scaled_norm(grafted[0])
        limit = float(jnp.finfo(size.dtype).max) / 4
        size = jnp.minimum(size, limit / jnp.maximum(of_size, 1)) * of_size
        # Divided first by the largest entry, since the quotient of the norms may overflow.
        inverse = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)
        return direction * (1 / tree.positive(largest)) * inverse * size

    # --- traits -----------------------------------------------------------------------------

    def notes(self, params: Params) -> tuple[str | None, ...]:
        def note(matrix: Matrix | None) -> str | None:
            if matrix is None:
                return None
            blocks = str(_Blocks.of(matrix, self.block_size))
            return ", ".join(filter(None, (str(matrix), blocks)))

        return tuple(map(note, matrices_or_none(self, params)))


# --- blocks ---------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """How matrices are cut into blocks of equal size. Zeros are appended where none fits."""

    batch: int
    rows: int
    columns: int
    down: int
    """The number of blocks from the first row to the last."""
    across: int
    height: int
    width: int

    @classmethod
    def of(cls, matrix: Matrix, size: int) -> "_Blocks":
        return cls.of_shape((matrix.batch, matrix.rows, matrix.columns), size)

    @classmethod
    def of_shape(cls, shape: tuple[int, ...], size: int) -> "_Blocks":
        batch, rows, columns = shape
        down, across = max(1, -(-rows // size)), max(1, -(-columns // size))
        return cls(batch, rows, columns, down, across, -(-rows // down), -(-columns // across))

    def zeros(self, dtype: Any) -> tuple[Array, Array]:
        number = self.batch * self.down * self.across
        return (
            jnp.zeros((number, self.height, self.height), dtype),
            jnp.zeros((number, self.width, self.width), dtype),
        )

    def split(self, x: Inexact[Array, "_ _ _"]) -> Inexact[Array, "_ _ _"]:
        """The blocks of matrices, row by row."""
        if self.down == self.across == 1:
            return x
        more = self.down * self.height - self.rows, self.across * self.width - self.columns
        x = jnp.pad(x, ((0, 0), (0, more[0]), (0, more[1])))
        x = x.reshape(self.batch, self.down, self.height, self.across, self.width)
        return x.swapaxes(2, 3).reshape(-1, self.height, self.width)

    def join(self, blocks: Inexact[Array, "_ _ _"]) -> Inexact[Array, "_ _ _"]:
        """Undoes `split`."""
        if self.down == self.across == 1:
            return blocks
        x = blocks.reshape(self.batch, self.down, self.across, self.height, self.width)
        x = x.swapaxes(2, 3).reshape(self.batch, self.down * self.height, self.across * self.width)
        return x[:, : self.rows, : self.columns]

    def __str__(self) -> str:
        if self.down == self.across == 1:
            return ""
        return f"{self.down * self.across} blocks of {self.height} × {self.width}"


# --- numbers --------------------------------------------------------------------------------


def _inverse_fourth_roots(x: Inexact[Array, "_ n n"], eps: Any) -> Inexact[Array, "_ n n"]:
    """(x + ε·λ·I)^(−1/4) of positive semidefinite matrices with largest eigenvalue λ."""
    limits = jnp.finfo(tree.real_dtype(x.dtype))
    diagonal = jnp.diagonal(x, axis1=-2, axis2=-1).real
    # With a larger bound than that of `tree.positive`, a first gradient of zeros does not leave
    # roots with which the next one overflows.
    scale = jnp.maximum(jnp.max(diagonal, axis=-1, initial=0), float(limits.tiny) ** 0.75)
    values, vectors = jnp.linalg.eigh(x * (1 / scale)[:, None, None], symmetrize_input=False)
    largest = jnp.max(values, axis=-1, keepdims=True, initial=0)
    values = jnp.maximum(values, 0) + eps.astype(values.dtype) * largest
    powers = jnp.where(largest > 0, tree.positive(values), 1) ** -0.25
    with jax.default_matmul_precision("highest"):
        roots = (vectors * powers[:, None, :]) @ adjoint(vectors)
    return roots * (scale**-0.25)[:, None, None]


def _scaled_norm(x: Inexact[Array, "batch n m"]) -> tuple[Array, Array]:
    """The largest absolute value of each matrix, and its norm divided by that."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    # A quarter of the largest number still has an inverse.
    scaled = (x / 4) * (1 / tree.positive(largest / 4))
    return largest, tree.root(jnp.sum(tree.abs_squared(scaled), axis=(-2, -1), keepdims=True))
