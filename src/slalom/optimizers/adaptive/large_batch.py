"""Optimizers for large batches, with a trust ratio for each leaf."""

from typing import Any

from ..._core.fields.declare import Hyperparameter
from ..._core.protocol.chain import chain
from ..._core.protocol.transform import AbstractTransform
from ..._core.text.advice import advise_keywords
from ...rules import ScaleByAdam, ScaleByFromage, ScaleByLearningRate, ScaleByTrustRatio, Trace
from ...where.resolve import WhereLike
from .._decay import decayed


@advise_keywords
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
) -> AbstractTransform:
    """LAMB: AdamW with the step of each leaf in proportion to the norm of its parameter.

        p ↦ p − η·(‖p‖ / ‖u‖)·u   with   u = m̂ / (√v̂ + ε) + λ·p

    m̂ and v̂ are those of `ScaleByAdam`.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - The others: as in `ScaleByAdam`.

    **Returns:** a chain of `ScaleByAdam`, `AddDecayedWeights`, `ScaleByTrustRatio` and
    `ScaleByLearningRate`.

    ??? cite "You et al., [Large Batch Optimization for Deep Learning: Training BERT in 76
        minutes](https://arxiv.org/abs/1904.00962), 2019"
    """
    return chain(
        ScaleByAdam(b1, b2, eps, eps_root, mu_dtype),
        decayed(weight_decay, decay_where),
        ScaleByTrustRatio(),
        ScaleByLearningRate(learning_rate),
    )


@advise_keywords
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
    """LARS: momentum of steps in proportion to the norm of each leaf's parameter.

        p ↦ p − tₙ   with   tₙ = γ·tₙ₋₁ + η·c·(‖p‖ / (‖u‖ + ε))·u,   u = g + λ·p

    Biases and norms are usually excluded from both the decay and the ratio:
    `decay_where=sl.where.ndim(min=2), trust_ratio_where=sl.where.ndim(min=2)`.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `trust_coefficient`: c, ≥ 0.
    - `eps`: ε, ≥ 0.
    - `trust_ratio_where`: which updates are scaled by the ratio. Defaults to all.
    - `momentum`: γ, the decay of the sum, in [0, 1].
    - `nesterov`: whether to use Nesterov momentum.

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


@advise_keywords
def fromage(
    learning_rate: Hyperparameter,
    min_norm: Hyperparameter = 1e-6,
) -> AbstractTransform:
    """Fromage: steps in proportion to the norm of each leaf's parameter.

        p ↦ (p − η·(‖p‖ / ‖g‖)·g) / √(1 + η²)

    Differs from Optax: η is a single hyperparameter, so it can be changed, and the factor that
    shrinks p is computed without cancellation.

    **Arguments:**

    - `learning_rate`: η. 0.01 is a good first guess.
    - `min_norm`: a lower bound on both norms, ≥ 0.

    **Returns:** a chain of `ScaleByTrustRatio` and `ScaleByFromage`.

    ??? cite "Bernstein et al., [On the distance between two neural networks and the stability of
        learning](https://arxiv.org/abs/2002.03432), 2020"
    """
    return chain(ScaleByTrustRatio(min_norm), ScaleByFromage(learning_rate))
