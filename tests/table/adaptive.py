"""Adam's relatives beyond Optax's main catalogue, rules that find their learning rate, and what
surrounds the step: skipped spikes, clips by recent norms and several losses.
"""

from typing import Any

import slalom as sl

from .catalogue import halving

matrices = sl.where.ndim(min=2)
rising = sl.schedules.linear(0.0, 2.0, transition_steps=4)
TERMS = ("first", "second")

RULES: dict[str, Any] = {
    "ScaleByAdemamix": sl.ScaleByAdemamix(),
    "ScaleByAdemamix, scheduled": sl.ScaleByAdemamix(
        b3=sl.schedules.linear_half_life(0.9, 0.99, 4), alpha=rising
    ),
    "ScaleBySimplifiedAdemamix": sl.contrib.ScaleBySimplifiedAdemamix(alpha=2.0),
    "ScaleByAdopt": sl.ScaleByAdopt(),
    "ScaleByAdopt, nesterov": sl.ScaleByAdopt(b2=0.99, nesterov=True, use_clipping=False),
    "ScaleByMadgrad": sl.contrib.ScaleByMadgrad(0.1),
    "ScaleByLaprop": sl.contrib.ScaleByLaprop(),
    "ScaleByMars": sl.contrib.ScaleByMars(),
    "ScaleByStableAdam": sl.ScaleByStableAdam(weight_decay=0.1),
    "ScaleByAdamMini": sl.contrib.ScaleByAdamMini(),
    "ScaleByGalore": sl.contrib.ScaleByGalore(rank=1, update_proj_gap=2, scale=0.5),
    "ScaleByApollo": sl.contrib.ScaleByApollo(rank=1, update_proj_gap=2, scale=0.5),
    "ScaleByApollo, per tensor": sl.contrib.ScaleByApollo(rank=1, per_tensor=True),
    "ScaleByAcprop": sl.contrib.ScaleByAcprop(),
    "ClipByGlobalNorm, delayed": sl.ClipByGlobalNorm(1.0, delayed=True),
    "ZClip": sl.ZClip(warmup_steps=1),
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
    "acprop": sl.contrib.acprop(0.1, weight_decay=0.1, decay_where=matrices),
    "ademamix": sl.ademamix(0.1, weight_decay=0.1, decay_where=matrices),
    "simplified_ademamix": sl.contrib.simplified_ademamix(
        0.01, weight_decay=0.1, decay_where=matrices
    ),
    "adopt": sl.adopt(0.1, weight_decay=0.1, decay_where=matrices),
    "madgrad": sl.contrib.madgrad(0.1, weight_decay=0.1, decay_where=matrices),
    "laprop": sl.contrib.laprop(0.1, weight_decay=0.1, decay_where=matrices),
    "mars": sl.contrib.mars(0.1, weight_decay=0.1, decay_where=matrices),
    "adam_mini": sl.contrib.adam_mini(0.1, weight_decay=0.1, decay_where=matrices),
    "galore": sl.contrib.galore(0.1, rank=2, weight_decay=0.1, decay_where=matrices),
    "apollo": sl.contrib.apollo(0.1, rank=2, weight_decay=0.1, decay_where=matrices),
    "stable_adamw": sl.stable_adamw(0.1, decay_where=matrices),
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

WRAPPERS: dict[str, Any] = {
    "Combine": sl.adam(halving).combine(sl.combine.UPGrad(), TERMS),
    "Combine, around every_k": sl.sgd(0.1).every_k(2).combine(sl.combine.PCGrad(), TERMS, every=3),
    "Combine, in every_k": (
        sl.adam(0.1).combine(sl.combine.ReLoBRaLo(), TERMS).every_k(2).average().record()
    ),
    "Project, sphere": (
        sl.adam(halving).project(sl.projections.sphere(), where=sl.where.ndim(min=2)).every_k(2)
    ),
    "SkipSpikes": (sl.ClipByGlobalNorm(1.0) | sl.adam(halving)).skip_spikes(window=2),
    "SkipSpikes, every_k": sl.adam(0.1).skip_spikes(window=4, by="grad_norm").every_k(2),
    "SkipSpikes, averaged": sl.sgd(0.1).every_k(2).skip_spikes(by="loss").average().record(),
}
