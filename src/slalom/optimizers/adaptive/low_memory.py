"""Variants of Adam with a smaller state."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import ScaleByAdamMini, ScaleByApollo, ScaleByGalore
from ...where.layout import LayoutLike
from ...where.resolve import WhereLike
from .._decay import decayed_descent


@advise_keywords
def adam_mini(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    layout: LayoutLike = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Adam-mini: AdamW with one mean of squares for each block of parameters.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)
        vₜ = β₂·vₜ₋₁ + (1 − β₂)·mean over the block of |gₜ|²

    A block is one output, one token or one attention head. The state is half of Adam's.

    **Arguments:**

    - `learning_rate`: η, as for AdamW.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
        The authors exclude biases and norms: `sl.where.ndim(min=2)`.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAdamMini`.

    **Returns:** a chain of `ScaleByAdamMini`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhang et al., [Adam-mini: Use Fewer Learning Rates To Gain
        More](https://arxiv.org/abs/2406.16793), 2024"
    """
    return chain(
        ScaleByAdamMini(b1, b2, eps, mu_dtype=mu_dtype, layout=layout),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def galore(
    learning_rate: Hyperparameter,
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    mu_dtype: Any | None = None,
    layout: LayoutLike = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """GaLore: AdamW on gradients of matrices that are projected to a low rank.

        p ↦ p − η·(α·P·N + λ·p)   with   N = m̂ / (√v̂ + ε) of Pᵀ·G

    P holds the strongest directions of a recent gradient G.

    Differs from Optax in the side of a matrix that is projected: see `ScaleByGalore`.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByGalore`.

    **Returns:** a chain of `ScaleByGalore`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhao et al., [GaLore: Memory-Efficient LLM Training by Gradient Low-Rank
        Projection](https://arxiv.org/abs/2403.03507), 2024"
    """
    options = {"b1": b1, "b2": b2, "eps": eps, "mu_dtype": mu_dtype}
    return chain(
        ScaleByGalore(rank, update_proj_gap, scale, **options, layout=layout),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def apollo(
    learning_rate: Hyperparameter,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    per_tensor: bool = False,
    key: Any = 0,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    max_growth: Hyperparameter = 1.01,
    mu_dtype: Any | None = None,
    layout: LayoutLike = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """APOLLO: gradients of matrices, scaled as AdamW scales a random projection of them.

        p ↦ p − η·(α·S + λ·p)

    S is the gradient, with each of its columns scaled as in `ScaleByApollo`.

    APOLLO-Mini, whose state is about as small as that of SGD:

    ```python
    >>> tx = sl.apollo(1e-2, rank=1, scale=128**0.5, per_tensor=True)

    ```

    **Arguments:**

    - `learning_rate`: η; 0.01 in the paper.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByApollo`.

    **Returns:** a chain of `ScaleByApollo`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhu et al., [APOLLO: SGD-like Memory, AdamW-level
        Performance](https://arxiv.org/abs/2412.05270), 2024"
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "max_growth": max_growth}
    options = {**numbers, "mu_dtype": mu_dtype, "layout": layout}
    return chain(
        ScaleByApollo(rank, update_proj_gap, scale, per_tensor, key, **options),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
