"""Losses whose curvature is known, for Gauss–Newton rules and for every other one."""

from .least_squares import LeastSquares as LeastSquares
from .output_losses import (
    AbstractCurvatureLoss as AbstractCurvatureLoss,
    OutputLoss as OutputLoss,
    VariationalEnergy as VariationalEnergy,
    linearized as linearized,
)
