"""Pairs of the same optimizer, as users of each library would write it."""

import optax

import slalom as sl

ROWS = {
    "sgd, momentum": (sl.sgd(1e-3, momentum=0.9), optax.sgd(1e-3, momentum=0.9)),
    "rmsprop": (sl.rmsprop(1e-3), optax.rmsprop(1e-3)),
    "adamw": (sl.adamw(1e-3), optax.adamw(1e-3)),
    "clip, adamw": (
        sl.ClipByGlobalNorm(1.0) | sl.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    ),
    "lion": (sl.lion(1e-4), optax.lion(1e-4)),
    "adafactor": (sl.adafactor(1e-3), optax.adafactor(1e-3)),
    "adamw every 4": (sl.adamw(1e-3).every_k(4), optax.MultiSteps(optax.adamw(1e-3), 4)),
}
