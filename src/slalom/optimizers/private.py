"""Training on private data."""

from typing import Any

from .._core.fields.declare import Hyperparameter
from .._core.protocol.chain import chain
from .._core.protocol.transform import AbstractTransform
from .._core.text.advice import advise_keywords
from ..rules import DifferentiallyPrivateAggregate, ScaleByLearningRate
from ._momentum import momentum_if_any


@advise_keywords
def dpsgd(
    learning_rate: Hyperparameter,
    l2_norm_clip: Hyperparameter,
    noise_multiplier: Hyperparameter,
    key: Any,
    momentum: Hyperparameter | None = None,
    nesterov: bool = False,
) -> AbstractTransform:
    """Differentially private SGD: clips the gradient of each example, and adds noise to their mean.

        p ↦ p − η·(Σᵢ gᵢ·min(1, c / ‖gᵢ‖) + c·σ·ξ) / B

    for B examples and normal ξ. It takes gradients with a leading axis of examples, which
    `sl.train_step` computes.

    **Arguments:**

    - `learning_rate`: η.
    - `l2_norm_clip`: c, ≥ 0.
    - `noise_multiplier`: σ, ≥ 0.
    - `key`: an int in [0, 2³¹), or a PRNG key.
    - `momentum`: the decay of the momentum, in [0, 1]. Defaults to no momentum.
    - `nesterov`: whether to use Nesterov momentum.

    **Returns:** a chain of `DifferentiallyPrivateAggregate`, `Trace`, if there is momentum, and
    `ScaleByLearningRate`.

    ```python
    >>> tx = sl.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, key=0)

    ```

    ??? cite "Abadi et al., [Deep Learning with Differential
        Privacy](https://arxiv.org/abs/1607.00133), 2016"
    """
    links = momentum_if_any(momentum, nesterov)
    return chain(
        DifferentiallyPrivateAggregate(l2_norm_clip, noise_multiplier, key),
        *links,
        ScaleByLearningRate(learning_rate),
    )
