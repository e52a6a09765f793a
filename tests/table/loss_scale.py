"""Scaling of the loss for float16."""

from typing import Any

import slalom as sl

from .catalogue import halving

matrices = sl.where.ndim(min=2)

WRAPPERS: dict[str, Any] = {
    "ScaleLoss": (sl.ClipByGlobalNorm(1.0) | sl.adam(halving)).scale_loss(),
    "ScaleLoss in EveryK": sl.adam(0.1).scale_loss(4.0, growth_interval=2).every_k(2),
    "EveryK in ScaleLoss": sl.adam(0.1).every_k(2).scale_loss(4.0, growth_interval=2),
    "ScaleLoss, averaged": sl.adam(0.1).partition({matrices: sl.sgd(0.1)}).scale_loss().average(),
}
