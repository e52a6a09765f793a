"""Rules that precondition both sides of the matrices of hidden layers, with AdamW for the rest."""

from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..rules import (
    Ema,
    ScaleByKron,
    ScaleByLearningRate,
    ScaleByRms,
    ScaleByShampoo,
    ScaleBySoap,
)
from ..where.layout import LayoutLike
from ..where.resolve import WhereLike
from ._routing import chosen, decay_if_any, with_adam_elsewhere


@advise_keywords
def soap(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    precondition_frequency: Any = 10,
    shampoo_beta: Hyperparameter | None = None,
    max_size: int = 10_000,
    mu_dtype: Any | None = None,
    *,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """SOAP for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(Q_L·(M̂ / (√V̂ + ε))·Q_Rᴴ + λ·p)

    It is Adam in the eigenbasis of Shampoo's factors, with the learning rates of Adam: 3e-3 in the
    paper. Matrices are what `sl.where.matrix` selects. Vectors, embeddings and what `where` leaves
    out go to AdamW. `opt.describe(model)` shows which is which. The first step of a matrix only
    initializes its basis, and decays.

    In the authors' code, the first step does not decay, and later ones decay p after the update.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which of the matrices decay. Defaults to all.
    - `b1`, `b2`, `eps`, `precondition_frequency`, `shampoo_beta`, `max_size`, `mu_dtype`,
        `layout`: as in `ScaleBySoap`.
    - `where`: which matrices are trained with SOAP. Defaults to all.
    - `adam_learning_rate`: the learning rate of AdamW. Defaults to η.
    - `adam_b1`, `adam_b2`, `adam_weight_decay`: as in `adamw`.

    **Returns:** a partition of the chain of `ScaleBySoap`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ```python
    >>> sl.soap(3e-3)
    (sl.ScaleByAdam() | sl.ScaleByLearningRate(0.003)).partition(
        {sl.where.matrix(): sl.ScaleBySoap() | sl.ScaleByLearningRate(0.003)},
        names=('soap',)
    )

    ```

    ??? cite "Vyas et al., [SOAP: Improving and Stabilizing Shampoo using
        Adam](https://arxiv.org/abs/2409.11321), 2024"
    """
    rule = chain(
        ScaleBySoap(
            b1,
            b2,
            eps,
            precondition_frequency,
            shampoo_beta,
            max_size,
            mu_dtype=mu_dtype,
            layout=layout,
        ),
        *decay_if_any(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    return with_adam_elsewhere(rule, "soap", chosen(where, layout), learning_rate, *adam_numbers)


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
    key: Any = 0,
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
    each update is clipped. The authors recommend a third of Adam's learning rate. Matrices are what
    `sl.where.matrix` selects. Vectors, embeddings and what `where` leaves out go to AdamW.
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
    rule = chain(
        Ema(b1, accumulator_dtype=mu_dtype),
        ScaleByKron(
            update_probability,
            preconditioner_lr,
            preconditioner_init_scale,
            max_size,
            key,
            clip=clip,
            layout=layout,
        ),
        *decay_if_any(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    return with_adam_elsewhere(rule, "kron", chosen(where, layout), learning_rate, *adam_numbers)


@advise_keywords
def shampoo(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    precondition_frequency: Any = 10,
    block_size: int = 1024,
    mu_dtype: Any | None = None,
    *,
    graft: AbstractTransform | None = None,
    where: WhereLike | None = None,
    layout: LayoutLike = None,
    adam_learning_rate: Hyperparameter | None = None,
    adam_b1: Hyperparameter = 0.9,
    adam_b2: Hyperparameter = 0.999,
    adam_weight_decay: Hyperparameter = 0.0,
) -> AbstractTransform:
    """Shampoo for the matrices of hidden layers, and AdamW for everything else.

        p ↦ p − η·(m̂ + λ·p)   with the mean m of   Δ·‖S‖ / ‖Δ‖,   Δ = L̂^(−1/4)·G·R̂^(−1/4)

    S is Adam's update. Each update is given its norm, so that Adam's learning rates fit, and then
    enters a mean. Matrices are what `sl.where.matrix` selects. Vectors, embeddings and what `where`
    leaves out go to AdamW. `opt.describe(model)` shows which is which.

    **Arguments:**

    - `learning_rate`: η.
    - `b1`: the decay of the mean of updates, in [0, 1).
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which of the matrices decay. Defaults to all.
    - `mu_dtype`: the dtype of the mean of updates.
    - `graft`: the transform whose norm the updates take. Defaults to Adam without a mean of
        gradients, `sl.ScaleByRms(b2, eps_in_sqrt=False, bias_correction=True)`.
    - `b2`, `eps`, `precondition_frequency`, `block_size`, `layout`: as in `ScaleByShampoo`.
    - `where`: which matrices are trained with Shampoo. Defaults to all.
    - `adam_learning_rate`: the learning rate of AdamW. Defaults to η.
    - `adam_b1`, `adam_b2`, `adam_weight_decay`: as in `adamw`.

    **Returns:** a partition of the chain of `ScaleByShampoo`, `Ema`, `AddDecayedWeights` and
    `ScaleByLearningRate`, and of AdamW.

    ??? cite "Gupta, Koren & Singer, [Shampoo: Preconditioned Stochastic Tensor
        Optimization](https://arxiv.org/abs/1802.09568), 2018; Anil et al., [Scalable Second Order
        Optimization for Deep Learning](https://arxiv.org/abs/2002.09018), 2020"
    """
    if graft is None:
        graft = ScaleByRms(b2, eps_in_sqrt=False, bias_correction=True)
    rule = chain(
        ScaleByShampoo(b2, eps, precondition_frequency, block_size, layout=layout).graft(graft),
        Ema(b1, accumulator_dtype=mu_dtype),
        *decay_if_any(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
    adam_numbers = adam_learning_rate, adam_b1, adam_b2, adam_weight_decay
    return with_adam_elsewhere(rule, "shampoo", chosen(where, layout), learning_rate, *adam_numbers)
