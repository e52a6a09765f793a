"""Rules that use the residuals of a loss, and other rules with curvature."""

import slalom as sl

matrices = sl.where.ndim(min=2)

RULES = {
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

RECIPES = {
    "gauss_newton": sl.gauss_newton(),
    "natural_gradient": sl.natural_gradient(0.1, max_norm=0.1),
    "ss_broyden": sl.contrib.ss_broyden(),
    "levenberg_marquardt": sl.levenberg_marquardt(max_tries=3),
}

WRAPPERS = {
    "Partition, levenberg_marquardt": sl.sgd(0.1).partition({matrices: sl.levenberg_marquardt()}),
    "Only, gauss_newton": sl.gauss_newton(1e-3).only(matrices),
    "IfFinite, gauss_newton": sl.gauss_newton(1e-3).if_finite(),
    "Average, levenberg_marquardt": sl.levenberg_marquardt().average(0.9),
}
