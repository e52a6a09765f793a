"""What surrounds the step: skipped spikes, clips by recent norms and several losses."""

from typing import Any

import slalom as sl

from .catalogue import halving

RULES: dict[str, Any] = {
    "ClipByGlobalNorm, delayed": sl.ClipByGlobalNorm(1.0, delayed=True),
    "ZClip": sl.ZClip(warmup_steps=1),
}

TERMS = ("first", "second")

WRAPPERS: dict[str, Any] = {
    "Combine": sl.adam(halving).combine(sl.combine.UPGrad(), TERMS),
    "Combine, around every_k": sl.sgd(0.1).every_k(2).combine(sl.combine.PCGrad(), TERMS),
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
