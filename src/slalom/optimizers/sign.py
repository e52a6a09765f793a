"""Chains that follow signs: each is a function that returns what it prints."""

from typing import Any

from .._chain import chain
from .._fields import Hyperparameter
from .._selector import WhereLike
from .._transform import AbstractTransform
from ..transforms import ScaleByLearningRate, ScaleByLion
from ._decay import decayed


def lion(
    learning_rate: Hyperparameter,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    mu_dtype: Any | None = None,
    weight_decay: Hyperparameter = 1e-3,
    decay_where: WhereLike | None = None,
) -> AbstractTransform:
    """Lion: p ↦ p − η·(sign(β₁·m + (1 − β₁)·g) + λ·p).

    Each number moves by η a step, so η is usually a tenth to a third of Adam's, and λ greater by
    as much.

    **Arguments:**

    - `learning_rate`: η.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree; all without it.
    - the others: as in `ScaleByLion`.

    **Returns:** a chain of `ScaleByLion`, `AddDecayedWeights` and `ScaleByLearningRate`.

    ??? cite "Chen et al., [Symbolic Discovery of Optimization
        Algorithms](https://arxiv.org/abs/2302.06675), 2023"
    """
    return chain(
        ScaleByLion(b1, b2, mu_dtype),
        decayed(weight_decay, decay_where),
        ScaleByLearningRate(learning_rate),
    )
