"""Rules that precondition both sides of a matrix: SOAP, Shampoo, Kron."""

from typing import Any

import slalom as sl

matrices = sl.where.ndim(min=2)

RULES: dict[str, Any] = {
    "Cautious": sl.ScaleByAdam() | sl.Cautious() | sl.Scale(-0.1),
    "KeepInitialNorm": sl.sgd(0.1) | sl.KeepInitialNorm(),
    "ScaleBySoap": sl.ScaleBySoap().mask(matrices) | sl.Scale(-0.1),
    "ScaleBySoap, one side": sl.ScaleBySoap(0.9, precondition_frequency=1, max_size=2).mask(
        matrices
    )
    | sl.Scale(-0.1),
    "AddDecayedWeights, cautious": sl.Trace(0.9)
    | sl.AddDecayedWeights(0.1, cautious=True)
    | sl.Scale(-0.1),
}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {}

QUICK = {"ScaleBySoap"}
