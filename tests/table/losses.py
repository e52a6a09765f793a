"""Schedule-free steps, mechanize, SAM, and rules that use more of the loss than its gradient."""

from typing import Any

import slalom as sl

matrices = sl.where.ndim(min=2)
halving = sl.schedules.piecewise_constant(0.1, {1: 0.5, 2: 0.5})
PROJECTIONS = sl.where.leaf(lambda path, x: x.shape == (2, 3))
"""The attention logits of these leaves are passed by `known`."""

RULES: dict[str, Any] = {
    "ScaleBySophia": sl.contrib.ScaleBySophia(update_interval=2, key=3),
    "ScaleByIvon": sl.contrib.ScaleByIvon(100.0, b2=0.9, clip_radius=2.0, key=3),
    "ScaleByGaussNewton": sl.ScaleByGaussNewton(0.1) | sl.Scale(-0.1),
    "ScaleByGaussNewton, momentum": (
        sl.ScaleByGaussNewton(0.1, 0.9, "parameters", "cholesky") | sl.Scale(-0.1)
    ),
    "ScaleByGaussNewton, qr": (
        sl.ScaleByGaussNewton(0.1, form="parameters", solver="qr", chunk=2) | sl.Scale(-0.1)
    ),
    "ScaleByLevenbergMarquardt": sl.ScaleByLevenbergMarquardt(),
    "ScaleByLevenbergMarquardt, columns": sl.ScaleByLevenbergMarquardt(0.1, "columns"),
    "ScaleBySelfScaledBroyden": sl.contrib.ScaleBySelfScaledBroyden() | sl.Scale(-0.1),
    "ScaleBySelfScaledBroyden, plain": sl.contrib.ScaleBySelfScaledBroyden("plain")
    | sl.Scale(-0.1),
}

RECIPES: dict[str, Any] = {
    "sophia": sl.contrib.sophia(0.1, decay_where=matrices, clip_threshold=None),
    "ivon": sl.contrib.ivon(halving, 100.0, b2=0.9),
    "schedule_free_sgd": sl.schedule_free_sgd(0.1, weight_decay=0.1, decay_where=matrices),
    "schedule_free_adamw": sl.schedule_free_adamw(0.1, 2, weight_decay=0.1),
    "gauss_newton": sl.gauss_newton(),
    "natural_gradient": sl.natural_gradient(0.1, max_norm=0.1),
    "ss_broyden": sl.contrib.ss_broyden(),
    "levenberg_marquardt": sl.levenberg_marquardt(max_tries=3),
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
    "Partition, levenberg_marquardt": sl.sgd(0.1).partition({matrices: sl.levenberg_marquardt()}),
    "Only, gauss_newton": sl.gauss_newton(1e-3).only(matrices),
    "IfFinite, gauss_newton": sl.gauss_newton(1e-3).if_finite(),
    "Average, levenberg_marquardt": sl.levenberg_marquardt().average(0.9),
    "ScaleByLevenbergMarquardt, in a box": sl.levenberg_marquardt(bounds=(-9.0, 9.0)),
    "ScaleByLbfgs, in a box": sl.lbfgs(bounds=(-9.0, 9.0)),
    "QKClip": sl.sgd(0.1) | sl.contrib.QKClip(heads=1, where={PROJECTIONS: "q:k"}, layout="oi"),
}
