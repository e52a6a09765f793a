"""Rules that use the curvature of a loss."""

from .broyden import (
    ScaleBySelfScaledBroyden as ScaleBySelfScaledBroyden,
    ScaleBySelfScaledBroydenState as ScaleBySelfScaledBroydenState,
)
from .gauss_newton import (
    ScaleByGaussNewton as ScaleByGaussNewton,
    ScaleByGaussNewtonState as ScaleByGaussNewtonState,
)
from .levenberg_marquardt import (
    ScaleByLevenbergMarquardt as ScaleByLevenbergMarquardt,
    ScaleByLevenbergMarquardtState as ScaleByLevenbergMarquardtState,
)
