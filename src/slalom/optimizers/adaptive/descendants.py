"""Later variants of Adam: other momenta, other orders of averaging and dividing."""

from collections.abc import Callable
from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import (
    ScaleByAcprop,
    ScaleByAdemamix,
    ScaleByAdopt,
    ScaleByLaprop,
    ScaleByLearningRate,
    ScaleByMars,
    ScaleBySimplifiedAdemamix,
    ScaleByStableAdam,
)
from ...where.resolve import WhereLike, as_where
from .._decay import decayed_descent


@advise_keywords
def ademamix(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    b3: Hyperparameter = 0.9999,
    alpha: Hyperparameter = 5.0,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    independent_decay: bool = False,
) -> AbstractTransform:
    """AdEMAMix: AdamW with a second, much slower mean of gradients.

        p ↦ p − η·((m̂₁ + α·m₂) / (√v̂ + ε) + λ·p)

    m₂ is the slow mean. For warm-ups of α and β₃, pass schedules: see `ScaleByAdemamix`.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAdemamix`.

    **Returns:** a chain of `ScaleByAdemamix`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Pagliardini, Ablin & Grangier, [The AdEMAMix Optimizer: Better, Faster,
        Older](https://arxiv.org/abs/2409.03137), 2024"
    """
    return chain(
        ScaleByAdemamix(b1, b2, b3, alpha, eps, eps_root, mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def simplified_ademamix(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.99,
    b2: Hyperparameter = 0.95,
    alpha: Hyperparameter = 0.0,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """Simplified AdEMAMix: AdamW on a mix of a long sum of gradients and the newest one.

        p ↦ p − η·((mₜ + α·gₜ) / (√v̂ₜ + ε) + λ·p)   with   mₜ = β₁·mₜ₋₁ + gₜ

    **Arguments:**

    - `learning_rate`: η; smaller than for Adam, by a factor of about 1 − β₁.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleBySimplifiedAdemamix`.

    **Returns:** a chain of `ScaleBySimplifiedAdemamix`, `AddDecayedWeights` and
    `ScaleByLearningRate`.

    ??? cite "Morwani et al., [Connections between Schedule-Free Optimizers, AdEMAMix, and
        Accelerated SGD Variants](https://arxiv.org/abs/2502.02431), 2025"
    """
    return chain(
        ScaleBySimplifiedAdemamix(b1, b2, alpha, eps, eps_root, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def adopt(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.9999,
    eps: Hyperparameter = 1e-6,
    mu_dtype: Any | None = None,
    *,
    nesterov: bool = False,
    use_clipping: bool = True,
    clip_value_fn: Callable[[Any], Any] | None = None,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """ADOPT: momentum of gradients that are divided by the root of the previous mean of squares.

        p ↦ p − η·(mₜ + λ·p)   with   mₜ = β₁·mₜ₋₁ + (1 − β₁)·clip(gₜ / max(√vₜ₋₁, ε), ±cₜ)

    with the bound cₜ of `ScaleByAdopt`. Without weight decay, the first step changes no parameter:
    it only measures v. With weight decay, the first step decays, unlike in the authors' code.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAdopt`.

    **Returns:** a chain of `ScaleByAdopt`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Taniguchi et al., [ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal
        Rate](https://arxiv.org/abs/2411.02853), 2024"
    """
    options: dict[str, Any] = {} if clip_value_fn is None else {"clip_value_fn": clip_value_fn}
    options |= {"nesterov": nesterov, "use_clipping": use_clipping}
    return chain(
        ScaleByAdopt(b1, b2, eps, mu_dtype, **options),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def laprop(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-15,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """LaProp: AdamW in the other order, dividing by the root of squares before averaging.

        p ↦ p − η·(m̂ₜ + λ·p)   with   mₜ = β₁·mₜ₋₁ + (1 − β₁)·gₜ / (√v̂ₜ + ε)

    The authors' code subtracts λ·p in each step, as `independent_decay=True` does.

    **Arguments:**

    - `learning_rate`: η; 4e-4 in the authors' code.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByLaprop`.

    **Returns:** a chain of `ScaleByLaprop`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Ziyin, Wang & Ueda, [LaProp: Separating Momentum and Adaptivity in
        Adam](https://arxiv.org/abs/2002.04839), 2020"
    """
    return chain(
        ScaleByLaprop(b1, b2, eps, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def mars(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.99,
    gamma: Hyperparameter = 0.025,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    independent_decay: bool = False,
) -> AbstractTransform:
    """MARS-AdamW: AdamW on gradients that are corrected by their change, and clipped to norm 1.

        p ↦ p − η·(m̂ / (√v̂ + ε) + λ·p)

    m̂ and v̂ are means of the corrected gradients of `ScaleByMars`.

    The authors' code uses it for matrices only, and AdamW for the other parameters:

    ```python
    >>> adamw = sl.adamw(3e-3, b2=0.95, weight_decay=0.1)
    >>> tx = sl.mars(3e-3).partition({sl.where.ndim(max=1): adamw})

    ```

    **Arguments:**

    - `learning_rate`: η; 3e-3 in the paper.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByMars`.

    **Returns:** a chain of `ScaleByMars`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Yuan et al., [MARS: Unleashing the Power of Variance Reduction for Training Large
        Models](https://arxiv.org/abs/2411.10438), 2024"
    """
    return chain(
        ScaleByMars(b1, b2, gamma, eps, mu_dtype=mu_dtype),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )


@advise_keywords
def stable_adamw(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.2,
    decay_where: WhereLike | None = None,
    clipping_threshold: Hyperparameter = 1.0,
    *,
    mu_dtype: Any | None = None,
) -> AbstractTransform:
    """StableAdamW: AdamW whose step is shortened where squares lag behind gradients.

        p ↦ p − η·(mₜ / (√vₜ + ε) + λ·p) / max(1, rₜ / d)   with   rₜ = √mean(|gₜ|² / max(vₜ, ε²))

    It replaces the clipping of gradients. The defaults are those of the paper's experiments.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByStableAdam`.

    **Returns:** a chain of `ScaleByStableAdam` and `ScaleByLearningRate`. With `decay_where`, the
    first is a partition of two `ScaleByStableAdam`.

    ??? cite "Wortsman et al., [Stable and low-precision training for large-scale vision-language
        models](https://arxiv.org/abs/2304.13013), 2023"
    """
    options = {"mu_dtype": mu_dtype, "clipping_threshold": clipping_threshold}
    rule = ScaleByStableAdam(b1, b2, eps, weight_decay, **options)
    if decay_where is not None:
        # The step shortens the decay too, so it cannot be a separate link.
        others = ScaleByStableAdam(b1, b2, eps, **options)
        rule = others.partition({as_where(decay_where): rule}, names=("decayed",))
    return chain(rule, ScaleByLearningRate(learning_rate))


@advise_keywords
def acprop(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-16,
    eps_root: Hyperparameter = 1e-16,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    independent_decay: bool = False,
) -> AbstractTransform:
    """ACProp: divides gradients by the previous estimate of their deviation from a mean.

        p ↦ p − η·(gₜ / (√ŝₜ₋₁ + ε) + λ·p)

    s is a mean of |g − m|², where m is a mean of gradients.

    Differs from Optax in the deviation that s averages: see `ScaleByAcprop`.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `independent_decay`: whether a step subtracts λ·p instead of η·λ·p, as in
        `SubtractDecayedWeights`.
    - The others: as in `ScaleByAcprop`.

    **Returns:** a chain of `ScaleByAcprop`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Zhuang et al., [Momentum Centering and Asynchronous Update for Adaptive Gradient
        Methods](https://arxiv.org/abs/2110.05454), 2021"
    """
    return chain(
        ScaleByAcprop(b1, b2, eps, eps_root),
        *decayed_descent(learning_rate, weight_decay, decay_where, independent_decay),
    )
