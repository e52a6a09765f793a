"""Combinations of several losses, for `tx.combine`.

A combination maps what is known of the terms of a loss, their values and the inner products of
their gradients, to one weight per term. The gradient of the step is that of the weighted sum.
"""

from ._combination import AbstractCombination as AbstractCombination, Terms as Terms
from .gradients import MGDA as MGDA, PCGrad as PCGrad, UPGrad as UPGrad
from .values import Fixed as Fixed, ReLoBRaLo as ReLoBRaLo

__all__ = ["MGDA", "AbstractCombination", "Fixed", "PCGrad", "ReLoBRaLo", "Terms", "UPGrad"]


def __dir__() -> list[str]:
    return __all__
