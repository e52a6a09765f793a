"""A preconditioner that is fitted to the gradients by descent: PSGD Kron."""

from types import SimpleNamespace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Inexact, Int, PyTree, UInt32

from ... import fields, tree
from ..._core.fields.keys import AbstractKeyed, key_field
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike
from .._base import AbstractRule, AbstractTransform, Context, advise_keywords
from ..momentum.momentum import Ema
from ..shaping.clip import clip_factor
from ._kronecker import bounded_entries, has_factor, sides_as_text
from ._orthonormal import adjoint, adjoint_times
from ._routing import chosen, descent, with_adam_elsewhere


class ScaleByKronState(eqx.Module):
    """The state of `ScaleByKron`."""

    key: UInt32[Array, "*words"]
    """The raw data of the key for the next refresh."""
    since: Int[Array, ""] = fields.until_reset()
    """The number of steps since the last refresh."""
    factors: PyTree[Inexact[Array, "..."]] = fields.per_param(spread=True)
    """At each leaf a tuple of Q_L and Q_R; a vector for each diagonal one."""


class ScaleByKron(AbstractKeyed, AbstractRule[ScaleByKronState]):
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
    steps in between do not pay for them.

    The root mean square is taken over one matrix. Put `sl.Ema(0.9)` in front of it, as `sl.kron`
    does.

    Follows the authors' code. There, the norms of Q_L and Q_R are balanced in a hundredth of the
    refreshes; here in every refresh, which does not change P. A gradient of zeros leaves the
    factors as they are; otherwise they would grow forever.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. A side that is
    longer than `max_size` has a diagonal factor. The factors have n² + m² elements for an n × m
    matrix, in at least float32. Devices that share a matrix divide them, if the mesh has automatic
    axes. Under a `vmap` that batches the state, each step costs as much as a refresh.

    **Arguments:**

    - `update_probability`: p, in (0, 1], usually a schedule. Defaults to the authors' schedule, 1
        in the first 500 steps, and then e^(−(n − 500)/1000) down to 0.03 at step 4007.
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

    update_probability: fields.OptionalNumber = fields.hyperparameter(None, within="(0, 1]")
    preconditioner_lr: fields.Number = fields.hyperparameter(0.1, within="[0, inf)")
    preconditioner_init_scale: fields.Number = fields.hyperparameter(1.0, within="(0, inf)")
    max_size: int = fields.count_field(8192)
    key: Any = key_field(default=0)
    clip: fields.Number = fields.hyperparameter(1.1, within="[0, inf]", kw_only=True)
    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "matrix"
    refreshes: ClassVar[tuple[str, ...]] = ("factors",)
    refresh_before: ClassVar[str] = "advance"
    keeps_zeros: ClassVar[bool] = True

    def init(self, params: Params) -> ScaleByKronState:
        scale = tree.root(self.at(Context(step=0)).preconditioner_init_scale)

        def first(rows: int, columns: int, dtype: np.dtype) -> tuple[Array, ...]:
            sides = zip(has_factor((rows, columns), self.max_size), (rows, columns), strict=True)
            ones = [jnp.eye(n, dtype=dtype) if has else jnp.ones(n, dtype) for has, n in sides]
            return tuple(one * scale.astype(dtype) for one in ones)

        return ScaleByKronState(
            since=tree.fresh_count(),
            key=self._fresh_key_data(),
            factors=self.for_each_matrix(params, first),
        )

    # --- the phases -------------------------------------------------------------------------

    def at(self, context: Context | None) -> SimpleNamespace:
        now = super().at(context)
        if now.update_probability is None:
            step = self.demand("step", None if context is None else context.step)
            number = jnp.asarray(step, now.preconditioner_lr.dtype)
            now.update_probability = jnp.clip(jnp.exp((500 - number) / 1000), 0.03, 1)
        return now

    def begin(self, state):
        wait = 1 / self.update_probability
        self.due = (state.since + 1).astype(wait.dtype) >= wait
        state.since = jnp.where(self.due, 0, tree.increment(state.since))
        key, self.key = jax.random.split(self._typed_key(state.key))
        state.key = jnp.where(self.due, jax.random.key_data(key), state.key)

    def refresh(self, g, leaf):
        noise = jax.random.normal(self.key, g.shape, g.dtype)
        g, left, right = map(_by_rows, tree.after((g, *leaf.factors), noise))
        leaf.factors = _moved(self.preconditioner_lr, g, noise, left, right)

    def direction(self, g, leaf):
        left, right = leaf.factors
        g = bounded_entries(g)
        g = _adjoint_times(_times(g, left), left)
        u = _adjoint_times(_times(g.mT, right), right).mT
        return u * clip_factor(tree.rms(u), self.clip)

    # --- traits -----------------------------------------------------------------------------

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return sides_as_text(self, params, "diagonal factor of")


# --- one matrix -----------------------------------------------------------------------------


