"""Rules that precondition both sides of a matrix: SOAP, Shampoo, Kron."""

from typing import Any

import slalom as sl

matrices = sl.where.ndim(min=2)

RULES: dict[str, Any] = {
    "Cautious": sl.ScaleByAdam() | sl.Cautious() | sl.Scale(-0.1),
    "KeepInitialNorm": sl.sgd(0.1) | sl.KeepInitialNorm(),
    # The tests have a 1 × 2 array, which is a matrix only where the layout says so.
    "ScaleBySoap": sl.ScaleBySoap(layout="io").mask(matrices) | sl.Scale(-0.1),
    "ScaleBySoap, one side": (
        sl.ScaleBySoap(0.9, precondition_frequency=1, max_size=2, layout="io").mask(matrices)
        | sl.Scale(-0.1)
    ),
    "ScaleByKlSoap": sl.contrib.ScaleByKlSoap(layout="io").mask(matrices) | sl.Scale(-0.1),
    "ScaleByKlSoap, one side": (
        sl.contrib.ScaleByKlSoap(precondition_frequency=2, max_size=2, layout="io").mask(matrices)
        | sl.Scale(-0.1)
    ),
    "ScaleBySplus": (
        sl.contrib.ScaleBySplus(precondition_frequency=2, layout="io").mask(matrices)
        | sl.Scale(-0.1)
    ),
    "ScaleByKron": sl.ScaleByKron(layout="io").mask(matrices) | sl.Scale(-0.1),
    "ScaleByKron, diagonal": (
        sl.ScaleByKron(0.5, max_size=2, layout="io").mask(matrices) | sl.Scale(-0.1)
    ),
    "ScaleByShampoo": sl.ScaleByShampoo(layout="io").mask(matrices) | sl.Scale(-0.1),
    "ScaleByShampoo, grafted blocks": (
        sl.ScaleByShampoo(1.0, block_size=2, precondition_frequency=2, layout="io")
        .mask(matrices)
        .graft(sl.ScaleByAdam())
        | sl.Scale(-0.1)
    ),
    "AddDecayedWeights, cautious": sl.Trace(0.9)
    | sl.AddDecayedWeights(0.1, cautious=True)
    | sl.Scale(-0.1),
}

RECIPES: dict[str, Any] = {
    "soap": sl.soap(0.1, weight_decay=0.1),
    "kron": sl.kron(0.1, update_probability=0.5),
    "shampoo": sl.shampoo(0.1, adam_weight_decay=0.1),
}

WRAPPERS: dict[str, Any] = {
    "Graft, every_k": sl.sgd(1.0, momentum=0.9).graft(sl.adam(0.1)).every_k(2),
    "Graft, paced": sl.Trace(0.9).every_k(2).graft(sl.ScaleByRms()) | sl.Scale(-0.1),
}
