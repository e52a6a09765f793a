"""The link that makes Muon: updates with all singular values near 1."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from ... import fields, tree
from ..._core.engine.matrices import layouts_in_blocks
from ..._core.fields.declare import checked_field
from ..._core.protocol.bases import AbstractStatelessTransform
from ...tree.types import Hyperparameter, Params, Updates, WhereLike
from ...where.layout import Layout, LayoutLike, Matrix
from .._base import AbstractTransform, Context, advise_keywords
from .._layout import scale_of, warn_guessed
from ..momentum.momentum import Trace
from ._newton_schulz import (
    MARGINS,
    PRECONDITIONINGS,
    SETS,
    Triple,
    balanced,
    iteration,
    newton_schulz,
)
from ._routing import chosen, descent, rate_beside_muon, with_adam_elsewhere
from ._stacks import devices_as_text, map_matrices


def _as_triples(coeffs: object) -> object:
    if isinstance(coeffs, str) or not isinstance(coeffs, Sequence | np.ndarray):
        return coeffs
    is_triple = len(coeffs) == 3 and all(isinstance(x, int | float | np.number) for x in coeffs)
    triples = (coeffs,) if is_triple else coeffs
    try:
        return tuple(tuple(float(x) for x in triple) for triple in triples)
    except (TypeError, ValueError):
        return repr(coeffs)  # refused by the check


def _check_coefficients(name: str, coeffs: object) -> None:
    if isinstance(coeffs, str):
        good = coeffs == "standard" or coeffs in SETS
    else:
        good = isinstance(coeffs, tuple) and {len(t) for t in coeffs} == {3}
    if not good:
        names = ", ".join(map(repr, ("standard", *SETS)))
        raise ValueError(
            f"{name} must be one of {names}, or three numbers (a, b, c) for all steps, or three "
            f"for each step, got {coeffs!r}."
        )


class Orthogonalize(AbstractStatelessTransform):
    """Replaces each matrix by the orthogonal matrix nearest to it, approximately: U·S·Vᴴ ↦ s·U·Vᴴ.

        X ← U / ((1 + ε)·‖U‖),   X ← a·X + (b·A + c·A²)·X with A = X·Xᴴ in each step,   u = s·X

    This is a Newton–Schulz iteration: a polynomial of the singular values, which brings them close
    to 1. With the standard coefficients they end between 0.68 and 1.14. After a momentum it makes
    Muon: `sl.Trace(0.95, nesterov=True) | sl.Orthogonalize()`.

    A matrix has outputs as rows and inputs as columns, even if the array is stored the other way
    around. A convolution is one matrix, outputs × (inputs · kernel). Stacks of layers are batches
    of matrices, and blocks, as in `(4:1:1o)`, are matrices of their own, each with its own factor.
    Biases, embeddings and everything else that is not a matrix are refused. `sl.where.matrix`
    selects the matrices.

    The factor s depends on the numbers of outputs and inputs:

    - `"original"`: √max(1, outputs / inputs), as in the original code and in PyTorch;
    - `"spectral"`: √(outputs / inputs), with which learning rates carry over between widths;
    - `"match_rms_adamw"`: 0.2·√max(outputs, inputs), which makes an update as large as AdamW's, so
        that AdamW's learning rate can be used;
    - `None`: 1.

    If the ratio of the sides of a matrix exceeds 1.5, the result is found from its small Gram
    matrix, with less work. The iteration is in the precision of the updates, at least float32, but
    products follow `jax.default_matmul_precision`.

    On a mesh of several devices whole matrices are distributed over the devices, and no device
    waits for another during the iteration.

    **Arguments:**

    - `ns_coeffs`: `"standard"` repeats Jordan's (3.4445, −4.7750, 2.0315). `"tuned"` and
        `"polar_express"` have 5 different steps, and `"ten_steps"` has 10, which end closer to 1:
        write `ns_steps=10`. Or pass three numbers a, b, c for all steps, or a sequence with three
        for each step. If there are fewer steps than a set has, they are its last ones.
    - `ns_steps`: the number of steps of the Newton–Schulz iteration, an int ≥ 1.
    - `scale`: how s depends on the shape.
    - `compute_dtype`: the dtype of the iteration, such as `"bfloat16"`, as in PyTorch. Defaults to
        the precision of the updates.
    - `balance`: the number of iterations, each of which rescales the outputs of a wide matrix, or
        the inputs of a long one, by their norms after the previous iteration, so that these become
        nearly equal; 2 in Aurora. Square matrices stay as they are. With 0, the default, nothing is
        rescaled.
    - `preconditioning`: the first divisor of X. `"frobenius"` is the norm above. `"schatten"` is
        closer to the largest singular value, and `"aol"` scales the rows of the shorter side
        separately, and the inputs of a square matrix; both cost nothing and can save a step.
        `"spectral"` is the largest singular value itself, which needs an eigendecomposition.
    - `eps`: ε, ≥ 0. It is relative to the norm, so that the result does not depend on the size of
        the updates; the authors add it to the norm, which freezes parameters whose gradients are
        below 1e-7. Zeros stay zero.
    - `layout`: the layout of arrays that would otherwise be read wrongly, such as
        `{sl.where.path("w"): "oi"}`, explained in `sl.where.matrix`.

    ```python
    >>> layer = eqx.nn.Linear(64, 256, key=jax.random.key(0))
    >>> tx = sl.Orthogonalize().mask(sl.where.matrix())
    >>> updates, _ = tx.update(layer, tx.init(layer))
    >>> (jnp.linalg.norm(updates.weight, 2) < 2 * 1.15).item()
    True

    ```

    ??? cite "Jordan et al., [Muon](https://kellerjordan.github.io/posts/muon/), 2024; Amsel et al.,
        [The Polar Express](https://arxiv.org/abs/2505.16932), 2025; Ahn et al.,
        [Dion](https://arxiv.org/abs/2504.05295), 2025, for the tuned coefficients; Boissin et al.,
        [Turbo-Muon](https://arxiv.org/abs/2512.04632), 2025, for `"aol"`; Liu et al.,
        [Muon is Scalable](https://arxiv.org/abs/2502.16982), 2025, for `"match_rms_adamw"`;
        Tilde Research, [Aurora](https://github.com/tilde-research/aurora-release), 2026, for
        `balance`"
    """

    ns_coeffs: str | tuple[Triple, ...] = checked_field(
        _check_coefficients, "standard", converter=_as_triples
    )
    ns_steps: int = fields.count_field(5)
    scale: str | None = fields.choice_field("original", "spectral", "match_rms_adamw", None)
    compute_dtype: np.dtype | None = fields.dtype_field()
    balance: int = fields.count_field(0, least=0)
    preconditioning: str = fields.choice_field(*PRECONDITIONINGS, kw_only=True)
    eps: fields.Number = fields.hyperparameter(1e-7, within="[0, inf)", kw_only=True)
    layout: LayoutLike = fields.layout_field()

    keeps_zeros: ClassVar[bool] = True

    def __check_init__(self):
        coeffs = self.ns_coeffs
        # Checked here: the checks of fields run after this method.
        _check_coefficients("Orthogonalize.ns_coeffs", coeffs)
        most = len(SETS.get(coeffs, ()) if isinstance(coeffs, str) else coeffs)
        if most > 1 and self.ns_steps > most:
            raise ValueError(
                f"Orthogonalize has ns_steps={self.ns_steps}, but ns_coeffs={coeffs!r} has {most} "
                f"steps. Write `ns_steps={most}`, or pass more coefficients."
            )

    def init(self, params: Params) -> None:
        tree.check_inexact(params)
        layouts_in_blocks(self, params)
        if self.scale in ("original", "spectral"):
            warn_guessed(self, params)

    def factor(self, matrix: Matrix) -> float:
        """The factor s of a matrix."""
        return scale_of(self.scale, matrix.rows, matrix.columns)

    def notes(self, params: Params) -> tuple[str | None, ...]:
        matrices, on_devices = tuple(map(_matrices, layouts_in_blocks(self, params))), ""
        if all(len(blocks) == 1 for blocks in matrices):
            on_devices = devices_as_text(tuple(m for (m,) in matrices), params)
        return tuple(f"{' and '.join(map(str, blocks))}{on_devices}" for blocks in matrices)

    def apply(self, updates: Updates, params: Params | None, context: Context | None) -> Updates:
        now = self.at(context)
        coeffs = self.ns_coeffs
        function = functools.partial(
            newton_schulz,
            triples=iteration(coeffs, self.ns_steps),
            preconditioning=self.preconditioning,
            margin=MARGINS.get(coeffs, 1.0) if isinstance(coeffs, str) else 1.0,
            dtype=self.compute_dtype,
        )
        if self.balance:
            function = functools.partial(balanced, function, self.balance)
        leaves, structure = jax.tree.flatten(updates)
        layouts = layouts_in_blocks(self, updates)
        blocks = tuple(map(_matrices, layouts))
        if context is not None and len(context.shardings) == len(blocks):
            pairs = zip(context.shardings, blocks, strict=True)
            context = context.replace(shardings=tuple(s for s, of_leaf in pairs for _ in of_leaf))
        divided = [layout.divide(x) for layout, x in zip(layouts, leaves, strict=True)]
        flat = tuple(itertools.chain(*blocks))
        done = map_matrices(lambda x, eps: function(x, eps=eps), flat, divided, context, (now.eps,))
        results = []
        for layout, of_leaf, parts in zip(layouts, blocks, done, strict=True):
            pairs = zip(parts, map(self.factor, of_leaf), strict=True)
            results.append(layout.join([x if s == 1 else x * s for x, s in pairs]))
        return structure.unflatten(results)


def _matrices(layout: Layout) -> tuple[Matrix, ...]:
    """The layout of each block as matrices."""
    return tuple(block.matrix for block in layout.blocks if block.matrix is not None)


@advise_keywords
def muon(
    learning_rate: Hyperparameter,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    b1: Hyperparameter = 0.95,
    eps: Hyperparameter = 1e-7,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = True,
    preconditioning: str = "frobenius",
    scale: str | None = "original",
    compute_dtype: Any | None = None,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """Muon for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(s·orth(m) + λ·p)   with   mₜ = gₜ + β·tₜ,   tₜ = gₜ + β·tₜ₋₁

    orth(m) has the singular vectors of m, and singular values near 1. `sl.where.matrix` selects the
    matrices. Vectors, embeddings and parameters that `where` leaves out go to AdamW: pass
    `where=~sl.where.path("head.**")` to train an output layer with AdamW, as the authors advise.
    `opt.describe(model)` shows which is which.

    With the original scale η is much larger than for AdamW, such as 0.02, so that AdamW gets
    0.015·η by default: 0.02 and 0.0003 are the defaults of `MuonWithAuxAdam`, the
    [authors' code](https://github.com/KellerJordan/Muon). With `scale="match_rms_adamw"` both
    rates are η, as in Keras.

    Differs from Optax: weights of Equinox's layers are outputs × inputs, so s has the right ratio;
    convolutions and stacks of layers are matrices too; the momentum is a sum, as in PyTorch and the
    original code. Optax corrects the bias of a mean, which changes its direction:
    `sl.Ema(0.95, nesterov=True) | sl.Orthogonalize() | ...` does so too.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`: β, the decay of the momentum, in [0, 1).
    - `weight_decay`: λ, ≥ 0. The default is no decay, unlike in PyTorch.
    - `decay_where`: which of the matrices decay. Defaults to all.
    - `mu_dtype`: the dtype of the momentum.
    - `nesterov`: whether m looks ahead; mₜ = tₜ if not.
    - `ns_coeffs`, `ns_steps`, `eps`, `preconditioning`, `compute_dtype`, `layout`: as in
        `Orthogonalize`.
    - `scale`: as in `Orthogonalize`. Optax's `consistent_rms=0.2` is `scale="match_rms_adamw"`.
    - `where`: which matrices are trained with Muon. Defaults to all.
    - `adam_learning_rate`: the learning rate of AdamW. Defaults to η with
        `scale="match_rms_adamw"`, and to 0.015·η otherwise.
    - `adam_b1`, `adam_b2`, `adam_weight_decay`: as in `adamw`.

    **Returns:** a partition of the chain of `Trace`, `Orthogonalize`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ```python
    >>> sl.muon(0.02)
    (sl.ScaleByAdam() | sl.ScaleByLearningRate(0.0003)).partition(
        {
            sl.where.matrix(): (
                sl.Trace(0.95, nesterov=True)
                | sl.Orthogonalize()
                | sl.ScaleByLearningRate(0.02)
            )
        },
        names=('muon',)
    )

    ```

    ??? cite "Jordan et al., [Muon](https://kellerjordan.github.io/posts/muon/), 2024; Liu et al.,
        [Muon is Scalable for LLM Training](https://arxiv.org/abs/2502.16982), 2025"
    """
    rule = Trace(b1, nesterov, mu_dtype) | Orthogonalize(
        ns_coeffs,
        ns_steps,
        scale,
        compute_dtype,
        preconditioning=preconditioning,
        eps=eps,
        layout=layout,
    )
    rule = descent(rule, learning_rate, weight_decay, decay_where)
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    default = rate_beside_muon(learning_rate, scale)
    return with_adam_elsewhere(rule, "muon", chosen(where, layout), default, *adam_numbers)
