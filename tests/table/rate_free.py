"""Rules that find their learning rate, and other rules beyond Optax's main catalogue."""

from typing import Any

import slalom as sl

matrices = sl.where.ndim(min=2)
halving = sl.schedules.linear(1.0, 0.5, transition_steps=10)

RULES: dict[str, Any] = {
    "ScaleByProdigy": sl.ScaleByProdigy(estim_lr0=1e-2, weight_decay=0.1),
    "ScaleByProdigy, uncorrected": sl.ScaleByProdigy(
        estim_lr0=1e-2, safeguard_warmup=True, bias_correction=False, decay_where=matrices
    ),
    "ScaleByDAdaptAdam": sl.contrib.ScaleByDAdaptAdam(estim_lr0=1e-2, weight_decay=0.1),
    "ScaleByDog": sl.ScaleByDog(1e-2),
    "ScaleByDog, learning_rate": sl.ScaleByDog(1e-2, init_step_type="learning_rate"),
    "ScaleByDowg": sl.contrib.ScaleByDowg(),
    "ScaleByMomo": sl.contrib.ScaleByMomo(0.1, weight_decay=0.1),
    "ScaleByMomo, adapt_lower_bound": sl.contrib.ScaleByMomo(
        0.1, lower_bound=-1.0, weight_decay=0.1, adapt_lower_bound=True, decay_where=matrices
    ),
    "ScaleByMomoAdam": sl.contrib.ScaleByMomoAdam(weight_decay=0.1),
    "ScaleByMomoAdam, adapt_lower_bound": sl.contrib.ScaleByMomoAdam(
        eps=1e-3, lower_bound=-1.0, weight_decay=0.1, adapt_lower_bound=True
    ),
    "ScaleByCocob": sl.contrib.ScaleByCocob(10.0),
    "SubtractDecayedWeights": sl.SubtractDecayedWeights(0.1),
    "AddDecayToInitialParams": sl.AddDecayToInitialParams(0.1),
    "ScaleByLearningRateWithCorrectedDecay": sl.contrib.ScaleByLearningRateWithCorrectedDecay(
        0.1, 0.2, weight_decay=0.1, decay_where=matrices
    ),
}

RECIPES: dict[str, Any] = {
    "prodigy": sl.prodigy(estim_lr0=1e-2, weight_decay=0.1, decay_where=matrices),
    "dadapt_adamw": sl.contrib.dadapt_adamw(estim_lr0=1e-2, weight_decay=0.1, decay_where=matrices),
    "dog": sl.dog(init_step=1e-2, weight_decay=0.1, decay_where=matrices),
    "dowg": sl.contrib.dowg(weight_decay=0.1),
    "momo": sl.contrib.momo(0.1),
    "momo_adam": sl.contrib.momo_adam(weight_decay=0.1, decay_where=matrices),
    "cocob": sl.contrib.cocob(weight_decay=0.1),
    "adamc": sl.contrib.adamc(halving, 1.0, weight_decay=0.1),
    "adamw, independent": sl.adamw(
        0.1, weight_decay=0.1, decay_where=matrices, independent_decay=True
    ),
}
