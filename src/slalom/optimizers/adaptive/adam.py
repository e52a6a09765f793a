"""Adam and its closest relatives, with all kinds of weight decay."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import (
    ScaleByAdam,
    ScaleByAdamax,
    ScaleByAmsgrad,
    ScaleByLearningRate,
    ScaleByLearningRateWithCorrectedDecay,
)
from ...where.resolve import WhereLike
from .._decay import decayed_descent


@advise_keywords
def adam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
) -> AbstractTransform:
    """Adam: a mean of gradients, divided by the root of a mean of their squares.

        p ↦ p − η·m̂ / (√v̂ + ε)

    m̂ and v̂ are those of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRate`.

    ```python
    >>> sl.adam(1e-3)
    sl.ScaleByAdam() | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def adamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    nesterov: bool = False,
    independent_decay: bool = False,
) -> AbstractTransform:
    """AdamW: Adam with decoupled weight decay.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)

    m̂ and v̂ are those of `ScaleByAdam`.

    The decay is multiplied by the learning rate: each step subtracts η·λ·p.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
        `sl.where.ndim(min=2)` selects weight matrices and excludes biases and norms.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ```python
    >>> sl.adamw(1e-3, weight_decay=0.1)
    sl.ScaleByAdam() | sl.AddDecayedWeights(weight_decay=0.1) | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Loshchilov & Hutter, [Decoupled Weight Decay
        Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def nadam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Adam with Nesterov momentum: `sl.adam` with `nesterov=True`.

        p ↦ p − η·m̂ / (√v̂ + ε)   with   m̂ₜ = β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)

    This is not PyTorch's NAdam, which follows a schedule for β₁ that starts at half its value.

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRate`.

    ```python
    >>> sl.nadam(1e-3)
    sl.ScaleByAdam(nesterov=True) | sl.ScaleByLearningRate(0.001)

    ```

    ??? cite "Dozat, Incorporating Nesterov Momentum into Adam, 2016"
    """
    return adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=True)


@advise_keywords
def nadamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    independent_decay: bool = False,
) -> AbstractTransform:
    """AdamW with Nesterov momentum: `sl.adamw` with `nesterov=True`.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)
        m̂ₜ = β₁·mₜ / (1 − β₁ᵗ⁺¹) + (1 − β₁)·gₜ / (1 − β₁ᵗ)

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Dozat, Incorporating Nesterov Momentum into Adam, 2016; Loshchilov & Hutter,
        [Decoupled Weight Decay Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """
    return adamw(
        learning_rate,
        b1,
        b2,
        eps,
        eps_root,
        mu_dtype,
        weight_decay,
        decay_where,
        nesterov=True,
        independent_decay=independent_decay,
    )


@advise_keywords
def amsgrad(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    bias_correction_mu: bool = True,
    bias_correction_nu: bool = True,
) -> AbstractTransform:
    """AMSGrad: Adam with the maximum of all means of squares so far.

        p ↦ p − η·m̂ₜ / (√wₜ + ε)   with   wₜ = max(wₜ₋₁, v̂ₜ)

    m̂ and v̂ are those of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByAmsgrad`.

    **Returns:** a chain of `ScaleByAmsgrad` and `ScaleByLearningRate`.

    ??? cite "Reddi, Kale & Kumar, [On the Convergence of Adam and
        Beyond](https://openreview.net/forum?id=ryQu7f-RZ), 2018"
    """
    corrections = bias_correction_mu, bias_correction_nu
    return chain(
        ScaleByAmsgrad(b1, b2, eps, eps_root, mu_dtype, *corrections),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def adamax(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Adamax: Adam with a decaying maximum in place of the mean of squares.

        p ↦ p − η·m̂ₜ / vₜ   with   vₜ = max(β₂·vₜ₋₁, |gₜ| + ε)

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByAdamax`.

    **Returns:** a chain of `ScaleByAdamax` and `ScaleByLearningRate`.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014"
    """
    return chain(
        ScaleByAdamax(b1, b2, eps, mu_dtype=mu_dtype),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def adamaxw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Adamax with decoupled weight decay.

        p ↦ p − η·(m̂ₜ / vₜ + λ·p)   with   vₜ = max(β₂·vₜ₋₁, |gₜ| + ε)

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAdamax`.

    **Returns:** a chain of `ScaleByAdamax`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Kingma & Ba, [Adam](https://arxiv.org/abs/1412.6980), 2014; Loshchilov & Hutter,
        [Decoupled Weight Decay Regularization](https://arxiv.org/abs/1711.05101), 2017"
    """
    return chain(
        ScaleByAdamax(b1, b2, eps, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def adamc(
    learning_rate: Hyperparameter,
    max_learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-4,
    decay_where: WhereLike | None = None,
    *,
    nesterov: bool = False,
) -> AbstractTransform:
    """AdamC: AdamW whose decay falls with the square of the learning rate.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·(η / η_max)·p)

    m̂ and v̂ are those of `ScaleByAdam`.

    While AdamW's decay is η·λ·p, this one falls with the square of the learning rate, so that the
    norms of the weights do not shrink at the end of a schedule. The paper corrects the decay of
    layers that a normalization follows, and not that of the last layer: give that one `sl.adamw` in
    a partition.

    **Arguments:**

    - `learning_rate`: η.
    - `max_learning_rate`: η_max, the largest value of the schedule, > 0.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam` and `ScaleByLearningRateWithCorrectedDecay`.

    ```python
    >>> schedule = sl.schedules.cosine_decay(3e-3, decay_steps=1_000)
    >>> tx = sl.adamc(schedule, max_learning_rate=3e-3, weight_decay=0.1)

    ```

    ??? cite "Defazio, [Why Gradients Rapidly Increase Near the End of
        Training](https://arxiv.org/abs/2506.02285), 2025"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        ScaleByLearningRateWithCorrectedDecay(
            learning_rate, max_learning_rate, weight_decay, decay_where=decay_where
        ),
    )
