"""Optimizers without a schedule, which average instead."""

from typing import Any

from ..._core.fields.declare import check_step
from ...schedules import warmup_constant
from ...tree.types import Hyperparameter, WhereLike, is_function
from .._base import AbstractTransform, advise_keywords, chain
from ..low_memory.rms import ScaleByRms
from ..shaping.descent import ScaleByLearningRate, decayed


@advise_keywords
def schedule_free_sgd(
    learning_rate: Hyperparameter = 1.0,
    warmup_steps: int | None = None,
    b1: Hyperparameter = 0.9,
    weight_decay: Hyperparameter | None = None,
    decay_where: WhereLike | None = None,
    *,
    weight_lr_power: Hyperparameter = 2.0,
    r: Hyperparameter = 0.0,
    state_dtype: Any | None = None,
) -> AbstractTransform:
    """SGD that averages its iterates in place of momentum and of a schedule.

    With the gradient gₜ at yₜ, the parameters in the model,

        z ↦ z − η·(g + λ·y),   x ↦ x + c·(z − x),   y ↦ (1 − β₁)·z + β₁·x

    as `ScheduleFree` describes. `opt.eval_params(model)` returns the model with x. Evaluate and
    save that one.

    **Arguments:**

    - `learning_rate`: η. The paper's best rates are larger than for SGD with momentum.
    - `warmup_steps`: the length of a linear warm-up, an int ≥ 1. Step n, counted from 0, has
        the rate η·min(1, (n + 1) / `warmup_steps`). Defaults to none. With a warm-up, the learning
        rate must not be a schedule.
    - `b1`: as in `tx.schedule_free`.
    - `weight_decay`: λ, ≥ 0. Defaults to none.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `weight_lr_power`, `r`, `state_dtype`: as in `tx.schedule_free`.

    Differs from Optax: the warm-up is the paper's; Optax's has a rate of 0 in the first step.

    **Returns:** a `ScheduleFree` around `AddDecayedWeights`, if there is a decay, and
    `ScaleByLearningRate`.

    ```python
    >>> sl.schedule_free_sgd(1.0)
    sl.ScaleByLearningRate(1.0).schedule_free()

    ```

    ??? cite "Defazio et al., [The Road Less Scheduled](https://arxiv.org/abs/2405.15682), 2024"
    """
    rate = ScaleByLearningRate(_with_warmup(learning_rate, warmup_steps))
    decay = () if weight_decay is None else (decayed(weight_decay, decay_where),)
    return chain(*decay, rate).schedule_free(b1, weight_lr_power, r, state_dtype)


@advise_keywords
def schedule_free_adamw(
    learning_rate: Hyperparameter = 0.0025,
    warmup_steps: int | None = None,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decay_where: WhereLike | None = None,
    *,
    weight_lr_power: Hyperparameter = 2.0,
    r: Hyperparameter = 0.0,
    state_dtype: Any | None = None,
) -> AbstractTransform:
    """AdamW that averages its iterates in place of momentum and of a schedule.

    With the gradient gₜ at yₜ, the parameters in the model,

        v ↦ β₂·v + (1 − β₂)·|g|²
        z ↦ z − η·(g / (√v̂ + ε) + λ·y),   x ↦ x + c·(z − x),   y ↦ (1 − β₁)·z + β₁·x

    as `ScheduleFree` describes. The state is as large as AdamW's: z takes the place of the mean of
    gradients. `opt.eval_params(model)` returns the model with x. Evaluate and save that one.

    **Arguments:**

    - `learning_rate`: η. The paper's best rates are 1 to 10 times AdamW's.
    - `warmup_steps`: the length of a linear warm-up, an int ≥ 1. Step n, counted from 0, has
        the rate η·min(1, (n + 1) / `warmup_steps`). Defaults to none. With a warm-up, the learning
        rate must not be a schedule.
    - `b1`: β₁, as in `tx.schedule_free`.
    - `b2`: β₂, the decay of the mean of squares, in [0, 1).
    - `eps`: ε, ≥ 0.
    - `weight_decay`: λ, ≥ 0.
    - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.
    - `weight_lr_power`, `r`, `state_dtype`: as in `tx.schedule_free`.

    The paper also multiplies η by √(1 − β₂ᵗ), in the step and in the weights, so that its v has no
    correction of the step. This follows the authors' current code, where only the step has one.
    Differs from Optax: the warm-up is the paper's; Optax's has a rate of 0 in the first step.

    **Returns:** a `ScheduleFree` around `ScaleByRms`, `AddDecayedWeights` and
    `ScaleByLearningRate`.

    ```python
    >>> tx = sl.schedule_free_adamw(0.0025, warmup_steps=100, weight_decay=0.1)
    >>> opt = sl.Optimizer(tx, {"w": jnp.ones(2)})
    >>> opt.hyperparams["learning_rate"]
    Array(2.5e-05, dtype=float32)

    ```

    ??? cite "Defazio et al., [The Road Less Scheduled](https://arxiv.org/abs/2405.15682), 2024"
    """
    inner = chain(
        ScaleByRms(b2, eps, eps_in_sqrt=False, bias_correction=True),
        decayed(weight_decay, decay_where),
        ScaleByLearningRate(_with_warmup(learning_rate, warmup_steps)),
    )
    return inner.schedule_free(b1, weight_lr_power, r, state_dtype)


def _with_warmup(learning_rate: Any, warmup_steps: int | None) -> Any:
    """η·min(1, (n + 1) / `warmup_steps`) at step n."""
    if warmup_steps is None:
        return learning_rate
    length: int = check_step("warmup_steps", warmup_steps, "[1, inf)")
    if is_function(learning_rate):
        raise TypeError(
            f"`learning_rate` is the schedule {learning_rate!r}, so `warmup_steps` has nothing to "
            "warm up to. Let the schedule begin with the warm-up, and remove `warmup_steps`."
        )
    return warmup_constant(learning_rate / length, learning_rate, length - 1)
