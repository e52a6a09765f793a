"""Optimizers that find their learning rate."""

from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..rules import (
    ScaleByCocob,
    ScaleByDAdaptAdam,
    ScaleByDog,
    ScaleByDowg,
    ScaleByLearningRate,
    ScaleByMomo,
    ScaleByMomoAdam,
    ScaleByProdigy,
)
from ..where.resolve import WhereLike
from ._decay import decayed


@advise_keywords
def prodigy(
    learning_rate: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    b3: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-8,
    estim_lr0: Hyperparameter = 1e-6,
    estim_lr_coef: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    safeguard_warmup: bool = False,
    decay_where: WhereLike | None = None,
    *,
    bias_correction: bool = True,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Prodigy: AdamW whose learning rate grows to the distance traveled.

        p ↦ p − γ·d·(m / (√v + d·ε) + λ·p)

    d is an estimate of the distance to the solution, and m and v are those of `ScaleByProdigy`.

    **Arguments:**

    - `learning_rate`: γ. The authors recommend 1, with a schedule that decays it to 0.
    - The others: as in `ScaleByProdigy`.

    **Returns:** a `ScaleByProdigy`.

    ```python
    >>> schedule = sl.schedules.cosine_decay(1.0, decay_steps=1_000)
    >>> tx = sl.prodigy(schedule, weight_decay=0.1)

    ```

    ??? cite "Mishchenko & Defazio, [Prodigy: An Expeditiously Adaptive Parameter-Free
        Learner](https://arxiv.org/abs/2306.06101), 2023"
    """
    return ScaleByProdigy(
        learning_rate,
        b1,
        b2,
        b3,
        eps,
        estim_lr0,
        estim_lr_coef,
        weight_decay,
        safeguard_warmup,
        bias_correction=bias_correction,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )


@advise_keywords
def dadapt_adamw(
    learning_rate: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    estim_lr0: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    bias_correction: bool = True,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """D-Adaptation: AdamW whose learning rate grows with the sum of its steps.

        p ↦ p − m / (√v + ε) − λ·γ·d·p

    m is a mean of γ·d·g, and d an estimate of the distance to the solution. `sl.prodigy` is its
    successor, which grows faster.

    **Arguments:**

    - `learning_rate`: γ. The authors recommend 1, with a schedule that decays it to 0.
    - The others: as in `ScaleByDAdaptAdam`.

    **Returns:** a `ScaleByDAdaptAdam`.

    ??? cite "Defazio & Mishchenko, [Learning-Rate-Free Learning by
        D-Adaptation](https://arxiv.org/abs/2301.07733), 2023"
    """
    return ScaleByDAdaptAdam(
        learning_rate,
        b1,
        b2,
        eps,
        estim_lr0,
        weight_decay,
        bias_correction=bias_correction,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )


@advise_keywords
def dog(
    learning_rate: Hyperparameter = 1.0,
    init_step: Hyperparameter = 1e-6,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter | None = None,
    decay_where: WhereLike | None = None,
    *,
    init_step_type: str = "heuristic",
) -> AbstractTransform:
    """DoG: the distance traveled over the root of the sum of squared gradients.

        p ↦ p − η·r / √(G + ε)·g

    r is the distance traveled, and G the sum of ‖g‖².

    With weight decay, g is the gradient plus λ·p. The authors recommend evaluating an average of
    the parameters: `sl.dog().average()`.

    **Arguments:**

    - `learning_rate`: η, a factor of the step size; 1 in the paper.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByDog`.

    **Returns:** a chain of `AddDecayedWeights`, if there is a decay, `ScaleByDog` and
    `ScaleByLearningRate`.

    ??? cite "Ivgi et al., [DoG is SGD's Best Friend](https://arxiv.org/abs/2302.12022), 2023"
    """
    links = [] if weight_decay is None else [decayed(weight_decay, decay_where)]
    return chain(
        *links, ScaleByDog(init_step, eps, init_step_type), ScaleByLearningRate(learning_rate)
    )


@advise_keywords
def dowg(
    learning_rate: Hyperparameter = 1.0,
    init_estim_sq_dist: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-4,
    weight_decay: Hyperparameter | None = None,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """DoWG: the squared distance traveled over the root of a weighted sum of squared gradients.

        p ↦ p − η·D / (√V + ε)·g

    D is the squared distance traveled, and V the sum of D·‖g‖².

    With weight decay, g is the gradient plus λ·p.

    **Arguments:**

    - `learning_rate`: η, a factor of the step size; 1 in the paper.
    - `weight_decay`: λ, ≥ 0. Defaults to no decay.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByDowg`.

    **Returns:** a chain of `AddDecayedWeights`, if there is a decay, `ScaleByDowg` and
    `ScaleByLearningRate`.

    ??? cite "Khaled, Mishchenko & Jin, [DoWG Unleashed](https://arxiv.org/abs/2305.16284), 2023"
    """
    links = [] if weight_decay is None else [decayed(weight_decay, decay_where)]
    return chain(*links, ScaleByDowg(init_estim_sq_dist, eps), ScaleByLearningRate(learning_rate))


@advise_keywords
def momo(
    learning_rate: Hyperparameter = 1.0,
    b1: Hyperparameter = 0.9,
    lower_bound: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    adapt_lower_bound: bool = False,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """MoMo: momentum with a step size from the loss.

        p ↦ (p − τ·m) / (1 + η·λ)   with   τ ≤ η

    m is a mean of gradients, and τ the step size of `ScaleByMomo`. Each step needs the loss: use
    `sl.train_step`, or pass `value=` to `opt.step`.

    **Arguments:**

    - `learning_rate`: η, the largest step size. The authors recommend a large one.
    - The others: as in `ScaleByMomo`.

    **Returns:** a `ScaleByMomo`.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """
    return ScaleByMomo(
        learning_rate,
        b1,
        lower_bound,
        weight_decay,
        adapt_lower_bound,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )


@advise_keywords
def momo_adam(
    learning_rate: Hyperparameter = 1e-2,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    lower_bound: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    adapt_lower_bound: bool = False,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """MoMo-Adam: Adam with a step size from the loss.

        p ↦ (p − τ·m / (√v̂ + ε)) / (1 + η·λ)

    m is a mean of gradients, and τ the step size of `ScaleByMomoAdam`. Each step needs the loss:
    use `sl.train_step`, or pass `value=` to `opt.step`.

    **Arguments:**

    - `learning_rate`: η, the largest step size: τ ≤ η / (1 − β₁ᵗ).
    - The others: as in `ScaleByMomoAdam`.

    **Returns:** a `ScaleByMomoAdam`.

    ??? cite "Schaipp et al., [MoMo: Momentum Models for Adaptive Learning
        Rates](https://arxiv.org/abs/2305.07583), 2023"
    """
    return ScaleByMomoAdam(
        learning_rate,
        b1,
        b2,
        eps,
        lower_bound,
        weight_decay,
        adapt_lower_bound,
        decay_where=decay_where,
        mu_dtype=mu_dtype,
    )


@advise_keywords
def cocob(
    learning_rate: Hyperparameter = 1.0,
    alpha: Hyperparameter = 100.0,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """COCOB: each element bets on the sign of its next gradient, without a learning rate.

        p ↦ p₀ + θ·(L + R) / (L·max(G + L, α·L))

    L is the largest |g| so far, G the sum of |g|, θ that of −g, and R the reward.

    With weight decay, the gradient is g plus λ·p.

    **Arguments:**

    - `learning_rate`: a factor of the gradients; 1 in the paper. The step size does not depend on
        it as long as ε is small compared with the gradients; a schedule weights them.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByCocob`.

    **Returns:** a chain of `AddDecayedWeights`, `ScaleByLearningRate` and `ScaleByCocob`.

    ??? cite "Orabona & Tommasi, [Training Deep Networks without Learning Rates Through Coin
        Betting](https://arxiv.org/abs/1705.07795), 2017"
    """
    return chain(
        decayed(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate, flip_sign=False),
        ScaleByCocob(alpha, eps),
    )
