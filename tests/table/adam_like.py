"""Adam's relatives beyond Optax's main catalogue."""

from typing import Any

import slalom as sl

matrices = sl.where.ndim(min=2)
rising = sl.schedules.linear(0.0, 2.0, transition_steps=4)

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
}
