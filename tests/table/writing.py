"""How updates are written to half-precision parameters."""

from typing import Any

import slalom as sl

matrices = sl.where.ndim(2)

WRAPPERS: dict[str, Any] = {
    "Write": (sl.ClipByGlobalNorm(1.0) | sl.adamw(0.1)).write("kahan"),
    "Write, master": sl.adamw(0.1).write("master").every_k(2),
    "Write, ecc": sl.adamw(0.1).every_k(2).lookahead(1, 0.5).write("ecc"),
    "Write, stochastic": sl.adam(0.1).average(0.9).write("stochastic", key=3).if_finite(),
    "Write, nearest": sl.adam(0.1).write("nearest"),
    "Write in Partition": sl.adam(0.1)
    .write("kahan")
    .partition({matrices: sl.sgd(0.1).project(sl.projections.l2_ball(1.0)).write("master")})
    .record(),
}
