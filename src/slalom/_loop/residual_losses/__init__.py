"""Losses whose curvature is known, for Gauss–Newton rules and for every other one."""

from ._loss import (
    AbstractCurvatureLoss as AbstractCurvatureLoss,
    linearized as linearized,
    residual_loss as residual_loss,
)
from .least_squares import LeastSquares as LeastSquares
from .output_loss import OutputLoss as OutputLoss
from .variational_energy import VariationalEnergy as VariationalEnergy
