"""Orthogonal updates of low rank, which follow the momentum with an error feedback: Dion."""

import math
import zlib
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ... import fields, tree
from ..._core.engine.matrices import matrices
from ..._core.fields.declare import checked_field
from ..._core.fields.keys import AbstractKeyed, key_field
from ...rules._base import AbstractRule, AbstractTransform, advise_keywords
from ...rules._layout import matrices_as_text, scale_of, warn_guessed
from ...rules.matrices._orthonormal import (
    adjoint,
    first_shift,
    product,
    products_of,
    shifted_factor,
    times_adjoint,
)
from ...rules.matrices._routing import chosen, descent, rate_beside_muon, with_adam_elsewhere
from ...rules.momentum.momentum import first_moment
from ...tree.paths import leaf_paths
from ...tree.types import Hyperparameter, Params, WhereLike
from ...where.layout import LayoutLike, Matrix


def _check_fraction(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a float, got {value!r} of type {type(value).__name__}.")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}.")


class ScaleByDionState(eqx.Module):
    """The state of `ScaleByDion`."""

    mu: PyTree[Inexact[Array, "..."]] = fields.param_like()
    """M, the sum of gradients after most of each update was removed."""
    basis: PyTree[Inexact[Array, "_ _ _"]] = fields.per_param()
    """Qᴴ of each matrix. Each device has all of it: divided along other axes than M, it would make
    XLA exchange M."""


class ScaleByDion(AbstractKeyed, AbstractRule[ScaleByDionState]):
    """Dion: an orthogonal update of rank r, from one step of a power iteration.

        M ← M + G
        P = orth(M·Q),   R = Mᴴ·P
        M ← M − (1 − β)·P·Rᴴ
        Q ← R, with columns of norm 1
        U = s·P·Qᴴ

    for an n × m matrix of outputs × inputs, where P is n × r and Q is m × r. The columns of P are
    orthonormal, the columns of Q nearly so, and the singular values of P·Qᴴ are near 1: with r =
    min(n, m), and an M that stays the same, U tends to the target of `Orthogonalize`. Only the part
    P·Rᴴ of M has been used, and only that part decays. The rest stays for later steps.

    Devices that share a matrix exchange only products with r rows or columns, where `Orthogonalize`
    exchanges whole matrices. For this reason P is found from Gram matrices of r × r: three rounds
    of Cholesky's method are as accurate as a QR decomposition.

    Where a column of M·Q depends on those before it, up to rounding, that column of P is 0, and
    that of Q stays. So an update has at most the rank of M, and zeros stay zero. The code of the
    authors has an arbitrary direction there, and adds ε = 1e-8 to norms.

    Parameters must be matrices, as `sl.where.matrix()` selects and reads them. The matrices of a
    stack are separate. M has as many elements as the parameter, and is divided among devices in the
    same way. Q has r·m, in at least float32, on each device.

    **Arguments:**

    - `rank_fraction`: r / min(n, m), rounded up to a whole r, in (0, 1].
    - `b1`: β, in [0, 1): the share of P·Rᴴ that stays in M.
    - `scale`: how s depends on the shape, as in `Orthogonalize`. With `"match_rms_adamw"` it is
        0.2·√(n·m / r), as there are r singular values.
    - `mu_dtype`: the dtype in which M is stored; see `ScaleByAdam`.
    - `key`: the key of the first Q, which is normal: an int in [0, 2³¹) or a PRNG key.
    - `layout`: as in `sl.where.matrix`.

    ```python
    >>> layer = eqx.nn.Linear(64, 256, key=jax.random.key(0))
    >>> tx = sl.contrib.ScaleByDion(0.25, scale=None).mask(sl.where.matrix())
    >>> updates, _ = tx.update(layer, tx.init(layer))
    >>> jnp.linalg.matrix_rank(updates.weight).item()
    16

    ```

    ??? cite "Ahn et al., [Dion: Distributed Orthonormalized
        Updates](https://arxiv.org/abs/2504.05295), 2025; Fukaya et al., [Shifted Cholesky QR for
        Computing the QR Factorization of Ill-Conditioned
        Matrices](https://arxiv.org/abs/1809.11085), 2018"
    """

    rank_fraction: Any = checked_field(_check_fraction, 0.25)
    b1: fields.Number = fields.hyperparameter(0.95, within="[0, 1)")
    scale: str | None = fields.choice_field("spectral", "original", "match_rms_adamw", None)
    mu_dtype: np.dtype | None = fields.dtype_field(kw_only=True)
    key: Any = key_field(default=0, kw_only=True)
    layout: LayoutLike = fields.layout_field()

    over: ClassVar[str] = "matrix"

    def init(self, params: Params) -> ScaleByDionState:
        tree.check_inexact(params)
        leaves, structure = jax.tree.flatten(params)
        key = self._typed_key(self._fresh_key_data())

        def first(path: str, matrix: Matrix, x: Array) -> Array:
            # From the path, so that a leaf keeps its key when others come or go.
            k = jax.random.fold_in(key, zlib.crc32(path.encode()))
            shape = matrix.batch, self.rank(matrix.rows, matrix.columns), matrix.columns
            return jax.random.normal(k, shape, tree.accumulation_dtype(tree.canonical(x.dtype)))

        rows = zip(leaf_paths(params), matrices(self, params), leaves, strict=True)
        if self.scale in ("original", "spectral"):
            warn_guessed(self, params)
        return ScaleByDionState(
            mu=first_moment(self, params, "b1"),
            basis=structure.unflatten([first(*one) for one in rows]),
        )

    def rank(self, rows: int, columns: int) -> int:
        """The rank r of the updates of a matrix."""
        short = min(rows, columns)
        # A product such as 0.1·30 may be above a whole number by rounding only.
        return min(short, max(1, math.ceil(self.rank_fraction * short - 1e-9)))

    def factor(self, matrix: Matrix) -> float:
        """The factor s of a matrix."""
        rows, columns = matrix.rows, matrix.columns
        return scale_of(self.scale, rows, columns, self.rank(rows, columns))

    # --- the phases -------------------------------------------------------------------------

    def advance(self, g, leaf):
        mu = leaf.mu + g
        limits = jnp.finfo(self.b1.dtype)
        # Neither this number nor its inverse is subnormal, or overflows. Nothing depends on it.
        size = jnp.clip(jnp.max(jnp.abs(mu)), float(limits.tiny), float(limits.max) / 8)
        size = jax.lax.stop_gradient(size)
        left = _orthonormal(times_adjoint(mu, leaf.basis * (1 / size)))
        right = adjoint(left * (1 / size)) @ mu
        norm = tree.norm(right, 1)
        used = norm != 0  # also where it is NaN, which must show
        leaf.basis = jnp.where(used, right / jnp.where(used, norm, 1), leaf.basis)
        leaf.mu = mu - ((1 - self.b1) * size * left) @ right
        self.left = left

    def direction(self, g, leaf):
        rows, columns = g.shape
        s = scale_of(self.scale, rows, columns, self.left.shape[1])
        return (s * self.left) @ leaf.basis

    # --- traits -----------------------------------------------------------------------------

    def notes(self, params: Params) -> tuple[str | None, ...]:
        return matrices_as_text(
            self, params, lambda m: f"{m} at rank {self.rank(m.rows, m.columns)}"
        )


