"""Variants of Adam."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import (
    ScaleByAdan,
    ScaleByBelief,
    ScaleByLearningRate,
    ScaleByNovograd,
    ScaleByRadam,
    ScaleByYogi,
)
from ...where.resolve import WhereLike, as_where
from .._decay import decayed_descent


@advise_keywords
def adabelief(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-16,
    eps_root: Hyperparameter = 1e-16,
    *,
    nesterov: bool = False,
) -> AbstractTransform:
    """AdaBelief: a mean of gradients, divided by their deviation from it.

        p ↦ p − η·m̂ₜ / (√ŝₜ + ε)   with   sₜ = β₂·sₜ₋₁ + (1 − β₂)·|gₜ − mₜ|²

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByBelief`.

    **Returns:** a chain of `ScaleByBelief` and `ScaleByLearningRate`.

    ??? cite "Zhuang et al., [AdaBelief Optimizer](https://arxiv.org/abs/2010.07468), 2020"
    """
    return chain(
        ScaleByBelief(b1, b2, eps, eps_root, nesterov=nesterov),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def yogi(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-3,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """Yogi: Adam with a mean of squares that changes additively, and so falls slowly.

        p ↦ p − η·m̂ₜ / (√v̂ₜ + ε)   with   vₜ = vₜ₋₁ − (1 − β₂)·sign(vₜ₋₁ − |gₜ|²)·|gₜ|²

    Differs from Optax, where m starts at 1e-6 instead of 0: see `ScaleByYogi`.

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByYogi`.

    **Returns:** a chain of `ScaleByYogi` and `ScaleByLearningRate`.

    ??? cite "Zaheer et al., [Adaptive Methods for Nonconvex
        Optimization](https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization),
        2018"
    """
    return chain(
        ScaleByYogi(b1, b2, eps, mu_dtype=mu_dtype),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def radam(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    threshold: Hyperparameter = 5.0,
    *,
    nesterov: bool = False,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """RAdam: Adam that rectifies the variance of the first steps.

        p ↦ p − η·r·m̂ / (√v̂ + ε)

    r is the rectification of `ScaleByRadam`. In the first steps, p ↦ p − η·m̂.

    **Arguments:**

    - `learning_rate`: η.
    - The others: as in `ScaleByRadam`.

    **Returns:** a chain of `ScaleByRadam` and `ScaleByLearningRate`.

    ??? cite "Liu et al., [On the Variance of the Adaptive Learning Rate and
        Beyond](https://arxiv.org/abs/1908.03265), 2019"
    """
    return chain(
        ScaleByRadam(b1, b2, eps, eps_root, threshold, nesterov=nesterov, mu_dtype=mu_dtype),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
def novograd(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.25,
    eps: Hyperparameter = 1e-6,
    eps_root: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """NovoGrad: momentum of gradients that are divided by a running norm of their leaf.

        p ↦ p − η·mₜ   with   mₜ = β₁·mₜ₋₁ + gₜ / (√vₜ + ε) + λ·p

    v is a mean of ‖g‖².

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByNovograd`.

    **Returns:** a chain of `ScaleByNovograd` and `ScaleByLearningRate`. With `decay_where`, the
    first is a partition of two `ScaleByNovograd`.

    ??? cite "Ginsburg et al., [Stochastic Gradient Methods with Layer-wise Adaptive Moments for
        Training of Deep Networks](https://arxiv.org/abs/1905.11286), 2019"
    """
    rule = ScaleByNovograd(b1, b2, eps, eps_root, weight_decay, mu_dtype)
    if decay_where is not None:
        # The decay enters the momentum, so it cannot be a separate link.
        others = ScaleByNovograd(b1, b2, eps, eps_root, mu_dtype=mu_dtype)
        rule = others.partition({as_where(decay_where): rule}, names=("decayed",))
    return chain(rule, ScaleByLearningRate(learning_rate))


@advise_keywords
def adan(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.98,
    b2: Hyperparameter = 0.92,
    b3: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Adan: Nesterov momentum from the differences of successive gradients.

        p ↦ p − η·((m̂ + β₂·v̂) / (√(n̂ + ε_root) + ε) + λ·p)

    m, v and n are the means of `ScaleByAdan`: of gradients, of differences, and of squares.

    The paper divides by 1 + η·λ instead of subtracting η·λ·p; both agree to first order in η.
    Differs from Optax in one coefficient: see `ScaleByAdan`. ε_root is 1e-8 as in Optax. The paper
    and other packages have none, and take longer first steps where a gradient is below 0.01: write
    `eps_root=0.0` to follow them.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAdan`.

    **Returns:** a chain of `ScaleByAdan`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Xie et al., [Adan](https://arxiv.org/abs/2208.06677), 2022"
    """
    return chain(
        ScaleByAdan(b1, b2, b3, eps, eps_root, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
