"""What surrounds the step: skipped spikes and clips by recent norms."""

from typing import Any

import slalom as sl

from .catalogue import halving

RULES: dict[str, Any] = {
    "ClipByGlobalNorm, delayed": sl.ClipByGlobalNorm(1.0, delayed=True),
    "ZClip": sl.ZClip(warmup_steps=1),
}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {
    "SkipSpikes": (sl.ClipByGlobalNorm(1.0) | sl.adam(halving)).skip_spikes(window=2),
    "SkipSpikes, every_k": sl.adam(0.1).skip_spikes(window=4, by="grad_norm").every_k(2),
    "SkipSpikes, averaged": sl.sgd(0.1).every_k(2).skip_spikes(by="loss").average().record(),
}

QUICK: set[str] = {"ZClip", "SkipSpikes"}
