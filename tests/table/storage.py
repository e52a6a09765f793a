"""How state is stored, how updates are written to half-precision parameters, scaled losses."""

from typing import Any

import slalom as sl

from .catalogue import halving

matrices = sl.where.ndim(min=2)
clip = sl.ClipByGlobalNorm(1.0)

WRAPPERS: dict[str, Any] = {
    "Store": (clip | sl.adamw(0.1, decay_where=matrices)).store("int8", min_size=1),
    "Store, bfloat16": sl.adam(0.1).store("bfloat16", min_size=1),
    "Store, dynamic8": sl.adam(0.1).store("dynamic8", where=matrices, min_size=1),
    "Store, by field": sl.adam(0.1).store({"mu": "int4", "**.nu": "float16"}, min_size=1),
    "Store, float8": sl.lion(0.01).store("float8_e4m3fn", min_size=1),
    "Store, every_k": sl.adam(0.1).every_k(2).store("int8", min_size=1),
    "Store in every_k": (clip | sl.adam(0.1).store("int8", min_size=1)).every_k(2),
    "Store, if_finite": (clip | sl.adam(0.1)).if_finite().store("int8", min_size=1),
    "Store, partition": sl.adam(0.1)
    .partition({matrices: sl.sgd(0.1, momentum=0.9)})
    .store("int8", min_size=1),
    "Store, average": sl.adam(0.1).average(0.9).store("int8", min_size=1),
    "Store, lookahead": sl.adam(0.1).lookahead(1, 0.5, reset_state=True).store("int8", min_size=1),
    "Store, flatten": sl.adamw(0.1).flatten(max_size=4).store("int8", min_size=1),
    "Store in flatten": clip | sl.adamw(0.1).store("int8", min_size=1).flatten(max_size=4),
    "Store, lamb": sl.lamb(0.1).store("int8", min_size=1),
    "Store, adafactor": sl.adafactor(0.1, momentum=0.9).store("int8", min_size=1),
    "Store, record": sl.adam(0.1).store("int8", min_size=1).record(),
    "Write": (sl.ClipByGlobalNorm(1.0) | sl.adamw(0.1)).write("kahan"),
    "Write, master": sl.adamw(0.1).write("master").every_k(2),
    "Write, ecc": sl.adamw(0.1).every_k(2).lookahead(1, 0.5).write("ecc"),
    "Write, stochastic": sl.adam(0.1).average(0.9).write("stochastic", key=3).if_finite(),
    "Write, nearest": sl.adam(0.1).write("nearest"),
    "Write in Partition": sl.adam(0.1)
    .write("kahan")
    .partition({sl.where.ndim(2): sl.sgd(0.1).project(sl.projections.l2_ball(1.0)).write("master")})
    .record(),
    "ScaleLoss": (sl.ClipByGlobalNorm(1.0) | sl.adam(halving)).scale_loss(),
    "ScaleLoss in EveryK": sl.adam(0.1).scale_loss(4.0, growth_interval=2).every_k(2),
    "EveryK in ScaleLoss": sl.adam(0.1).every_k(2).scale_loss(4.0, growth_interval=2),
    "ScaleLoss, averaged": sl.adam(0.1).partition({matrices: sl.sgd(0.1)}).scale_loss().average(),
}