def _orthonormal(x: Inexact[Array, "n r"]) -> Inexact[Array, "n r"]:
    """Q of a QR decomposition, up to signs; 0 for columns that depend on those before them.

    It consists of products, and of factorizations of r × r matrices, so that devices that share the
    rows exchange r² numbers in each round. A QR decomposition would need all rows on each device,
    and one round of Cholesky's method would lose half of the digits.
    """
    x = x * tree.inverse_root(tree.positive(jnp.sum(tree.abs_squared(x))))
    # It has a factor whatever the rank is. A round multiplies the part of a column that is new, if
    # it is small, by 1/√shift. After two rounds it is near 1, or it was within the errors of the
    # products.
    shift = first_shift(x)
    x = _round_of_cholesky(_round_of_cholesky(x, shift), shift)
    x = jnp.where(tree.norm(x, 0) <= 0.5, 0, x)  # NaN stays
    x = _round_of_cholesky(x, shift)
    norms = tree.norm(x, 0)
    return x / jnp.where(norms == 0, 1, norms)  # 0, or nearly 1 - shift / 2


def _round_of_cholesky(x: Inexact[Array, "n r"], shift: float) -> Inexact[Array, "n r"]:
    """The matrix times an upper triangular one, with columns that are closer to orthonormal."""
    factor = shifted_factor(products_of(x), shift)
    identity = jnp.eye(x.shape[1], dtype=x.dtype)
    # The inverse and not a solution for x, whose rows may be on several devices. The shift bounds
    # it.
    inverse = jax.lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    return product(x, inverse, times_adjoint)


@advise_keywords
def dion(
    learning_rate: Hyperparameter,
    rank_fraction: object = 0.25,
    b1: Hyperparameter = 0.95,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    mu_dtype: Any | None = None,
    *,
    scale: str | None = "spectral",
    key: object = 0,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """Dion for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(s·P·Qᴴ + λ·p)

    It is for matrices that are divided among many devices: where `muon` exchanges whole matrices,
    it exchanges products of rank r. What an update leaves out stays in the momentum. Matrices that
    are on one device are better left to `muon`, which has all singular values.

    **Arguments:**

    - `learning_rate`: η; 0.01 in the authors' code.
    - `rank_fraction`, `scale`, `key`: as in `ScaleByDion`.
    - `b1`: β, in [0, 1): the share of an applied update that stays in the momentum.
    - `weight_decay`, `decay_where`, `mu_dtype`: as in `muon`.
    - `where`, `layout`, `adam_learning_rate`, `adam_b1`, `adam_b2`, `adam_weight_decay`: as in
        `muon`.

    **Returns:** a partition of the chain of `ScaleByDion`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ```python
    >>> sl.contrib.dion(0.02, 0.5)
    (sl.ScaleByAdam() | sl.ScaleByLearningRate(0.0003)).partition(
        {
            sl.where.matrix(): (
                sl.contrib.ScaleByDion(rank_fraction=0.5)
                | sl.ScaleByLearningRate(0.02)
            )
        },
        names=('dion',)
    )

    ```

    ??? cite "Ahn et al., [Dion: Distributed Orthonormalized
        Updates](https://arxiv.org/abs/2504.05295), 2025"
    """
    rule = ScaleByDion(rank_fraction, b1, scale, mu_dtype=mu_dtype, key=key, layout=layout)
    rule = descent(rule, learning_rate, weight_decay, decay_where)
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    default = rate_beside_muon(learning_rate, scale)
    return with_adam_elsewhere(rule, "dion", chosen(where, layout), default, *adam_numbers)
