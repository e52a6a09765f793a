"""Rules that precondition both sides of a matrix: SOAP, Shampoo, Kron."""

from typing import Any

import slalom as sl

RULES: dict[str, Any] = {
    "Cautious": sl.ScaleByAdam() | sl.Cautious() | sl.Scale(-0.1),
    "KeepInitialNorm": sl.sgd(0.1) | sl.KeepInitialNorm(),
    "AddDecayedWeights, cautious": sl.Trace(0.9)
    | sl.AddDecayedWeights(0.1, cautious=True)
    | sl.Scale(-0.1),
}

RECIPES: dict[str, Any] = {}

WRAPPERS: dict[str, Any] = {}

QUICK: set[str] = set()
