"""Schedule-free steps, mechanize, SAM, and rules with second-order information."""

from typing import Any

import slalom as sl

matrices = sl.where.ndim(min=2)
halving = sl.schedules.piecewise_constant(0.1, {1: 0.5, 2: 0.5})

RULES: dict[str, Any] = {
    "ScaleBySophia": sl.contrib.ScaleBySophia(update_interval=2, key=3),
    "ScaleByIvon": sl.contrib.ScaleByIvon(100.0, b2=0.9, clip_radius=2.0, key=3),
}

RECIPES: dict[str, Any] = {
    "sophia": sl.contrib.sophia(0.1, decay_where=matrices, clip_threshold=None),
    "ivon": sl.contrib.ivon(halving, 100.0, b2=0.9),
    "schedule_free_sgd": sl.schedule_free_sgd(0.1, weight_decay=0.1, decay_where=matrices),
    "schedule_free_adamw": sl.schedule_free_adamw(0.1, 2, weight_decay=0.1),
}

WRAPPERS: dict[str, Any] = {
    "Sam": (sl.ClipByGlobalNorm(1.0) | sl.adam(0.1)).sam(0.05),
    "Sam, adaptive": sl.sgd(0.1, momentum=0.9).every_k(2).sam(0.5, adaptive=True, every=2),
    "Mechanize": sl.adam(halving).mechanize(s_init=1e-3),
    "Mechanize, every_k": sl.sgd(1.0).every_k(2).mechanize(num_betas=2),
    "ScheduleFree": sl.sgd(halving).schedule_free(0.8, r=1.0, average_after=1),
    "ScheduleFree of Partition": (
        sl.sgd(0.1).partition({matrices: sl.adam(halving, b1=0.0).every_k(2)}).schedule_free()
    ),
    "ScheduleFree, polyak": sl.adam(1.0).schedule_free(
        polyak=True, polyak_beta=0.5, weight_decay=2.0, decay_where=matrices
    ),
    "ScheduleFree, every_k": sl.sgd(0.1).every_k(2).schedule_free(),
}