def _times(x: Array, factor: Array) -> Array:
    """Q·x."""
    return factor[:, None] * x if factor.ndim == 1 else factor @ x


def _adjoint_times(x: Array, factor: Array) -> Array:
    """Qᴴ·x."""
    return jnp.conj(factor)[:, None] * x if factor.ndim == 1 else adjoint_times(factor, x)


def _solved(x: Array, factor: Array) -> Array:
    """Q⁻ᴴ·x."""
    if factor.ndim == 1:
        return x / jnp.conj(factor)[:, None]
    return jax.lax.linalg.triangular_solve(
        factor, x, left_side=True, lower=False, transpose_a=True, conjugate_a=True
    )


def _moved(rate: Array, g: Array, noise: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """The factors after one step towards whitening the gradients."""
    with jax.default_matmul_precision("highest"):
        a = _times(_times(bounded_entries(g), left).mT, right).mT
        b = _solved(_solved(noise, left).mT, right).mT
        # The step is relative, so A and B may be scaled to prevent that their squares overflow.
        inverse = 1 / tree.positive(jnp.maximum(_largest(a), _largest(b)))
        a, b = a * inverse, b * inverse
        new = (_step(rate, a, b, left), _step(rate, a.mT, b.mT, right))
    sizes = [_largest(factor) for factor in new]
    mean = tree.root(sizes[0]) * tree.root(sizes[1])
    balanced = [q * (mean / size) for q, size in zip(new, sizes, strict=True)]
    is_zero = _largest(g) == 0
    left, right = (
        jnp.where(is_zero, old, q) for old, q in zip((left, right), balanced, strict=True)
    )
    return left, right


def _step(rate: Array, a: Array, b: Array, factor: Array) -> Array:
    if factor.ndim == 1:
        gain = jnp.sum(tree.abs_squared(a), axis=-1)
        loss = jnp.sum(tree.abs_squared(b), axis=-1)
        norm = jnp.max(gain + loss)
        return factor - rate * ((gain - loss) / tree.positive(norm)) * factor
    gain, loss = a @ adjoint(a), b @ adjoint(b)
    inverse = rate / tree.positive(_norm_lower_bound(gain + loss))
    return factor - jnp.triu((gain - loss) * inverse) @ factor


def _norm_lower_bound(x: Inexact[Array, "n n"]) -> Array:
    """A lower bound of the spectral norm of a Hermitian matrix, usually tight within a tenth."""
    column = x[:, jnp.argmax(jnp.sum(tree.abs_squared(x), axis=0))]
    product = x @ (column / tree.positive(tree.norm(column)))
    product = product / tree.positive(tree.norm(product))
    return tree.norm(x @ product)


def _largest(x: Array) -> Array:
    return jnp.max(jnp.abs(x))


def _by_rows(x: Array) -> Array:
    """The array in row-major order."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@advise_keywords
def kron(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    update_probability: Hyperparameter | None = None,
    preconditioner_lr: Hyperparameter = 0.1,
    preconditioner_init_scale: Hyperparameter = 1.0,
    max_size: int = 8192,
    mu_dtype: Any | None = None,
    *,
    clip: Hyperparameter = 1.1,
    key: object = 0,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """PSGD Kron for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(U·min(1, c / rms(U)) + λ·p)   with   U = P_L·M·P_Rᵀ

    The mean of the gradients is whitened by two triangular factors, and the root mean square of
    each update is clipped. The authors recommend a third of Adam's learning rate. `sl.where.matrix`
    selects the matrices. Vectors, embeddings and parameters that `where` leaves out go to AdamW.
    `opt.describe(model)` shows which is which.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`: the decay of the mean of gradients, in [0, 1).
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which of the matrices decay. Defaults to all.
    - `mu_dtype`: the dtype of the mean of gradients.
    - `update_probability`, `preconditioner_lr`, `preconditioner_init_scale`, `max_size`, `clip`,
        `key`, `layout`: as in `ScaleByKron`.
    - `where`: which matrices are trained with Kron. Defaults to all.
    - `adam_learning_rate`: the learning rate of AdamW. Defaults to η.
    - `adam_b1`, `adam_b2`, `adam_weight_decay`: as in `adamw`.

    **Returns:** a partition of the chain of `Ema`, `ScaleByKron`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ??? cite "Li, [Preconditioned Stochastic Gradient
        Descent](https://arxiv.org/abs/1512.04202), 2015; Pooladzandi & Li, [Curvature-Informed SGD
        via General Purpose Lie-Group Preconditioners](https://arxiv.org/abs/2402.04553), 2024"
    """
    rule = Ema(b1, accumulator_dtype=mu_dtype) | ScaleByKron(
        update_probability,
        preconditioner_lr,
        preconditioner_init_scale,
        max_size,
        key,
        clip=clip,
        layout=layout,
    )
    rule = descent(rule, learning_rate, weight_decay, decay_where)
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    return with_adam_elsewhere(rule, "kron", chosen(where, layout), learning_rate, *adam_numbers)
