"""Recipes with a trust ratio for each leaf, made for large batches."""

from typing import Any

from .._core.chain import chain
from .._core.fields import Hyperparameter
from .._core.transform import AbstractTransform
from ..transforms import ScaleByAdam, ScaleByFromage, ScaleByLearningRate, ScaleByTrustRatio, Trace
from ..where.resolve import WhereLike
from ._decay import decayed


def lamb(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    eps_root: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    mu_dtype: Any | None = None,
    nu_dtype: Any | None = None,
) -> AbstractTransform:
    """LAMB: p ↦ p − η·(‖p‖ / ‖u‖)·u with Adam's u = m̂ / (√v̂ + ε) + λ·p, leaf by leaf.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree; all without it.
    - the others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights`, `ScaleByTrustRatio` and
    `ScaleByLearningRate`.

    ??? cite "You et al., [Large Batch Optimization for Deep Learning: Training BERT in 76
        minutes](https://arxiv.org/abs/1904.00962), 2019"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype, nu_dtype=nu_dtype),
        decayed(weight_decay, decay_where),
        ScaleByTrustRatio(),
        ScaleByLearningRate(learning_rate),
    )


def lars(
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    trust_coefficient: Hyperparameter = 0.001,
    eps: Hyperparameter = 0.0,
    trust_ratio_where: WhereLike | None = None,
    momentum: Hyperparameter = 0.9,
    nesterov: bool = False,
) -> AbstractTransform:
    """LARS: momentum over p ↦ p − η·c·(‖p‖ / (‖u‖ + ε))·u with u = g + λ·p, leaf by leaf.

    Biases and norms are commonly exempted from both the decay and the ratio:
    `decay_where=sl.where.ndim(min=2), trust_ratio_where=sl.where.ndim(min=2)`.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree; all without it.
    - `trust_coefficient`: c, ≥ 0.
    - `eps`: ε, ≥ 0.
    - `trust_ratio_where`: which updates are scaled by the ratio; all without it.
    - `momentum`: the decay of the sum of these steps, in [0, 1].
    - `nesterov`: whether the momentum looks ahead.

    **Returns:** a chain of `AddDecayedWeights`, `ScaleByTrustRatio`, `ScaleByLearningRate` and
    `Trace`.

    ??? cite "You et al., [Large Batch Training of Convolutional
        Networks](https://arxiv.org/abs/1708.03888), 2017"
    """
    ratio = ScaleByTrustRatio(trust_coefficient=trust_coefficient, eps=eps)
    return chain(
        decayed(weight_decay, decay_where),
        ratio if trust_ratio_where is None else ratio.mask(trust_ratio_where),
        ScaleByLearningRate(learning_rate),
        Trace(momentum, nesterov),
    )


def fromage(
    learning_rate: Hyperparameter,
    min_norm: Hyperparameter = 1e-6,
) -> AbstractTransform:
    """Fromage: p ↦ (p − η·(‖p‖ / ‖g‖)·g) / √(1 + η²), leaf by leaf.

    Differs from Optax: η is one hyperparameter, not three numbers made of it, so it can be
    changed; and what shrinks p is computed without cancellation.

    **Arguments:**

    - `learning_rate`: η; 0.01 is a good first guess.
    - `min_norm`: the least value of both norms, ≥ 0.

    **Returns:** a chain of `ScaleByTrustRatio` and `ScaleByFromage`.

    ??? cite "Bernstein et al., [On the distance between two neural networks and the stability of
        learning](https://arxiv.org/abs/2002.03432), 2020"
    """
    return chain(ScaleByTrustRatio(min_norm), ScaleByFromage(learning_rate))
