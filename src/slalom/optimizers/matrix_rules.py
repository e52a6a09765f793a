"""Muon and its relatives: rules for the matrices of hidden layers, with others for the rest."""

from collections.abc import Mapping
from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.fields.schedule import as_schedule
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..rules import (
    Ema,
    NormalizeColumns,
    Orthogonalize,
    Scale,
    ScaleByDion,
    ScaleByFanIn,
    ScaleByLearningRate,
    ScaleByRowRms,
    ScaleBySign,
    Trace,
)
from ..tree.types import is_function
from ..where import matrix
from ..where.layout import LayoutLike
from ..where.resolve import Where, WhereLike
from ._routing import chosen, decay_if_any, with_adam_elsewhere


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

    orth(m) has the singular vectors of m, and singular values near 1. Matrices are what
    `sl.where.matrix` selects. Vectors, embeddings and what `where` leaves out go to AdamW: pass
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
    rule = chain(
        Trace(b1, nesterov, mu_dtype),
        Orthogonalize(
            ns_coeffs,
            ns_steps,
            scale,
            compute_dtype,
            preconditioning=preconditioning,
            eps=eps,
            layout=layout,
        ),
        *decay_if_any(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    default = _default_adam_rate(learning_rate, scale)
    return with_adam_elsewhere(rule, "muon", chosen(where, layout), default, *adam_numbers)


@advise_keywords
def norm_muon(
    learning_rate: Hyperparameter,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
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
    """NorMuon for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(s·r·D·orth(m) + λ·p)

    It is `muon` with `ScaleByRowRms` after `Orthogonalize`: the diagonal matrix D makes the updates
    of all outputs of a layer equally large, and r keeps the norm of the matrix.

    **Arguments:**

    - `learning_rate`: η.
    - `b2`: the decay of the mean of squares of each row, in [0, 1).
    - `scale`: as in `muon`. The paper's root mean square of 0.2 is `scale="match_rms_adamw"`, up to
        the deviation of the singular values from 1.
    - The others: as in `muon`.

    **Returns:** a partition of the chain of `Trace`, `Orthogonalize`, `ScaleByRowRms`,
    `AddDecayedWeights` and `ScaleByLearningRate`, and of AdamW.

    ??? cite "Li et al., [NorMuon](https://arxiv.org/abs/2510.05491), 2025"
    """
    rule = chain(
        Trace(b1, nesterov, mu_dtype),
        Orthogonalize(
            ns_coeffs,
            ns_steps,
            scale,
            compute_dtype,
            preconditioning=preconditioning,
            eps=eps,
            layout=layout,
        ),
        ScaleByRowRms(b2, layout=layout),
        *decay_if_any(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    default = _default_adam_rate(learning_rate, scale)
    return with_adam_elsewhere(rule, "norm_muon", chosen(where, layout), default, *adam_numbers)


@advise_keywords
def dion(
    learning_rate: Hyperparameter,
    rank_fraction: Any = 0.25,
    b1: Hyperparameter = 0.95,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    mu_dtype: Any | None = None,
    *,
    scale: str | None = "spectral",
    key: Any = 0,
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
    - `b1`: β, in [0, 1): the share of what has become an update that stays in the momentum.
    - The others: as in `muon`.

    **Returns:** a partition of the chain of `ScaleByDion`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ```python
    >>> sl.dion(0.02, 0.5)
    (sl.ScaleByAdam() | sl.ScaleByLearningRate(0.0003)).partition(
        {sl.where.matrix(): sl.ScaleByDion(rank_fraction=0.5) | sl.ScaleByLearningRate(0.02)},
        names=('dion',)
    )

    ```

    ??? cite "Ahn et al., [Dion: Distributed Orthonormalized
        Updates](https://arxiv.org/abs/2504.05295), 2025"
    """
    rule = chain(
        ScaleByDion(rank_fraction, b1, scale, mu_dtype=mu_dtype, key=key, layout=layout),
        *decay_if_any(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    default = _default_adam_rate(learning_rate, scale)
    return with_adam_elsewhere(rule, "dion", chosen(where, layout), default, *adam_numbers)


def _default_adam_rate(learning_rate: Any, scale: str | None) -> Any:
    """The learning rate of AdamW beside Muon, if the user gives none."""
    if scale == "match_rms_adamw":
        return learning_rate
    rate = as_schedule(learning_rate) if is_function(learning_rate) else learning_rate
    return 0.015 * rate


@advise_keywords
def scion(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    radius: Hyperparameter = 50.0,
    output_radius: Hyperparameter = 3000.0,
    rest_radius: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    mu_dtype: Any | None = None,
    *,
    ns_coeffs: Any = "standard",
    ns_steps: int = 5,
    eps: Hyperparameter = 1e-7,
    preconditioning: str = "frobenius",
    compute_dtype: Any | None = None,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
) -> AbstractTransform:
    """Scion: each layer takes the steepest step of a fixed norm, in a norm that suits the layer.

        p ↦ p − η·(ρ·lmo(m) + λ·p)   with   mₜ = β·mₜ₋₁ + (1 − β)·gₜ

    lmo(m) is √(outputs / inputs)·orth(m) for the matrices of hidden layers, sign(m) / inputs for
    the output layer, and for everything else m with columns of root mean square 1: the vectors of
    the tokens in an embedding, and biases. No parameter goes to AdamW. The output layer is what
    `where` leaves out: `where=~sl.where.path("head.**")`.

    With λ = 1 the step is p ↦ (1 − η)·p − η·ρ·lmo(m), and p stays in the ball of radius ρ: this is
    the constrained Scion of the paper. The radii are those of its GPT-2, with η = 0.00036.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`: β, the decay of the mean of gradients, in [0, 1). The paper calls 1 − β α.
    - `radius`: ρ of the matrices of hidden layers, > 0.
    - `output_radius`: ρ of the other matrices.
    - `rest_radius`: ρ of everything else.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay, the unconstrained Scion.
    - `decay_where`: which parameters decay. Defaults to all.
    - `mu_dtype`: the dtype of the mean.
    - `ns_coeffs`, `ns_steps`, `eps`, `preconditioning`, `compute_dtype`, `layout`: as in `muon`.
    - `where`: which matrices belong to hidden layers. Defaults to all.

    **Returns:** a partition of three chains: with `Orthogonalize`, with `ScaleBySign` and
    `ScaleByFanIn`, and with `NormalizeColumns`.

    ??? cite "Pethick et al., [Training Deep Learning Models with Norm-Constrained
        LMOs](https://arxiv.org/abs/2502.07529), 2025. For a convolution the paper divides by the
        kernel's size, and we by its root: it is one matrix, outputs × (inputs · kernel)."
    """

    def step(*direction: AbstractTransform, radius: Hyperparameter) -> AbstractTransform:
        return chain(
            Ema(b1, False, mu_dtype),
            *direction,
            Scale(radius),
            *decay_if_any(weight_decay, decay_where),
            ScaleByLearningRate(learning_rate),
        )

    spectral = Orthogonalize(
        ns_coeffs,
        ns_steps,
        "spectral",
        compute_dtype,
        preconditioning=preconditioning,
        eps=eps,
        layout=layout,
    )
    hidden = step(spectral, radius=radius)
    output = step(ScaleBySign(), ScaleByFanIn(layout=layout), radius=output_radius)
    rest = step(NormalizeColumns(layout=layout), radius=rest_radius)
    matrices = matrix(layout)
    groups: Mapping[Where, AbstractTransform] = {chosen(where, layout): hidden, matrices: output}
    if where is None:
        return rest.partition({matrices: hidden}, names=("hidden",))
    return rest.partition(groups, names=("hidden", "output"))
